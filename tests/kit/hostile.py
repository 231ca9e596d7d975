"""Parts of hostile pickles, limits for the code that reads them, and a program that runs what is allowed in pickles.

`python hostile.py FOLDER [NAME ...]` loads everything that `checkpoint.format.allowed` lists with Python's `pickle`,
with hostile arguments; it prints what it tried, and what was run, as JSON. The folder is empty, and must stay so. The
further names are not in the list: they show that the check detects what runs code.
"""

from __future__ import annotations

import importlib
import json
import pickle
import random
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_frozen_patch.checkpoint.format.allowed import ANYTHING, EXPECTED


def text(value: str) -> bytes:
    """Return the opcode that pushes a text."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def named(name: str) -> bytes:
    """Return the opcode that pushes what has a full name, such as "os.system"."""
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode()


@contextmanager
def limited(seconds: int, size: int) -> Iterator[None]:
    """Assert that the block takes at most this much CPU time, and that memory rises by at most `size` bytes.

    It may wait, for a pipe or on a busy machine, ten times as long.
    """
    from memory import memory, reset_peak_memory

    def too_long(*_: Any) -> None:
        raise BaseException(f"it takes more than {seconds} s")  # no `except Exception` may catch it

    reset_peak_memory()
    before = memory("VmRSS")
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 10 * seconds)}
    kept = {number: signal.signal(number, too_long) for number, _ in timers.values()}
    for timer, (_, limit) in timers.items():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert memory("VmHWM") - before < size


def members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repacked(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrite a file of `torch.save` with another pickle."""
    found = members(file)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in found.items():
            archive.writestr(name, change(content) if name.endswith("/data.pkl") else content)


LADDER = b"K\1" + b"2\x86" * 60  # a tuple of the same tuple twice, and so on


def int_of(value: int) -> bytes:
    return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)


EXPENSIVE: dict[str, bytes] = {
    "a slice as a key of a list": b"]q\1(" + b"K\1" * 100 + b"e" + b"h\1cbuiltins\nslice\nK\0K\0\x86Rh\1s" * 30,
    "a ladder in an OrderedDict": b"ccollections\nOrderedDict\n](](" + LADDER + b"Nee\x85R",
    "a ladder in a set": b"cbuiltins\nset\n](" + LADDER + b"e\x85R",
    "a ladder by a tensor's function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nset\nctorch\nTensor\n("
    + b"](" + LADDER + b"et}tR",
    "an OrderedDict of an OrderedDict of ...": b"ccollections\nOrderedDict\nq\1)R"
    + b"".join(b"q\x020h\1](K\1h\2\x86K\2h\2\x86e\x85R" for _ in range(40)),
    "a ladder that begins in stand-ins": b"ccollections\ndeque\n)Rq\2]q\3a0"
    + b"".join(
        b"ccollections\ndeque\n)Rr" + struct.pack("<I", 2 * i) + b"]r" + struct.pack("<I", 2 * i + 1) + b"a0"
        + b"j" + struct.pack("<I", 2 * i + 1) + b"(" + (b"j" + struct.pack("<I", 2 * i - 1)) * 2 + b"e0"
        + b"j" + struct.pack("<I", 2 * i - 1) + b"j" + struct.pack("<I", 2 * i) + b"a0"
        for i in range(2, 45)
    )
    + b"]h\2aj" + struct.pack("<I", 89) + b"a",
    "slices in each other": b"N" + b"".join(b"q\x020cbuiltins\nslice\nh\2NN\x87R" for _ in range(20_000)),
    "one bytearray again and again": b"cbuiltins\nbytearray\n" + b"B" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    + b"\x85Rq\x020](" + b"h\2" * 3000 + b"e",
    "one list again and again": b"](" + b"K\1" * 100_000 + b"eq\x020](" + b"h\2" * 100_000 + b"e",
    "keys that collide": b"}(" + b"".join(int_of(((1 << 61) - 1) * i) + b"N" for i in range(30_000)) + b"u",
    "elements that collide": b"\x8f(" + b"".join(int_of(((1 << 61) - 1) * i) for i in range(30_000)) + b"\x90",
    "empty sets": b"](" + b"\x8f" * 1_000_000 + b"e",
    "stand-ins": b"](cargparse\nNamespace\nq\2" + b"h\2)\x81" * 300_000 + b"e",
    "attributes again and again": b"ccollections\nOrderedDict\n)Rq\2}(" + b"".join(
        text(str(i)) + b"N" for i in range(10_000)) + b"uq\3" + b"0h\2h\3b" * 30_000,
    "a long name": b"c" + b"a" * 1_000_000 + b"\nB\nq\x020](" + b"h\2" * 3000 + b"e",
    "a long path to many": b"]" * 90 + b"(" + b"N" * 400_000 + b"e" + b"a" * 89,
}  # fmt: skip
"""Opcodes, each pushing one object, of small files that would take much memory or time."""


QUIET = ("object.", "pickle.find_class", "sys._getframe", "gc.", "builtins.id", "array.")
"""The beginnings of audit events that run nothing. All others must not be seen, nor imports of new modules."""
TRIES = 150
events: list[str] | None = None


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if events is None or event.startswith(QUIET) or (event == "import" and arguments[0] in sys.modules):
        return
    events.append(f"{event} {str(arguments)[:100]}")


def values(folder: str, names: list[str]) -> list[bytes]:
    """Return arguments, each as the opcodes that push it."""
    said = [
        f"touch {folder}/canary", f"__import__('os').system('touch {folder}/canary')", f"{folder}/canary", "os.system",
        "builtins.exec", "antigravity", "this", "ds_frozen_patch.no_such_module", "__class__", "O8", "f8", "cpu",
        "cuda:0", "xla", "1/2", "", "zip", "${oc.env:HOME}", "subprocess.Popen",
    ]  # fmt: skip
    texts = [text(value) for value in said]
    pairs = [b"}" + text(key) + value + b"s" for key in (*said[3:5], "__reduce__") for value in texts[:3]]
    hooks = ("__setstate__", "__init__", "__call__", "__del__", "__dict__", "_content", "_metadata", "_val", "state")
    pairs += [b"}" + text(key) + named(name) + b"s" for key in hooks for name in random.sample(names, 3)]
    numbers = [b"K\1", b"K\0", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"G" + struct.pack(">d", 1.5)]
    plain = [b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"C\x04\x07\xe4\1\1", b"C\x05touch"]
    nested = [b"(" + texts[0] + texts[1] + b"t", b"]" + texts[0] + b"a", b"]" + texts[1] + numbers[0] + b"\x86a"]
    return [*texts, *pairs, *numbers, *plain, *nested, *(named(name) for name in names)]


def pickles(name: str, pool: list[bytes]) -> Iterator[bytes]:
    """Yield pickles that construct one object and change its state; without arguments where the tools accept none."""
    for _ in range(TRIES):
        count = random.choice((0, 0, 1, 1, 2, 2, 3, 4, 6)) if EXPECTED[name] else 0
        arguments = b"".join(random.choices(pool, k=count))
        made = named(name) + b"(" + arguments + b"t" + random.choice((b"R", b"R", b"\x81"))
        changes = (
            b"",
            random.choice(pool) + b"b",
            b"N" + random.choice(pool) + b"\x86b",
            b"(" + random.choice(pool) + random.choice(pool) + b"u",
            b"(" + random.choice(pool) + b"e",
        )
        yield made + random.choice(changes) + b"."


def installed(name: str) -> bool:
    try:
        return hasattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    except ImportError:
        return False


def main() -> None:
    global events
    folder = sys.argv[1]
    random.seed(0)
    EXPECTED.update(dict.fromkeys(sys.argv[2:], ANYTHING))
    warnings.simplefilter("ignore")
    called = sorted(name for name, takes in EXPECTED.items() if takes is not None and installed(name))
    names = sorted(filter(installed, EXPECTED))
    pool = values(folder, names)
    sys.addaudithook(hook)
    found: dict[str, list[str]] = {}
    loaded = tried = 0
    for again in (False, True):  # what is imported once, as by the first device, is not the argument's doing
        for name in called:
            events = []
            for content in pickles(name, pool):
                tried += 1
                try:
                    pickle.loads(content)
                    loaded += 1
                except Exception:
                    continue
            if again and events:
                found[name] = events[:5]
            events = None
    made = [item.name for item in Path(folder).iterdir()]
    print(json.dumps({"names": called, "tried": tried, "loaded": loaded, "ran": found, "made": made}))


if __name__ == "__main__":
    main()

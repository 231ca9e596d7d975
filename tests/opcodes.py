"""Parts of hostile pickles, and limits for the code that reads them."""

from __future__ import annotations

import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def repacked(file: Path, change: Callable[[bytes], bytes], **options: Any) -> None:
    """Rewrite a file of `torch.save` with another pickle."""
    with zipfile.ZipFile(file) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in found.items():
            is_pickle = name.endswith("/data.pkl")
            archive.writestr(name, change(content) if is_pickle else content, **(options if is_pickle else {}))


LADDER = b"K\1" + b"2\x86" * 40  # a tuple of the same tuple twice, and so on


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

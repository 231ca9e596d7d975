"""Load everything that `checkpoint.format.allowed` lists with Python's `pickle`, with hostile arguments.

A program: `python harmless.py FOLDER [NAME ...]` prints what it tried, and what was run, as JSON. The folder is empty,
and must stay so. The further names are not in the list: they show that the check detects what runs code.
"""

from __future__ import annotations

import importlib
import json
import pickle
import random
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opcodes import named, text

from ds_frozen_patch.checkpoint.format.allowed import ANYTHING, EXPECTED

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

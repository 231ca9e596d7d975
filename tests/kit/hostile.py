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


def members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repacked(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrite a file of `torch.save` with another pickle."""
    found = members(file)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in found.items():
            archive.writestr(name, change(content) if name.endswith("/data.pkl") else content)

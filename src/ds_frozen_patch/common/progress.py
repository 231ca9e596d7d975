"""How far a long piece of work has got, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from .text import human_bytes

SECONDS = 10
"""Between two lines, where there is no bar: in a job's log, or without tqdm."""


@contextmanager
def progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Gives a function that takes the bytes done since its last call.

    It draws a bar where stderr is a terminal and tqdm is installed, and otherwise prints a line every few seconds.

    Args:
        what: is done, in a word or two.
        total: how many bytes there are.
        quiet: show nothing.
    """
    if quiet:
        yield lambda _: None
    elif (bar := _bar(what, total)) is None:
        yield _Lines(what, total).update
    else:
        with bar:
            yield bar.update


def _bar(what: str, total: int) -> Any:
    """A bar of tqdm's; None where it cannot be drawn."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm  # Lightning and DeepSpeed require it, so it is nearly always there
    except ImportError:
        return None
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)


class _Lines:
    """Lines such as "writing: 1.2 GB of 5 GB (24%)"."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.next = what, total, 0, monotonic() + SECONDS

    def update(self, count: int) -> None:
        """Add bytes that are done."""
        self.done += count
        if monotonic() >= self.next:
            self.next = monotonic() + SECONDS
            of = f"{human_bytes(self.done)} of {human_bytes(self.total)}"
            print(f"{self.what}: {of} ({self.done / max(self.total, 1):.0%})", file=sys.stderr, flush=True)

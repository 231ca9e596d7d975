"""What people read: numbers, foreign text, and how far a long piece of work has got."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any


def human_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1000 with three significant digits: "2.4 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:  # else it would be rounded to 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.0f} PB"


def printable(text: str) -> str:
    """Return `text` on one line, with control and other unprintable characters escaped as in Python: "\\x1b[2J"."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(lines: Iterable[str]) -> str:
    """Join lines after making each `printable`, so that text from a file cannot forge a line of its own."""
    return "\n".join(map(printable, lines))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "Did you mean 'prune'?" for the known word that is most like `word`, or "" if none is."""
    from difflib import get_close_matches  # rarely needed

    return "".join(f"Did you mean '{close}'?" for close in get_close_matches(word, list(words), n=1))


def json_lines(value: Any, levels: int) -> str:
    """A value as JSON, with lines for the items of so many levels, since people read it."""
    if levels > 1 and value and isinstance(value, dict):
        items = [f"{json.dumps(key)}: {json_lines(item, levels - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if levels and value and isinstance(value, list):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


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

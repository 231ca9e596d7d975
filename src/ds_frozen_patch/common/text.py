"""Numbers and foreign text, formatted for people."""

from __future__ import annotations

import json
from collections.abc import Iterable
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

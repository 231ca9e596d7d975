"""Numbers and foreign names as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """A number of bytes as a person reads it, in powers of 1000: "2.4 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would act on or cannot show escaped as in Python: "\\x1b[2J"."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

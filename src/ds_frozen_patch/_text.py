"""How numbers are said to people."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """A number of bytes as a person reads it, in powers of 1000: "2.4 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

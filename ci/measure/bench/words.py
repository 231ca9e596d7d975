"""How the parts of the benchmark format what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def ratios(found: dict[str, Any], one: str, other: str) -> list[float]:
    """Return one way's figure by another's, of each round."""
    return [a / b for a, b in zip(found[one], found[other], strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, and the least and the largest."""
    least, middle, most = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({least} to {most})"


def judged(values: Sequence[float], aim: float, form: str = ".2f") -> str:
    """Return the same, and marked where the median misses the aim."""
    said = spread(values, form) if len(values) > 1 else format(values[0], form)
    return said if statistics.median(values) <= aim else f"**{said} missed**"


def size(count: float) -> str:
    """Return bytes with a unit."""
    return (
        f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"
    )


def seconds(values: Sequence[float]) -> str:
    """Return the median of some times."""
    middle = statistics.median(values)
    return f"{1000 * middle:.0f} ms" if middle < 1 else f"{middle:.2f} s"

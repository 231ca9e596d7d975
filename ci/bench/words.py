"""How the parts of `ci/bench.py` say what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def ratios(found: dict[str, Any], one: str, other: str) -> list[float]:
    """One way's figure by another's, of each round."""
    return [a / b for a, b in zip(found[one], found[other], strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the least and the largest."""
    least, middle, most = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({least} to {most})"


def judged(values: Sequence[float], aim: float, form: str = ".2f") -> str:
    """The same, and marked where the median misses the aim."""
    said = spread(values, form) if len(values) > 1 else format(values[0], form)
    return said if statistics.median(values) <= aim else f"**{said} missed**"


def size(count: float) -> str:
    """Bytes as a person says them."""
    return (
        f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"
    )


def seconds(values: Sequence[float]) -> str:
    """The median of some times."""
    middle = statistics.median(values)
    return f"{1000 * middle:.0f} ms" if middle < 1 else f"{middle:.2f} s"

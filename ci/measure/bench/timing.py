"""The engine of the benchmark: what is compared takes turns, and figures are medians and ratios over the rounds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from tables import markdown

Costs = dict[str, Any]


def alternate(ways: Sequence[str], rounds: int, measure: Callable[[str], Costs]) -> dict[str, Costs]:
    """Return a list of each figure of each way, one item a round, and under "first" those of a round before them.

    Each round takes the ways in another order. A way that measured nothing has no figures.
    """
    costs: dict[str, list[Costs]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in random.Random(number).sample(ways, len(ways)) if number else ways:
            os.sync()  # so that nobody waits for what others have written
            costs[way].append(measure(way))
    return {
        way: {"first": first, **{name: [cost[name] for cost in later] for name in first}}
        for way, (first, *later) in costs.items()
    }


def ratios(ways: Mapping[str, Costs], one: str, other: str, figure: str = "seconds") -> list[float]:
    """Return one way's figure by another's, of each round."""
    return [a / b for a, b in zip(ways[one][figure], ways[other][figure], strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, and the least and the largest if there are several."""
    if len(values) == 1:
        return format(values[0], form)
    least, middle, most = (format(value, form) for value in (min(values), median(values), max(values)))
    return f"{middle} ({least} to {most})"


def judged(values: Sequence[float], aim: float, form: str = ".2f") -> str:
    """Return the same, marked if the median is above the aim."""
    return missed(spread(values, form), median(values) > aim)


def missed(text: str, is_missed: bool = True) -> str:
    """Return a figure, marked if it misses its aim."""
    return f"**{text} missed**" if is_missed else text


def size(count: float) -> str:
    """Return bytes with a unit."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def seconds(cost: Costs | Sequence[float]) -> str:
    """Return the median of some times, or of a way's."""
    middle = median(cost["seconds"] if isinstance(cost, dict) else cost)
    return f"{1000 * middle:.0f} ms" if middle < 1 else f"{middle:.2f} s"


def cost_of(way: Costs) -> str:
    """Return the bytes that a way writes, if any, and its seconds."""
    return f"{size(way['bytes'][-1])}, {seconds(way)}" if way["bytes"][-1] else seconds(way)


def table_of_ratios(cases: Mapping[str, Mapping[str, Costs]], pairs: Mapping[str, tuple[str, str]]) -> str:
    """Return a row for each case and a column for each two ways: the ratio of their seconds."""
    rows = [[name, *(spread(ratios(ways, *pair)) for pair in pairs.values())] for name, ways in cases.items()]
    return markdown(["", *pairs], rows)

"""How a save's cost grows with the base and with what is trained: a part of `nox -s bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.finetune import FULL, OURS, Shape, trained_bytes
from bench.saves import measured, ranks
from bench.timing import cost_of, seconds, size
from tables import BENCHMARKS, CHARTS, markdown

ROUNDS = 7
STAGE, PRECISION = 2, "bf16-true"
SHAPE = Shape(hidden=512, intermediate=4096, layers=8, vocabulary=16000, lora=64, tied=False)
# By what grows: the models.
SERIES = {
    "base": [replace(SHAPE, intermediate=width) for width in (1024, 8192, 16384, 24576, 40960)],
    "trained": [replace(SHAPE, lora=rank) for rank in (16, 64, 256, 512, 1024)],
}


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what saves cost, by what grows."""
    found: dict[str, list[dict[str, Any]]] = {}
    with ranks(folder) as pool:
        for what, shapes in SERIES.items():
            points = [measured(pool, shape, STAGE, PRECISION, ((OURS, FULL), rounds)) for shape in shapes]
            found[what] = [{**model, "ways": ways} for model, ways in points]
    return found


def render(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the picture, and what it says in figures."""
    lines = [
        [
            "base grows" if what == "base" else "what is trained grows",
            size(point["frozen_bytes"]),
            f"{point['trainable'] / 1e6:.2g} M",
            seconds([point["ways"][OURS]["first"]["seconds"]]),
            cost_of(point["ways"][OURS]),
            cost_of(point["ways"][FULL]),
        ]
        for what, points in found.items()
        for point in points
    ]
    base, trained = found["base"], found["trained"]

    def grown(way: str, what: str) -> float:
        least, most = (median(point["ways"][way][what]) for point in (base[0], base[-1]))
        return float(most / least)

    steps = [
        point["ways"][OURS]["bytes"][-1] / trained_bytes(STAGE, PRECISION, point["trainable"]) for point in trained
    ]
    return (
        f"![Seconds and bytes of a save]({BENCHMARKS.link(CHARTS / 'growth.svg')})\n\n"
        f"With a base that is {base[-1]['frozen_bytes'] / base[0]['frozen_bytes']:.1f} times larger, our later saves"
        f" take {grown(OURS, 'seconds'):.2f} times as long and write {grown(OURS, 'bytes'):.4f} times the bytes;"
        f" Lightning's take {grown(FULL, 'seconds'):.1f} times as long. With"
        f" {trained[-1]['trainable'] / trained[0]['trainable']:.0f} times more trained parameters, our bytes for each"
        f" byte of their state go from {steps[0]:.3f} to {steps[-1]:.3f} (ZeRO-{STAGE}, bf16).\n\n"
        f"{markdown(['', 'frozen', 'trained', f'{OURS}: first save', 'later ones', FULL], lines)}"
    )

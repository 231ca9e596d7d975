"""How a save's cost grows with the base and with what is trained, and `growth.svg`: a part of `nox -s bench`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import engine
from bench.engine import FULL, OPTIMIZER_BYTES, OURS, Shape
from bench.saves import measured, ranks
from bench.svg import Curve, legend, page, plot
from bench.words import seconds, size
from tables import markdown

ROUNDS = 7
PLOT = Path(__file__).with_name("growth.svg")
STAGE, PRECISION = 2, "bf16-true"
SHAPE = Shape(hidden=512, intermediate=4096, layers=8, vocabulary=16000, lora=64, tied=False)
# By what grows: the models.
SERIES = {
    "base": [replace(SHAPE, intermediate=width) for width in (1024, 8192, 16384, 24576, 40960)],
    "trained": [replace(SHAPE, lora=rank) for rank in (16, 64, 256, 512, 1024)],
}
COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "first": lambda cost: cost["first"]["seconds"],
    "later": lambda cost: statistics.median(cost["seconds"]),
    "bytes": lambda cost: cost["bytes"],
}


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what saves cost, by what grows."""
    found: dict[str, list[dict[str, Any]]] = {what: [] for what in SERIES}
    with ranks(folder) as pool:
        for what, shapes in SERIES.items():
            for shape in shapes:
                model, costs = measured(pool, shape, STAGE, PRECISION, ((OURS, FULL), rounds))
                found[what].append(model | {"ways": costs})
    PLOT.write_text(drawing(found), encoding="utf-8")
    return found


def render(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the picture, and what it says in figures."""
    header = ["", "frozen", "trained", f"{OURS}: first save", "later ones", FULL]
    lines = []
    for what, points in found.items():
        for point in points:
            ours, full = point["ways"][OURS], point["ways"][FULL]
            lines.append(
                [
                    "base grows" if what == "base" else "what is trained grows",
                    size(point["frozen_bytes"]),
                    f"{point['trainable'] / 1e6:.2g} M",
                    seconds([ours["first"]["seconds"]]),
                    f"{seconds(ours['seconds'])}, {size(ours['bytes'])}",
                    f"{seconds(full['seconds'])}, {size(full['bytes'])}",
                ]
            )
    base, trained = found["base"], found["trained"]
    times, bytes_ = ([y for _, y in line(base, OURS, key)] for key in ("later", "bytes"))
    most = [y for _, y in line(base, FULL, "later")]
    grown = base[-1]["frozen_bytes"] / base[0]["frozen_bytes"]
    steps = [y / x for (x, y) in line(trained, OURS, "bytes")]
    return (
        f"![Seconds and bytes of a save]({PLOT.name})\n\n"
        f"With a base that is {grown:.1f} times larger, our later saves take {times[-1] / times[0]:.2f} times as long"
        f" and write {bytes_[-1] / bytes_[0]:.4f} times the bytes; Lightning's take {most[-1] / most[0]:.1f} times as"
        f" long. With {trained[-1]['trainable'] / trained[0]['trainable']:.0f} times more trained parameters, our bytes"
        f" for each byte of their state go from {steps[0]:.3f} to {steps[-1]:.3f} (ZeRO-{STAGE}, bf16).\n\n"
        f"{markdown(header, lines)}"
    )


def line(points: Sequence[dict[str, Any]], way: str, what: str) -> list[tuple[float, float]]:
    """Return a way's curve: what grows, in bytes, and its "first" or "later" seconds, or its bytes."""
    grows = [point["frozen_bytes"] for point in points]
    if len(set(grows)) == 1:
        grows = [(OPTIMIZER_BYTES + engine.weight_bytes(STAGE, PRECISION)) * point["trainable"] for point in points]
    return [(x, COSTS[what](point["ways"][way])) for x, point in zip(grows, points, strict=True)]


CURVES = (
    (OURS, "later", "ours", 'stroke="#0072b2" stroke-width="2"'),
    (OURS, "first", "ours, first save", 'stroke="#0072b2" stroke-width="2" stroke-dasharray="5 4"'),
    (FULL, "later", "plain Lightning", 'stroke="#d55e00" stroke-width="2"'),
)


def drawing(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return four plots: seconds above, bytes below; against the base, and against what is trained."""
    lines: list[str] = []
    for y, what, about in ((40, "base", "frozen weights, MB"), (620, "trained", "trained state, MB")):
        times = [Curve(name, line(found[what], way, which), style) for way, which, name, style in CURVES]
        sizes = [Curve(name, line(found[what], way, "bytes"), style) for way, _, name, style in CURVES[::2]]
        lines += plot(70, y, f"seconds of a save, by {about}", times, unit=(1e6, 1))
        lines += plot(70, y + 290, f"MB on disk, by {about}", sizes, unit=(1e6, 1e6))
    for place, curve in enumerate(times):
        lines += legend(30 + 145 * place, 1180, curve)
    return page(450, 1196, lines)

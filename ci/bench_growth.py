"""How a save's cost grows with the base and with what is trained, and `ci/growth.svg`: a part of `ci/bench.py`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_run
from bench_figures import rows, seconds, size
from bench_run import FULL, OPTIMIZER_BYTES, OURS, RANKS, Shape
from bench_saves import saves
from ranks import Ranks

ROUNDS = 7
PLOT = Path(__file__).with_name("growth.svg")
STAGE, PRECISION = 2, "bf16-true"
SHAPE = Shape(hidden=512, intermediate=4096, layers=8, vocabulary=16000, lora=64, tied=False)
# By what grows: the models.
SERIES = {
    "base": [replace(SHAPE, intermediate=width) for width in (1024, 8192, 16384, 24576, 40960)],
    "trained": [replace(SHAPE, lora=rank) for rank in (16, 64, 256, 512, 1024)],
}


def measure(folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What saves cost, by what grows."""
    found: dict[str, list[dict[str, Any]]] = {}
    pool = Ranks(RANKS, folder / "ranks.txt")
    try:
        for what, shapes in SERIES.items():
            for shape in shapes:
                print(f"  {what}: {shape}", file=sys.stderr, flush=True)
                model = pool(bench_run.start, shape=shape, stage=STAGE, precision=PRECISION)[0]
                costs = saves(pool, folder / "saved", (OURS, FULL), rounds)
                pool(bench_run.end)
                found.setdefault(what, []).append(asdict(model) | {"ways": costs})
    finally:
        pool.stop()
    PLOT.write_text(drawing(found), encoding="utf-8")
    return found


def render(found: dict[str, list[dict[str, Any]]]) -> str:
    """The picture, and what it says in figures."""
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
        f"![Seconds and bytes of a save]({PLOT.parent.name}/{PLOT.name})\n\n"
        f"While the base grows {grown:.1f} times, our later saves take {times[-1] / times[0]:.2f} times as long, and"
        f" {bytes_[-1] / bytes_[0]:.4f} times the bytes; Lightning's take {most[-1] / most[0]:.1f} times as long. While"
        f" what is trained grows {trained[-1]['trainable'] / trained[0]['trainable']:.0f} times, our bytes for each"
        f" trained byte go from {steps[0]:.3f} to {steps[-1]:.3f} (ZeRO-{STAGE}, bf16).\n\n{rows(header, lines)}"
    )


def line(points: Sequence[dict[str, Any]], way: str, what: str) -> list[tuple[float, float]]:
    """A way's curve: what grows, in bytes, and its "first" or "later" seconds, or its bytes."""
    grows = [point["frozen_bytes"] for point in points]
    if len(set(grows)) == 1:
        grows = [(OPTIMIZER_BYTES + bench_run.weight_bytes(STAGE, PRECISION)) * point["trainable"] for point in points]
    return [(x, cost(point["ways"][way], what)) for x, point in zip(grows, points, strict=True)]


def cost(one: dict[str, Any], what: str) -> float:
    """Of a way of saving one model."""
    found: float = {
        "first": one["first"]["seconds"],
        "later": statistics.median(one["seconds"]),
        "bytes": one["bytes"],
    }[what]
    return found


WIDTH, HEIGHT, LEFT, TOP = 330, 220, 70, 40
CURVES = (
    (OURS, "later", "#0072b2", "", "ours"),
    (OURS, "first", "#0072b2", ' stroke-dasharray="5 4"', "ours, first save"),
    (FULL, "later", "#d55e00", "", "plain Lightning"),
)


def drawing(found: dict[str, list[dict[str, Any]]]) -> str:
    """An SVG of four plots: seconds above, bytes below; against the base, and against what is trained."""
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (WIDTH + LEFT) + 20}" height="{2 * 290 + 30}">']
    lines.append('<rect width="100%" height="100%" fill="white"/><g font-family="sans-serif" font-size="12">')
    for column, (what, about) in enumerate((("base", "frozen weights, MB"), ("trained", "trained state, MB"))):
        for row, unit in enumerate(("seconds of a save", "MB on disk")):
            curves = [
                (line(found[what], way, "bytes" if row else which), style)
                for way, which, *style, _ in CURVES
                if not row or which == "later"
            ]
            scale = 1e6 if row else 1.0
            lines += plot(column * (WIDTH + LEFT) + LEFT, row * 290 + TOP, curves, scale, f"{unit}, by {about}")
    for place, (_, _, colour, dashes, name) in enumerate(CURVES):
        x = LEFT + 200 * place
        lines.append(f'<path d="M{x} 600 h30" stroke="{colour}" stroke-width="2"{dashes}/>')
        lines.append(f'<text x="{x + 36}" y="604">{name}</text>')
    return "\n".join([*lines, "</g></svg>"]) + "\n"


def plot(
    x: int, y: int, curves: list[tuple[list[tuple[float, float]], list[str]]], scale: float, about: str
) -> list[str]:
    """One plot with its axes, from zero."""
    right = max(point[0] for points, _ in curves for point in points)
    top = max(point[1] for points, _ in curves for point in points)
    lines = [
        f'<text x="{x}" y="{y - 12}" font-weight="bold">{about}</text>',
        f'<path d="M{x} {y} v{HEIGHT} h{WIDTH}" fill="none" stroke="black"/>',
    ]
    for share in (0, 0.5, 1):
        height, width = y + (1 - share) * HEIGHT + 4, x + share * WIDTH
        lines.append(f'<text x="{x - 6}" y="{height:.0f}" text-anchor="end">{share * top / scale:.3g}</text>')
        lines.append(
            f'<text x="{width:.0f}" y="{y + HEIGHT + 16}" text-anchor="middle">{share * right / 1e6:.0f}</text>'
        )
    for points, (colour, dashes) in curves:
        places = [(x + a / right * WIDTH, y + (1 - b / top) * HEIGHT) for a, b in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        lines += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    return lines

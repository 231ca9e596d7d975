"""Loss curves of runs that go on with another number of ranks, against one that nothing interrupts.

`nox -f ci/noxfile.py -s bench -- elastic` trains on CPU ranks as the tests do, prints how far apart the curves are, and
draws them into `ci/elastic.svg`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "contract")]

PLOT = ROOT / "ci" / "elastic.svg"
PRECISIONS = ("32-true", "bf16-mixed")
STAGES = (1, 2, 3)
# Where the run goes on from 4 ranks, or from 2: with how many, and how many batches are accumulated.
FROM_4 = ((4, 1), (2, 1), (1, 1), (3, 1), (2, 2), (1, 4))
FROM_2 = ((4, 1),)


def main() -> None:
    """Train, print the table and draw the plot."""
    import test_elastic
    from ranks import Ranks

    curves: dict[str, list[float]] = {}
    print("| ZeRO | precision | ranks | accumulated | largest relative distance of a step's loss |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        pools = {number: Ranks(number, Path(folder, f"ranks{number}.txt")) for number in (1, 2, 3, 4)}

        def train(number: int, accumulate: int, **options: Any) -> list[float]:
            ran = pools[number](test_elastic.train, world_size=number, accumulate=accumulate, **options)
            return test_elastic.curve(ran, accumulate)

        for stage in STAGES:
            for precision in PRECISIONS:
                shared: dict[str, Any] = {"stage": stage, "precision": precision}
                for before, then in ((4, FROM_4), (2, FROM_2)):
                    out = f"{folder}/{stage}-{precision}-{before}"
                    whole = train(before, 1, out=out, **shared)
                    curves.setdefault(f"{before} ranks, uninterrupted", whole)
                    for number, accumulate in then:
                        if stage == 2 and accumulate > 1 and test_elastic.LOSES_BATCHES:
                            continue  # DeepSpeed drops all but the last
                        resume = f"{out}/epoch=0.ckpt"
                        found = train(number, accumulate, out=f"{out}-{number}", resume=resume, **shared)
                        pairs = zip(found, whole[-len(found) :], strict=True)
                        apart = max(abs(one - other) / other for one, other in pairs)
                        print(
                            f"| {stage} | {precision} | {before} to {number} | {accumulate} | {apart:.1e} |", flush=True
                        )
                        curves.setdefault(f"{before} to {number} ranks, {accumulate} accumulated", found)
        for pool in pools.values():
            pool.stop()
    PLOT.write_text(plot(curves), encoding="utf-8")
    print(f"\nDrawn into {PLOT.relative_to(ROOT)}.")


def plot(curves: dict[str, list[float]]) -> str:
    """An SVG of the curves, each ending at the last step, those that go on in dashes."""
    width, height, left, top = 640, 320, 60, 20
    steps = max(map(len, curves.values()))
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    colours = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#999999", "#b8860b")

    def at(step: int, value: float) -> str:
        x = left + step / (steps - 1) * (width - left - 20)
        return f"{x:.1f},{top + (high - value) / (high - low) * (height - top - 40):.1f}"

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20 * len(curves)}">']
    lines.append('<rect width="100%" height="100%" fill="white"/><g font-family="sans-serif" font-size="12">')
    lines += [f'<text x="4" y="{top + 4}">{high:.3f}</text>', f'<text x="4" y="{height - 36}">{low:.3f}</text>']
    about = f"loss of each step of the optimizer, 1 to {steps}, in ZeRO-1 and fp32"
    lines.append(f'<text x="{left}" y="{height - 12}">{about}</text>')
    for place, (name, curve) in enumerate(curves.items()):
        first, colour = steps - len(curve), colours[place % len(colours)]
        points = " ".join(at(first + step, value) for step, value in enumerate(curve))
        style = f'fill="none" stroke="{colour}" stroke-width="{2 if first else 5}"'
        dashes = f' stroke-dasharray="6 {4 + 2 * place}"' if first else ' stroke-opacity="0.4"'
        lines.append(f'<polyline points="{points}" {style}{dashes}/>')
        y = height + 20 * place
        lines.append(f'<path d="M{left} {y} h40" {style}{dashes}/><text x="{left + 50}" y="{y + 4}">{name}</text>')
    return "\n".join([*lines, "</g></svg>"]) + "\n"


if __name__ == "__main__":
    main()

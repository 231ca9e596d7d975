"""Loss curves of runs that go on with another number of ranks, against one that nothing interrupts.

`nox -f ci/noxfile.py -s bench -- elastic` trains on CPU ranks as the tests do, prints how far apart the curves are, and
draws them into `elastic.svg`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.svg import Curve, legend, page, plot
from tables import ROOT

PLOT = Path(__file__).with_name("elastic.svg")
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#999999", "#b8860b")
PRECISIONS = ("32-true", "bf16-mixed")
STAGES = (1, 2, 3)
# Where the run goes on from 4 ranks, or from 2: with how many, and how many batches are accumulated.
FROM_4 = ((4, 1), (2, 1), (1, 1), (3, 1), (2, 2), (1, 4))
FROM_2 = ((4, 1),)


def main() -> None:
    """Train, print the table and draw the plot."""
    sys.path.append(str(ROOT / "tests" / "contract"))
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
    PLOT.write_text(drawing(curves), encoding="utf-8")
    print(f"\nDrawn into {PLOT.relative_to(ROOT)}.")


def drawing(curves: dict[str, list[float]]) -> str:
    """Return the curves, each ending at the last step, those that go on in dashes."""
    steps = max(map(len, curves.values()))
    low = min(value for curve in curves.values() for value in curve)
    drawn = []
    for place, (name, losses) in enumerate(curves.items()):
        first = steps - len(losses)
        dashes = f'stroke-width="2" stroke-dasharray="6 {4 + 2 * place}"' if first else 'stroke-width="5" opacity="0.4"'
        style = f'stroke="{COLOURS[place % len(COLOURS)]}" {dashes}'
        drawn.append(Curve(name, [(first + step + 1, loss) for step, loss in enumerate(losses)], style))
    lines = plot(60, 40, "loss of each step of the optimizer, in ZeRO-1 and fp32", drawn, low=(1, low))
    for place, curve in enumerate(drawn):
        lines += legend(60, 300 + 20 * place, curve)
    return page(420, 300 + 20 * len(drawn), lines)

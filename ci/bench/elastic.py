"""How close a run's losses stay to an uninterrupted run's when it goes on with another number of ranks.

`nox -f ci/noxfile.py -s bench -- elastic` trains on CPU ranks as the tests do, and prints a table.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from ranks import Ranks
from tables import markdown

# From how many ranks to how many, and how many batches are accumulated then.
CHANGES = ((4, 4, 1), (4, 2, 1), (4, 1, 1), (4, 3, 1), (4, 2, 2), (4, 1, 4), (2, 4, 1))
HEADER = ("ZeRO", "precision", "ranks", "accumulated", "largest relative distance of a step's loss")


def main() -> None:
    """Train, and print the table."""
    from contract import test_elastic

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pools = {number: Ranks(number, Path(folder, f"ranks{number}.txt")) for number in (1, 2, 3, 4)}

        def train(number: int, accumulate: int, **options: Any) -> list[float]:
            ran = pools[number](test_elastic.train, world_size=number, accumulate=accumulate, **options)
            return test_elastic.curve(ran, accumulate)

        for stage, precision in product((1, 2, 3), ("32-true", "bf16-mixed")):
            shared: dict[str, Any] = {"stage": stage, "precision": precision}
            outs = {number: f"{folder}/{stage}-{precision}-{number}" for number in (4, 2)}
            whole = {number: train(number, 1, out=out, **shared) for number, out in outs.items()}
            for before, then, accumulate in CHANGES:
                if stage == 2 and accumulate > 1 and test_elastic.LOSES_BATCHES:
                    continue  # DeepSpeed drops all but the last
                resume = f"{outs[before]}/epoch=0.ckpt"
                found = train(then, accumulate, out=f"{outs[before]}-{then}", resume=resume, **shared)
                pairs = zip(found, whole[before][-len(found) :], strict=True)
                apart = max(abs(one - other) / other for one, other in pairs)
                rows.append([str(stage), precision, f"{before} to {then}", str(accumulate), f"{apart:.1e}"])
                print("  " + ", ".join(rows[-1]), file=sys.stderr, flush=True)
        for pool in pools.values():
            pool.stop()
    print(markdown(HEADER, rows))

"""What a save costs, in seconds and bytes: full, trainable-only and weights alone, each in turn, from one run.

One CPU rank with ZeRO-2; the first save of each kind is not counted, since fingerprints are made once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_checkpoint

import ds_frozen_patch

FULL, SMALL, WEIGHTS = "full", "trainable-only", "weights alone"


def save(trainer: Any, kind: str, target: Path) -> None:
    """Save one checkpoint of a kind."""
    if kind == FULL:
        with ds_frozen_patch.full_checkpoint():
            trainer.save_checkpoint(target)
    else:
        trainer.save_checkpoint(target, weights_only=kind == WEIGHTS)


def cost(trainer: Any, kind: str) -> tuple[float, int]:
    """Seconds and bytes of one save."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        save(trainer, kind, Path(folder, "saved.ckpt"))
        return time.perf_counter() - begun, bench_checkpoint.size(Path(folder))


def main() -> None:
    """Print what each kind costs, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ds_frozen_patch.patch()
    print("training one step", file=sys.stderr)
    trainer = bench_checkpoint.train()
    kinds = (FULL, SMALL, WEIGHTS)
    for kind in kinds:
        cost(trainer, kind)
    rounds = [{kind: cost(trainer, kind) for kind in kinds} for _ in range(given.rounds)]
    best = {kind: min(one[kind] for one in rounds) for kind in kinds}
    print("\n| save | s | MB |\n|---|---|---|")
    for kind, (seconds, size) in best.items():
        print(f"| {kind} | {seconds:.2f} | {size / 1e6:.0f} |")
    for kind in (SMALL, WEIGHTS):
        seconds, size = (full / own for full, own in zip(best[FULL], best[kind], strict=True))
        print(f"full / {kind}: {seconds:.1f} times the seconds, {size:.1f} times the bytes")


if __name__ == "__main__":
    main()

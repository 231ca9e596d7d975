"""What going to another number of ranks costs, resharded or by DeepSpeed's converter: a part of `ci/bench.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_checkpoint
from bench_checkpoint import Work

ROUNDS = 3
RESHARD, RESHARD_FULL = "reshard, trainable-only", "reshard, full"
CONVERT, CONVERT_FULL = "ds_to_universal, trainable-only", "ds_to_universal, full"
RANKS = 4


def resharded() -> Work:
    """Ours."""
    from ds_frozen_patch.checkpoint.tools.reshard import reshard

    return lambda source, target: reshard(source, target / "out.ckpt", ranks=RANKS)


def converted() -> Work:
    """DeepSpeed's, in one process, as its worker processes would take more memory."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    def work(source: Path, target: Path) -> None:
        main(
            Namespace(
                input_folder=str(source / "checkpoint"), output_folder=str(target / "out.ckpt" / "checkpoint"),
                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                inject_missing_state=True,
            )
        )  # fmt: skip

    return work


WAYS = {RESHARD: resharded, RESHARD_FULL: resharded, CONVERT: converted, CONVERT_FULL: converted}
PAIRS = ((RESHARD, RESHARD_FULL, 5, 1), (RESHARD, CONVERT, 1, 0.5), (RESHARD_FULL, CONVERT_FULL, 1, 0.5))


def check(made: Mapping[str, Path]) -> None:
    """Raise unless what was resharded holds the same weights, and is for that many ranks."""
    from ds_frozen_patch import inspect, verify

    for name in (RESHARD, RESHARD_FULL):
        path = made[name] / "out.ckpt"
        if inspect(path).world_size != RANKS or verify(path).problems:
            raise AssertionError(f"{path} is not what it should be: {verify(path).problems}")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The cost of each way."""
    full, small = bench_checkpoint.full(folder), bench_checkpoint.small(folder)
    sources = {RESHARD: small, RESHARD_FULL: full, CONVERT: small, CONVERT_FULL: full}
    return bench_checkpoint.measured("bench_reshard", sources, rounds, check)


def render(found: dict[str, Any]) -> str:
    """The tables."""
    return bench_checkpoint.report(found, PAIRS)

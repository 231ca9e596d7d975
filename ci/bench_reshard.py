"""What going to another number of ranks costs, full against trainable-only: `nox -f ci/noxfile.py -s "bench(reshard)"`.

Resharded for four ranks, and made universal by DeepSpeed's own converter. Prints the shortest time of each way, in a
process of its own, its peak memory, and the ratios.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import bench_checkpoint
from bench_checkpoint import Work

RESHARD, RESHARD_FULL = "reshard, trainable-only", "reshard, full"
CONVERT, CONVERT_FULL = "ds_to_universal, trainable-only", "ds_to_universal, full"
RANKS = 4


def resharded() -> Work:
    """Ours."""
    from ds_frozen_patch.checkpoint.resharding import reshard

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


if __name__ == "__main__":
    bench_checkpoint.work_if_told(WAYS)
    with bench_checkpoint.checkpoint(__doc__) as (full, rounds):
        small = full.with_name("small.ckpt")
        subprocess.run([sys.executable, "-m", "ds_frozen_patch.cli", "prune", full, small, "-q"], check=True)
        sources = {RESHARD: small, RESHARD_FULL: full, CONVERT: small, CONVERT_FULL: full}
        costs = bench_checkpoint.measured(list(sources.items()), rounds, check)
    bench_checkpoint.report(costs, PAIRS)

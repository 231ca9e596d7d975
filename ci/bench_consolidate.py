"""What `consolidate` costs against DeepSpeed's zero_to_fp32: a part of `ci/bench.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_checkpoint
from bench_checkpoint import Work

ROUNDS = 3
THEIRS = "zero_to_fp32, full"
TRAINABLE = "consolidate, trainable-only"
TRAINABLE_NOT_SYNCED = f"{TRAINABLE}, without fsync"
FULL = "consolidate, full"
FULL_NOT_SYNCED = f"{FULL}, without fsync"


def theirs() -> Work:
    """DeepSpeed's. It leaves frozen weights in their dtype."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    return lambda source, target: convert_zero_checkpoint_to_fp32_state_dict(source, target, max_shard_size=None)


def ours() -> Work:
    """Ours. It makes all of them fp32."""
    import torch  # noqa: F401

    from ds_frozen_patch.checkpoint.tools.consolidate import consolidate

    return lambda source, target: consolidate(source, target / "made.ckpt")


WAYS = {
    THEIRS: theirs,
    TRAINABLE: ours,
    TRAINABLE_NOT_SYNCED: bench_checkpoint.without_fsync(ours),
    FULL: ours,
    FULL_NOT_SYNCED: bench_checkpoint.without_fsync(ours),
}
PAIRS = (
    (TRAINABLE, THEIRS, 10, 0.1),
    (TRAINABLE_NOT_SYNCED, THEIRS, 10, 0.1),
    (FULL, THEIRS, 1, 0.5),
    (FULL_NOT_SYNCED, THEIRS, 1, 0.5),
)


def check(made: Mapping[str, Path]) -> None:
    """Raise unless all have written the same, as fp32, and of a trainable-only checkpoint what it has."""
    import torch

    expected = torch.load(made[THEIRS] / "pytorch_model.bin", weights_only=True, mmap=True)
    for name in (TRAINABLE, FULL):
        found = torch.load(made[name] / "made.ckpt", weights_only=False, mmap=True)["state_dict"]
        wanted = {key for key in expected if name == FULL or ".base." not in key}
        if found.keys() != wanted or not all(
            bench_checkpoint.same(found[k].float(), expected[k].float()) for k in found
        ):
            raise AssertionError(f"{name} has not made what {THEIRS} made")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The cost of each way."""
    full, small = bench_checkpoint.full(folder), bench_checkpoint.small(folder)
    sources = {name: small if name in (TRAINABLE, TRAINABLE_NOT_SYNCED) else full for name in WAYS}
    return bench_checkpoint.measured("bench_consolidate", sources, rounds, check)


def render(found: dict[str, Any]) -> str:
    """The tables."""
    return bench_checkpoint.report(found, PAIRS)

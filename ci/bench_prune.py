"""What `prune` costs against loading, deleting and saving: a part of `ci/bench.py`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_checkpoint
from bench_checkpoint import Work

ROUNDS = 3
BY_HAND = "load, delete, save"
PRUNE = "prune --no-fingerprints"
NOT_SYNCED = "the same without fsync"
FINGERPRINTS = "prune"


def by_hand() -> Work:
    """What one would write with torch alone."""
    import torch

    def work(source: Path, target: Path) -> None:
        for file in source.glob("checkpoint/*"):
            made = target / "checkpoint" / file.name
            made.parent.mkdir(exist_ok=True)
            if file.name.endswith("model_states.pt"):
                state = torch.load(file, weights_only=False)
                for name in state["frozen_param_shapes"]:
                    del state["module"][name]
                state["frozen_param_shapes"] = state["frozen_param_fragments"] = None
                torch.save(state, made)
            else:
                shutil.copyfile(file, made)
        shutil.copyfile(source / "latest", target / "latest")

    return work


def pruned() -> Work:
    """Ours, which then needs no torch."""
    from ds_frozen_patch.checkpoint.tools.prune import prune

    return lambda source, target: prune(source, target / "pruned", fingerprints=False)


def pruned_with_fingerprints() -> Work:
    """Ours."""
    import torch  # noqa: F401

    from ds_frozen_patch.checkpoint.tools.prune import prune

    return lambda source, target: prune(source, target / "pruned")


WAYS = {
    BY_HAND: by_hand,
    PRUNE: pruned,
    NOT_SYNCED: bench_checkpoint.without_fsync(pruned),
    FINGERPRINTS: pruned_with_fingerprints,
}
PAIRS = ((PRUNE, BY_HAND, 20, 0.1), (NOT_SYNCED, BY_HAND, 20, 0.1), (FINGERPRINTS, BY_HAND, 20, 0.1))


def check(made: Mapping[str, Path]) -> None:
    """Raise unless all have written the same, but for our manifest."""
    import torch

    from ds_frozen_patch.manifest import KEY

    for expected in made[BY_HAND].glob("checkpoint/*.pt"):
        states = torch.load(expected, weights_only=False, mmap=True)
        for name in (PRUNE, NOT_SYNCED, FINGERPRINTS):
            file = made[name] / "pruned" / "checkpoint" / expected.name
            found = torch.load(file, weights_only=False, mmap=True)
            if "module" in found:
                del found[KEY]
            if not bench_checkpoint.same(found, states):
                raise AssertionError(f"{file} is not {expected}")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """The cost of each way."""
    full = bench_checkpoint.full(folder)
    return bench_checkpoint.measured("bench_prune", dict.fromkeys(WAYS, full), rounds, check)


def render(found: dict[str, Any]) -> str:
    """The tables."""
    return bench_checkpoint.report(found, PAIRS)

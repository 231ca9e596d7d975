"""What `inspect` costs on a large checkpoint against a small one: `nox -f ci/noxfile.py -s "bench(inspect)"`.

Both are made here with as many tensors, of the form that ZeRO-2 gives a LoRA fine-tune of a model with 300 layers; they
differ in nothing but the width of a layer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from ds_frozen_patch.checkpoint.inspection import inspect

LAYERS = 300


def make(folder: Path, megabytes: int) -> Path:
    """A full checkpoint of about this size, most of it frozen weights of bf16; zeros, as nothing is read."""
    width = int((megabytes * 1e6 / 2 / LAYERS) ** 0.5)
    frozen = {f"layers.{i}.weight": torch.zeros(width, width, dtype=torch.bfloat16) for i in range(LAYERS)}
    trained = {f"layers.{i}.lora": torch.zeros(width, dtype=torch.bfloat16) for i in range(LAYERS)}
    flat = torch.zeros(LAYERS * width)
    model = {
        "module": {**frozen, **trained},
        "param_shapes": [{name: tensor.shape for name, tensor in trained.items()}],
        "buffer_names": [],
        "dp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
    }
    optimizer = {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": [{"exp_avg": flat.clone(), "exp_avg_sq": flat.clone()}],
    }
    inner = folder / "checkpoint"
    inner.mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    torch.save(model, inner / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": optimizer}, inner / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def seconds(checkpoint: Path, rounds: int) -> float:
    """The shortest of some rounds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        inspect(checkpoint)
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=2000, help="MB (default: %(default)s)")
    parser.add_argument("--small", type=int, default=20, help="MB (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print("writing the checkpoints", file=sys.stderr)
        checkpoints = {size: make(Path(scratch, str(size)), size) for size in (given.small, given.large)}
        for checkpoint in checkpoints.values():
            inspect(checkpoint)
        found = {size: seconds(checkpoint, given.rounds) for size, checkpoint in checkpoints.items()}
    for size, time_ in found.items():
        print(f"inspect, {size} MB: {1000 * time_:.1f} ms")
    print(f"ratio: {found[given.large] / found[given.small]:.2f}")


if __name__ == "__main__":
    main()

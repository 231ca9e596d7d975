"""What `inspect` costs on a large checkpoint against a small one: a part of `nox -s bench`.

Both are made here with as many tensors, of the form that ZeRO-2 gives a LoRA fine-tune of a model with 300 layers; they
differ in nothing but the width of a layer.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from bench.timing import Costs, alternate, ratios, spread
from tables import markdown

from ds_frozen_patch.tools.inspect import inspect

ROUNDS = 20
LAYERS = 300
SIZES = {"small": 20, "large": 2000}  # MB


def make(folder: Path, megabytes: int) -> Path:
    """Return a full checkpoint of about this size, most of it frozen weights of bf16; zeros, as nothing is read."""
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


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return seconds of both, by turns; the first ones read the disk."""
    places = {name: make(folder / f"inspected-{name}", size) for name, size in SIZES.items()}

    def inspected(name: str) -> Costs:
        begun = time.perf_counter()
        inspect(places[name])
        return {"seconds": time.perf_counter() - begun}

    found = alternate(tuple(places), rounds, inspected)
    for place in places.values():
        shutil.rmtree(place)
    return found


def render(found: dict[str, Any]) -> str:
    """Return both, and their ratio."""
    lines = [
        [f"{size} MB", spread([1000 * value for value in found[name]["seconds"]], ".1f")]
        for name, size in SIZES.items()
    ]
    said = f"The large one takes {spread(ratios(found, 'large', 'small'))} of the small one's time."
    return f"{said}\n\n{markdown(['`inspect` of', 'ms'], lines)}"

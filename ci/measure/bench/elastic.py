"""A load at another world size, beside DeepSpeed's universal checkpoints: a part of `nox -s bench`.

Two ranks train with LoRA and save. Then new processes load at another world size: under `patch()` at once, and without
it the same checkpoint after `ds_to_universal`, run first by one process. Whether both load the same is for `tests/`.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import training
from bench import finetune
from bench.finetune import Shape
from bench.saves import ranks
from bench.timing import Costs, alternate, judged, ratios, size, spread
from memory import memory, reset_peak_memory
from tables import markdown

ROUNDS = 2
SHAPE = Shape(hidden=1024, intermediate=4096, layers=16, vocabulary=32000, lora=256, tied=False)
SAVED_BY, NUMBERS, STAGES = 2, (1, 4), (2, 3)
OURS, UNIVERSAL = "`patch()`", "`ds_to_universal`, `load_universal`"
TAG = "a"


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the trained parameters, and what each way costs by ZeRO stage and world size."""
    cases, trained = [], 0
    for stage in STAGES:
        source, converted = folder / f"{stage}-saved", folder / f"{stage}-universal"
        with ranks(folder, SAVED_BY) as pool:
            trained = pool(save, stage=stage, path=str(source))[0]
        for number in NUMBERS:

            def begin(way: str, given: Any = (stage, number, source, converted)) -> Costs:
                stage, number, source, converted = given
                print(f"  ZeRO-{stage}, {number} ranks, {way}", file=sys.stderr, flush=True)
                cost: Costs = {"converting": 0.0, "memory": 0}
                if way == UNIVERSAL:
                    with ranks(folder, 1) as pool:
                        cost = pool(convert, source=str(source), target=str(converted))[0]
                path = str(converted if way == UNIVERSAL else source)
                with ranks(folder, number) as pool:
                    loads = pool(load, stage=stage, path=path, way=way)
                shutil.rmtree(converted, ignore_errors=True)
                seconds, added = (max(each[what] for each in loads) for what in ("seconds", "memory"))
                return {"seconds": cost["converting"] + seconds, **cost, "memory": max(cost["memory"], added)}

            cases.append({"stage": stage, "ranks": number, "ways": alternate((OURS, UNIVERSAL), rounds, begin)})
    return {"trained": trained, "cases": cases}


def _engine(stage: int, universal: bool = False) -> Any:
    """Return an engine of this rank, which trains adapters."""
    import deepspeed
    import torch

    model = finetune.lora(SHAPE, torch.bfloat16)
    adam = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    config = {**training.settings(stage), "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    config |= {"checkpoint": {"load_universal": True}} if universal else {}
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def save(stage: int, path: str) -> int:
    """Train a step under `patch()` and save, on each rank; returns how many parameters are trained."""
    import torch

    import ds_frozen_patch

    with ds_frozen_patch.patched():
        engine = _engine(stage)
        batch = torch.arange(16).reshape(2, 8)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        engine.save_checkpoint(path, tag=TAG)
    return sum(getattr(value, "ds_numel", value.numel()) for value in engine.module.parameters() if value.requires_grad)


def convert(source: str, target: str) -> Costs:
    """Convert to a universal checkpoint; returns seconds, and memory above what the process had before."""
    from deepspeed.checkpoint import ds_to_universal

    before = memory("VmRSS")
    reset_peak_memory()
    begun = time.perf_counter()
    training.convert_to_universal(ds_to_universal, Path(source, TAG), Path(target, TAG))
    Path(target, "latest_universal").write_text(TAG)
    return {"converting": time.perf_counter() - begun, "memory": memory("VmHWM") - before}


def load(stage: int, path: str, way: str) -> Costs:
    """Load on each rank; returns seconds, and memory above what the rank had before."""
    import torch

    import ds_frozen_patch

    with nullcontext() if way == UNIVERSAL else ds_frozen_patch.patched():
        engine = _engine(stage, way == UNIVERSAL)
        torch.distributed.barrier()
        before = memory("VmRSS")
        reset_peak_memory()
        begun = time.perf_counter()
        engine.load_checkpoint(path, tag=TAG, load_module_strict=way != UNIVERSAL)
        torch.distributed.barrier()
        return {"seconds": time.perf_counter() - begun, "memory": memory("VmHWM") - before}


def render(found: dict[str, Any]) -> str:
    """Return a line for each stage and world size."""
    lines = []
    for case in found["cases"]:
        ways = case["ways"]
        costs = [f"{spread(ways[way]['seconds'])}, {size(median(ways[way]['memory']))}" for way in (OURS, UNIVERSAL)]
        shares = (judged(ratios(ways, OURS, UNIVERSAL, figure), 1 / 3) for figure in ("seconds", "memory"))
        lines.append([f"ZeRO-{case['stage']}, to world size {case['ranks']}", *costs, *shares])
    about = f"{found['trained'] / 1e6:.2g} M trained parameters in bf16, with AdamW, saved by {SAVED_BY} ranks"
    header = ["", OURS, UNIVERSAL, "of the time (aim 0.33)", "of the memory (aim 0.33)"]
    return (
        f"{about}: seconds, of the conversion too, and the memory of the process that takes most, above what it had"
        f" before.\n\n{markdown(header, lines)}"
    )

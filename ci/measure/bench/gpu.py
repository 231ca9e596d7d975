"""What saves, their first fingerprints and their stalls cost on a GPU: `nox -f ci/noxfile.py -s bench -- gpu`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from bench import engine
from bench.engine import (
    COPY,
    FLOOR,
    FULL,
    NATIVE,
    NATIVE_SYNCED,
    OURS,
    OURS_ASYNC,
    OURS_UNSYNCED,
    PASS,
    READ,
    UNSYNCED,
    Shape,
)
from bench.saves import shuffled
from bench.words import ratios, seconds, size, spread
from ranks import Ranks
from tables import markdown

ROUNDS = 5
STAGES = (2, 3)
SHAPE = Shape(hidden=2048, intermediate=8192, layers=24, vocabulary=32000, lora=64, tied=False)
SAVES = (OURS_UNSYNCED, NATIVE, UNSYNCED, OURS, NATIVE_SYNCED, FLOOR, OURS_ASYNC, COPY)
PASSES = (PASS, READ)  # of a base that is whole on each rank


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return what saves cost on one GPU, by ZeRO stage; the first round is kept apart."""
    pool = Ranks(1, folder / "ranks.txt", "gpu")
    try:
        return {f"ZeRO-{stage}": pool(_fit, stage=stage, place=str(folder), rounds=rounds)[0] for stage in STAGES}
    finally:
        pool.stop()


def _fit(stage: int, place: str, rounds: int) -> dict[str, Any]:
    """Measure at the end of a fit, before Lightning moves the model to the CPU."""
    import torch
    from lightning.pytorch.callbacks import Callback

    import ds_frozen_patch
    from ds_frozen_patch.parameters import numel_of

    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    class Measures(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            ds_frozen_patch.unpatch()  # which leaves no trace: each way patches, or does not
            values = list(module.parameters())
            found["trainable"] = sum(numel_of(value) for value in values if value.requires_grad)
            found["frozen"] = sum(numel_of(value) for value in values if not value.requires_grad)
            engine.use(trainer, stage, found["trainable"])
            ways = (*SAVES, *(PASSES if stage == 2 else ()))
            found["ways"] = {way: {"seconds": [], "beside": [], "until": [], "gpu": 0} for way in (*ways, FULL)}
            for number in range(rounds + 1):
                for way in shuffled(ways, number):
                    _measure(way, f"{place}/saved", found["ways"][way], is_first=not number)
            _measure(FULL, f"{place}/saved", found["ways"][FULL])
            found["steps"] = engine.steps(3 * rounds)

    ds_frozen_patch.patch()
    trainer = engine.trainer(stage, "bf16-true", callbacks=[Measures()])
    trainer.fit(engine.module(SHAPE, "bf16-true"), engine.data())
    engine.end()
    return found


def _measure(way: str, path: str, costs: dict[str, Any], is_first: bool = False) -> None:
    """Save in a way; adds what it costs, and the memory of the GPU that it takes at most beside what is there."""
    import torch

    os.sync()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cost = engine.save(way, path)
    gpu = torch.cuda.max_memory_allocated() - before
    costs["bytes"] = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    shutil.rmtree(path, ignore_errors=True)
    if is_first:
        costs["first"] = {"seconds": cost.seconds, "gpu": gpu}
        return
    costs["seconds"].append(cost.seconds)
    costs["until"].append(cost.until)
    costs["beside"].extend(cost.beside)
    costs["gpu"] = max(costs["gpu"], gpu)


def render(found: dict[str, Any]) -> str:
    """Return a table for each stage, and one of what they come to."""
    case = next(iter(found.values()))
    about = (
        f"One {case['device']}, {case['frozen'] / 1e9:.2g} billion frozen bf16 parameters,"
        f" {case['trainable'] / 1e6:.2g} M trained ones, saved at the end of a `fit`, where they are on the GPU.\n"
    )
    names = (*SAVES, FULL, *PASSES)
    lines = [
        [way, *(_cell(case["ways"][way]) if way in case["ways"] else "" for case in found.values())] for way in names
    ]
    ways = [{way: cost["seconds"] for way, cost in case["ways"].items()} for case in found.values()]
    first = [case["ways"][OURS_UNSYNCED]["first"] for case in found.values()]
    beside = [case["ways"][OURS_ASYNC]["beside"] for case in found.values()]
    aims = [
        ["time, the flag, neither synced", *(spread(ratios(way, OURS_UNSYNCED, NATIVE)) for way in ways)],
        ["time, the flag, both synced", *(spread(ratios(way, OURS, NATIVE_SYNCED)) for way in ways)],
        ["time, floor with fsync", *(spread(ratios(way, OURS, FLOOR)) for way in ways)],
        ["stall of an asynchronous save, a copy to the CPU", *(spread(ratios(way, OURS_ASYNC, COPY)) for way in ways)],
        ["steps while it writes", *(seconds(each) if each else "none was long enough" for each in beside)],
        ["steps with nothing beside them", *(seconds(case["steps"]) for case in found.values())],
        ["first save, with the fingerprints", *(f"{cost['seconds']:.2f} s" for cost in first)],
        ["memory of the GPU that it takes", *(size(cost["gpu"]) for cost in first)],
        ["memory of the GPU that a later one takes", *(size(case["ways"][OURS]["gpu"]) for case in found.values())],
    ]
    return f"{about}\n{markdown(['', *found], lines)}\n{markdown(['ours against', *found], aims)}"


def _cell(way: dict[str, Any]) -> str:
    return f"{size(way['bytes'])}, {seconds(way['seconds'])}" if way["bytes"] else seconds(way["seconds"])

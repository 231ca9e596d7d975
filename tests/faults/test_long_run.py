"""Many saves in one process leave nothing behind, in memory or on disk."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from kit import runs
from kit.cell import Callback, DeepSpeedStrategy, ModelCheckpoint
from memory import memory, open_files

import ds_frozen_patch
from ds_frozen_patch.settings import Export

WARM = 8  # steps, or rounds, until all that is made once has been made
ROOM = 16 * 2**20
"""Bytes that a process may grow by: malloc keeps some of what was freed, and not always as much."""


def held(module: Any) -> Counter[str]:
    """Count everything that a save could leave behind in this process."""
    gc.collect()
    found = Counter(f"objects of {type(item).__module__}.{type(item).__name__}" for item in gc.get_objects())
    found["files"] = open_files()
    found["threads"] = max(threading.active_count(), len([*Path("/proc/self/task").iterdir()]))
    for owner in (*module.modules(), *module.parameters()):
        for name, value in vars(owner).items():
            if name.endswith("_hooks") and hasattr(value, "__len__"):
                found[f"hooks in {name}"] += len(value)
    for name, ours in list(sys.modules.items()):
        if name.partition(".")[0] == "ds_frozen_patch":
            for attribute, value in vars(ours).items():
                if hasattr(type(value), "__len__") and not isinstance(value, str | tuple):
                    found[f"{name}.{attribute}"] = len(value)
    return found


Look = tuple[Counter[str], int]


class Looks(Callback):
    """Counts after the first saves, half of the others, and all."""

    def __init__(self, steps: int) -> None:
        self.at = (WARM, WARM + steps // 2, WARM + steps)
        self.found: list[Look] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step in self.at:
            self.found.append((held(module), memory("VmRSS")))


def grown(looks: list[Look], saves: int) -> tuple[dict[str, int], int]:
    """Return what grew in both halves by the number of saves in one, and the growth of memory in bytes.

    What is created once, such as Python's caches for each class, does not grow repeatedly.
    """
    (before, small), (half, _), (after, large) = looks
    more = {name: (half[name] - before[name], after[name] - half[name]) for name in after}
    # Of objects there may be some more or fewer at any time; of files, hooks and what we keep, not one.
    limit = {name: saves // 2 if name.startswith("objects of ") else 1 for name in more}
    return {name: sum(by) for name, by in more.items() if min(by) >= limit[name]}, large - small


def keep_on_saving(out: str, stage: int, steps: int, export: Export | None) -> tuple[dict[str, int], int]:
    """Save twice in each step; return what grew, and the growth of memory in bytes."""
    ds_frozen_patch.patch(export=export)
    looks = Looks(steps)
    kept = ModelCheckpoint(
        out, filename="{step}", save_top_k=2, monitor="step", mode="max", save_last=True, every_n_train_steps=1
    )
    epochs = -(-(WARM + steps + 1) // runs.BATCHES)
    trainer = runs.trainer(out, 2, stage, epochs=epochs, callbacks=[kept, looks])
    trainer.fit(runs.LoraRun(), runs.batches(2))
    return grown(looks.found, steps)


@pytest.mark.parametrize(("stage", "export"), [(2, None), (3, "safetensors")])
def test_saves_leave_nothing_behind(
    ranks: Any, tmp_path: Path, long: bool, counted: Callable[[str, int], None], stage: int, export: str | None
) -> None:
    steps = 100 if long else 12 if stage == 2 else 6
    for more, size in ranks(2, keep_on_saving, out=str(tmp_path), stage=stage, steps=steps, export=export):
        assert not more
        assert size < ROOM
    last = -(-(WARM + steps + 1) // runs.BATCHES) * runs.BATCHES
    names = {item.name for item in tmp_path.iterdir()}
    assert names == {f"step={last - 1}.ckpt", f"step={last}.ckpt", "last.ckpt"}
    for name in names:
        assert not ds_frozen_patch.verify(tmp_path / name).problems
    counted("saves in one process with old checkpoints deleted: no leaked files, objects or memory", 2 * steps)


def patch_and_unpatch(out: str, rounds: int) -> tuple[dict[str, int], int]:
    """Save trainable-only and full checkpoints alternately with the same trainer."""
    originals = [vars(DeepSpeedStrategy)["save_checkpoint"], vars(deepspeed.DeepSpeedEngine)["save_checkpoint"]]
    trainer = runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False)
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    found = []
    for round_ in range(WARM + rounds):
        ds_frozen_patch.patch()
        trainer.save_checkpoint(f"{out}/small.ckpt")
        ds_frozen_patch.unpatch()
        trainer.save_checkpoint(f"{out}/full.ckpt")
        now = [vars(DeepSpeedStrategy)["save_checkpoint"], vars(deepspeed.DeepSpeedEngine)["save_checkpoint"]]
        assert all(one is other for one, other in zip(now, originals, strict=True))
        if round_ + 1 in (WARM, WARM + rounds // 2, WARM + rounds):
            found.append((held(module), memory("VmRSS")))
    return grown(found, rounds)


def test_patch_and_unpatch_leave_nothing_behind(
    ranks: Any, tmp_path: Path, long: bool, counted: Callable[[str, int], None]
) -> None:
    rounds = 50 if long else 6
    for more, size in ranks(2, patch_and_unpatch, out=str(tmp_path), rounds=rounds):
        assert not more
        assert size < ROOM
    assert {item.name for item in tmp_path.iterdir()} == {"small.ckpt", "full.ckpt"}
    counted("`patch()`, save, `unpatch()`, save, repeatedly", rounds)

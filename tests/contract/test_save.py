"""Promise 1: a checkpoint holds no frozen parameter, tied aliases included, and everything else that it held before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import BF16, Callback, DeepSpeedStrategy, ModelCheckpoint
from kit.checkpoints import model_states, size

pytestmark = pytest.mark.promise(1)


class Remembers(Callback):
    """A callback with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"remembered": 7}


def save_both_ways(out: str, world_size: int, stage: int, tied: bool) -> list[str]:
    """Save a trainable-only and a full checkpoint of the same state; return the names of the frozen parameters."""
    cell.trainable_only()
    trainer = runs.trainer(out, world_size, stage, epochs=1, callbacks=[Remembers()], enable_checkpointing=False)
    module = runs.LoraRun(tied=tied)
    trainer.fit(module, runs.batches(world_size))
    trainer.save_checkpoint(f"{out}/small.ckpt")
    with cell.full_checkpoint(trainer.strategy):
        trainer.save_checkpoint(f"{out}/full.ckpt")
    return [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]


@pytest.mark.series
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_frozen_parameters_are_left_out(ranks: Any, tmp_path: Path, stage: int, tied: bool) -> None:
    frozen = set(ranks(2, save_both_ways, out=str(tmp_path), world_size=2, stage=stage, tied=tied)[0])
    assert any(name.endswith("lm_head.weight") for name in frozen)
    for small, full in zip(model_states(tmp_path / "small.ckpt"), model_states(tmp_path / "full.ckpt"), strict=True):
        assert frozen <= full["module"].keys()
        assert full["module"].keys() - small["module"].keys() == frozen
        assert not small.get("frozen_param_fragments")
        assert "seen" in small["module"]
        # Nothing else is missing, and what is there is the same.
        assert small.keys() == full.keys()
        for name, value in small["module"].items():
            assert torch.equal(value, full["module"][name])
        for key in ("epoch", "global_step", "loops", "callbacks", "lr_schedulers", "hyper_parameters", "buffer_names"):
            assert small[key] == full[key]
        assert {"remembered": 7} in small["callbacks"].values()
        assert small["hyper_parameters"]["hidden"] == 32
    for shard in (tmp_path / "full.ckpt" / "checkpoint").glob("*optim_states.pt"):
        assert (tmp_path / "small.ckpt" / "checkpoint" / shard.name).stat().st_size == shard.stat().st_size


class OptimizesAll(runs.LoraRun):
    """Passes all of its parameters to the optimizer, as many modules do, and lets it find those that are trained."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def save_with_an_optimizer_of_all(out: str, stage: int) -> list[str]:
    cell.trainable_only()
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    module = OptimizesAll()
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/small.ckpt")
    again = runs.trainer(out, 2, stage, epochs=2, enable_checkpointing=False)
    again.fit(OptimizesAll(), runs.batches(2), ckpt_path=f"{out}/small.ckpt")
    return [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]


@pytest.mark.series
@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_with_all_parameters(ranks: Any, tmp_path: Path, stage: int) -> None:
    frozen = ranks(2, save_with_an_optimizer_of_all, out=str(tmp_path), stage=stage)[0]
    assert not set(frozen) & model_states(tmp_path / "small.ckpt")[0]["module"].keys()


def save_large(out: str, stage: int) -> int:
    cell.trainable_only()
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False, limit_train_batches=1)
    module = runs.LoraRun(hidden=256, vocabulary=8192, rank=128)
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/small.ckpt")
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if p.requires_grad)


@pytest.mark.series
@pytest.mark.parametrize(("stage", "bytes_each"), [(1, 14), (2, 14), (3, 12)] if BF16 else [(1, 16), (2, 16), (3, 12)])
def test_bytes_on_disk(ranks: Any, tmp_path: Path, stage: int, bytes_each: int) -> None:
    """Per trained weight: 2 (bf16) or 4 bytes, except in ZeRO-3; 4 of the fp32 master, 8 of Adam's moments.

    The tied base has 4 MB.
    """
    trainable = ranks(2, save_large, out=str(tmp_path), stage=stage)[0]
    floor = bytes_each * trainable
    assert floor > 3_000_000
    assert floor < size(tmp_path / "small.ckpt") < 1.03 * floor + 256 * 1024


def save_by(out: str, way: str) -> None:
    cell.trainable_only()
    file = Path(out, f"config{os.environ['RANK']}.json")
    file.write_text(json.dumps(runs.config(2)))
    if way == "environment":
        os.environ["PL_DEEPSPEED_CONFIG_PATH"] = str(file)
    ways: dict[str, Callable[[], Any]] = {
        "alias": lambda: "deepspeed_stage_2",
        "constructor": lambda: DeepSpeedStrategy(stage=2),
        "dict": lambda: DeepSpeedStrategy(config=runs.config(2)),
        "json": lambda: DeepSpeedStrategy(config=str(file)),
        "environment": lambda: "deepspeed",
    }
    try:
        trainer = runs.trainer(out, 2, strategy=ways[way](), epochs=1, enable_checkpointing=False)
        trainer.fit(runs.LoraRun(), runs.batches(2))
        trainer.save_checkpoint(f"{out}/small.ckpt")
        again = runs.trainer(out, 2, strategy=ways[way](), epochs=2, enable_checkpointing=False)
        again.fit(runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/small.ckpt")
        assert again.global_step == 2 * runs.BATCHES
    finally:
        os.environ.pop("PL_DEEPSPEED_CONFIG_PATH", None)


@pytest.mark.series
@pytest.mark.parametrize("way", ["alias", "constructor", "dict", "json", "environment"])
def test_every_way_to_configure(ranks: Any, tmp_path: Path, way: str) -> None:
    ranks(2, save_by, out=str(tmp_path), way=way)
    (saved,) = model_states(tmp_path / "small.ckpt")
    assert all("lora_" in name or name == "seen" for name in saved["module"])


def save_often(out: str) -> dict[str, Any]:
    cell.trainable_only()
    best = ModelCheckpoint(f"{out}/best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    steps = ModelCheckpoint(f"{out}/steps", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = runs.trainer(out, 2, 2, epochs=3, callbacks=[best, steps])
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2), runs.batches(2))
    with runs.heard() as messages:
        found = {
            path: trainer.test(module, runs.batches(2), ckpt_path=path, verbose=False) for path in ("best", "last")
        }
    resumed = runs.trainer(out, 2, 2, epochs=4, callbacks=[ModelCheckpoint(f"{out}/best", save_last=True)])
    resumed.fit(runs.LoraRun(), runs.batches(2), runs.batches(2), ckpt_path="last")
    return {"tested": found, "steps": resumed.global_step, "messages": messages, "best": best.best_model_path}


@pytest.mark.series
def test_model_checkpoint_best_and_last(ranks: Any, tmp_path: Path) -> None:
    result = ranks(2, save_often, out=str(tmp_path))[0]
    assert result["steps"] == 4 * runs.BATCHES
    assert result["tested"]["best"][0]["test_loss"] > 0
    written = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*.ckpt"))
    assert len([p for p in written if p.startswith("steps/")]) == runs.BATCHES  # each third step of three epochs
    assert "best/last.ckpt" in written
    assert len([p for p in written if p.startswith("best/epoch")]) >= 2
    for path in written:
        for saved in model_states(tmp_path / path):
            assert all("lora_" in name or name == "seen" for name in saved["module"])


def save_subset(out: str) -> None:
    """Save a module whose `state_dict` returns a subset, and with a callback that calls the engine itself."""

    class Subset(runs.LoraRun):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            return {name: value for name, value in state.items() if "embed" not in name}

    class OwnStrategy(DeepSpeedStrategy):
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            self.deepspeed_engine.save_checkpoint(filepath, client_state={"mine": 1}, tag="checkpoint")

    cell.trainable_only()
    trainer = runs.trainer(out, 2, strategy=OwnStrategy(config=runs.config(2)), epochs=1, enable_checkpointing=False)
    trainer.fit(Subset(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/small.ckpt")
    engine: Any = trainer.model
    engine.save_checkpoint(f"{out}/said.ckpt", exclude_frozen_parameters=False)


def test_subset_state_dict_and_overridden_save(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_subset, out=str(tmp_path))
    (saved,) = model_states(tmp_path / "small.ckpt")
    assert saved["mine"] == 1
    assert all("lora_" in name or name == "seen" for name in saved["module"])
    said = next((tmp_path / "said.ckpt").glob("global_step*/*model_states.pt"))
    assert any("q_proj.base_layer" in name for name in torch.load(said, weights_only=False)["module"])


def first_save_is_told(out: str) -> list[str]:
    cell.trainable_only()
    with runs.heard() as messages:
        trainer = runs.trainer(out, 2, 2, epochs=3)
        trainer.fit(runs.LoraRun(), runs.batches(2))
    return [m for m in messages if "frozen" in m]


def test_the_first_save_logs_once_on_rank_zero(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, first_save_is_told, out=str(tmp_path))
    assert len(first) == 1
    assert "ds_frozen_patch: checkpoints leave out 20 of 28 parameters" in first[0]
    assert ("47.4 kB of 49.5 kB" if BF16 else "94.8 kB of 99 kB") in first[0]
    assert second == []

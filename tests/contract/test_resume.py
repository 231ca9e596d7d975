"""Promise 2: strict resume without any setting; the resumed run equals the uninterrupted run bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import CELL, PRECISION, PRECISIONS, DeepSpeedStrategy, pl
from kit.checkpoints import model_states

pytestmark = [pytest.mark.promise(2), pytest.mark.series]


def whole_and_resumed(out: str, world_size: int, stage: int, precision: str, extra: dict[str, Any]) -> dict[str, Any]:
    cell.trainable_only()
    results = []
    for resume_from in (None, f"{out}/epoch=0.ckpt"):
        strategy = DeepSpeedStrategy(config=runs.config(stage, **extra))
        trainer = runs.trainer(
            out if resume_from is None else f"{out}/again", world_size, strategy=strategy, precision=precision
        )
        module = runs.LoraRun()
        trainer.fit(module, runs.batches(world_size), ckpt_path=resume_from)
        results.append((module.losses, runs.trained_state(module), trainer.global_step))
    return {"whole": results[0], "resumed": results[1]}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OFFLOAD_BOTH = {**OFFLOAD, "offload_param": {"device": "cpu"}}


ONCE = (pytest.mark.everyday, pytest.mark.once)
HPZ = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "extra"),
    [
        *((2, stage, precision, {}) for stage in (0, 1, 2, 3) for precision in PRECISIONS),
        (2, 2, PRECISION, OFFLOAD),
        (2, 3, PRECISION, OFFLOAD_BOTH),
        (2, 3, PRECISION, {"stage3_param_persistence_threshold": 0}),
        pytest.param(2, 3, PRECISION, HPZ, marks=ONCE),
        pytest.param(1, 2, PRECISION, {}, marks=ONCE),
        pytest.param(1, 3, PRECISION, {}, marks=ONCE),
    ],
)
def test_trainer_resumes_bit_for_bit(
    ranks: Any, tmp_path: Path, world_size: int, stage: int, precision: str, extra: dict[str, Any]
) -> None:
    results = ranks(
        world_size,
        whole_and_resumed,
        out=str(tmp_path),
        world_size=world_size,
        stage=stage,
        precision=precision,
        extra=extra,
        alone="zero_hpz_partition_size" in extra,
    )
    for result in results:
        losses, state, steps = result["whole"]
        assert len(losses) == 2 * runs.BATCHES
        assert result["resumed"] == (losses[runs.BATCHES :], state, steps)
        assert len(set(losses)) > runs.BATCHES  # it did learn
    for saved in model_states(tmp_path / "epoch=0.ckpt"):
        assert saved["module"]
        assert all("lora_" in name or name == "seen" for name in saved["module"])
        assert saved["module"]["seen"].item() == runs.BATCHES
        assert not saved.get("frozen_param_fragments")


class BuiltPartitioned(pl.LightningModule):
    """A model built under ZeRO-3's `zero.Init`, which partitions each parameter at construction."""

    net: torch.nn.Sequential

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.losses: list[float] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.seed)
        base = torch.nn.Linear(16, 16).requires_grad_(False)
        self.net = torch.nn.Sequential(torch.nn.Embedding(96, 16).requires_grad_(False), base, torch.nn.Linear(16, 96))

    if not hasattr(pl.LightningModule, "configure_model"):
        configure_sharded_model = configure_model  # its name before Lightning 2.1

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def built_partitioned(out: str) -> Any:
    cell.trainable_only()
    results = []
    for resume_from in (None, f"{out}/epoch=0.ckpt"):
        trainer = runs.trainer(out if resume_from is None else f"{out}/again", 2, 3)
        module = BuiltPartitioned(seed=1)
        trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
        results.append((module.losses[-runs.BATCHES :], runs.trained_state(module)))
    if CELL.patches:
        return (*results, None)  # it does not verify the base
    other = runs.trainer(out, 2, 3)
    refused = runs.refusal(other.fit, BuiltPartitioned(seed=2), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    return (*results, refused)


def test_a_model_built_under_zero_init(ranks: Any, tmp_path: Path) -> None:
    for whole, resumed, refused in ranks(2, built_partitioned, out=str(tmp_path)):
        assert resumed == whole
        if not CELL.patches:
            assert refused[0] == "CheckpointMismatchError"
            assert "- net.0.weight: saved " in refused[1]
    for saved in model_states(tmp_path / "epoch=0.ckpt"):
        assert set(saved["module"]) == {"net.2.weight", "net.2.bias"}


class RankBuffer(runs.LoraRun):
    """A run with a buffer that counts differently on each rank."""

    of_rank: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_rank", torch.zeros(1, dtype=torch.int64))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.of_rank += 1 + self.global_rank
        return super().training_step(batch, index)


def buffers_at_the_end(out: str) -> list[int]:
    cell.trainable_only()
    values = []
    for resume_from in (None, f"{out}/epoch=0.ckpt"):
        trainer = runs.trainer(out if resume_from is None else f"{out}/again", 2, 3)
        module = RankBuffer()
        trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
        values.append(module.of_rank.item())
    return values


def test_buffers_of_each_rank(ranks: Any, tmp_path: Path) -> None:
    """In ZeRO-3 each rank has a file of its own, and resumes with the buffers in it."""
    for rank, values in enumerate(ranks(2, buffers_at_the_end, out=str(tmp_path))):
        assert values == [2 * runs.BATCHES * (1 + rank)] * 2
    for rank, saved in enumerate(model_states(tmp_path / "epoch=0.ckpt")):
        assert saved["module"]["of_rank"].item() == runs.BATCHES * (1 + rank)

"""Promise 3: test, validate and predict from a trainable-only checkpoint return what the model in memory returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import PRECISIONS
from kit.checkpoints import model_states

pytestmark = [pytest.mark.promise(3), pytest.mark.series]


def evaluate(trainer: Any, module: Any, data: Any, ckpt_path: str | None) -> dict[str, Any]:
    validated = trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)
    tested = trainer.test(module, data, ckpt_path=ckpt_path, verbose=False)
    predicted = trainer.predict(module, data, ckpt_path=ckpt_path)
    return {"validated": validated, "tested": tested, "predicted": runs.digest(torch.stack(predicted))}


def in_memory_and_loaded(out: str, stage: int, precision: str) -> tuple[Any, Any, Any]:
    cell.trainable_only()
    data = runs.batches(2)
    trainer = runs.trainer(out, 2, stage, epochs=1, precision=precision)
    module = runs.LoraRun()
    trainer.fit(module, data)
    with cell.full_checkpoint(trainer.strategy):
        trainer.save_checkpoint(f"{out}/full.ckpt")
    trained = evaluate(trainer, module, data, None)

    def fresh() -> Any:
        return runs.trainer(out, 2, stage, precision=precision)

    untrained = runs.digest(torch.stack(fresh().predict(runs.LoraRun(), data)))
    loaded = evaluate(fresh(), runs.LoraRun(), data, f"{out}/epoch=0.ckpt")
    assert evaluate(fresh(), runs.LoraRun(seed=2), data, f"{out}/full.ckpt") == loaded
    return trained, untrained, loaded


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_from_checkpoint(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    for trained, untrained, loaded in ranks(
        2, in_memory_and_loaded, out=str(tmp_path), stage=stage, precision=precision
    ):
        assert loaded == trained
        assert untrained != trained["predicted"]


BUFFERS = {"count": torch.tensor([2**24 + 1, -(2**53) - 1]), "packed": torch.tensor([0x12345679], dtype=torch.int32)}


class WithBuffers(runs.LoraRun):
    """Buffers with values that fp32 cannot represent, and one under two names."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        for name, value in BUFFERS.items():
            self.register_buffer(name, value.clone() if trained else torch.zeros_like(value))
        self.one = torch.nn.Module()
        self.one.register_buffer("shared", torch.full((2,), 0.5 if trained else 0.0))
        self.other = self.one


def buffers_of_a_test(out: str, stage: int) -> dict[str, torch.Tensor]:
    cell.trainable_only()
    trainer = runs.trainer(out, 2, stage, epochs=1)
    trainer.fit(WithBuffers(trained=True), runs.batches(2))
    module = WithBuffers(trained=False)
    runs.trainer(out, 2, stage).test(module, runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
    return {**{name: module.get_buffer(name) for name in BUFFERS}, "shared": module.get_buffer("other.shared")}


@pytest.mark.parametrize("stage", [2, 3])
def test_buffers_are_loaded_as_saved(ranks: Any, tmp_path: Path, stage: int) -> None:
    for found in ranks(2, buffers_of_a_test, out=str(tmp_path), stage=stage):
        for name, value in BUFFERS.items():
            assert found[name].dtype == value.dtype
            assert found[name].tolist() == value.tolist()
        assert found["shared"].tolist() == [0.5, 0.5]


def quantized_tested_and_resumed(out: str, stage: int) -> int:
    cell.trainable_only()
    runs.trainer(out, 2, stage, epochs=1).fit(runs.OnQuantized(), runs.batches(2))
    path = f"{out}/epoch=0.ckpt"
    runs.trainer(out, 2, stage).test(runs.OnQuantized(), runs.batches(2), ckpt_path=path, verbose=False)
    trainer = runs.trainer(f"{out}/resumed", 2, stage, epochs=2)
    trainer.fit(runs.OnQuantized(), runs.batches(2), ckpt_path=path)
    epoch: int = trainer.current_epoch
    return epoch


@pytest.mark.series
@pytest.mark.parametrize("stage", [2, 3])
def test_entries_of_a_frozen_parameter_are_left_out_with_it(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2, quantized_tested_and_resumed, out=str(tmp_path), stage=stage) == [2, 2]
    for states in model_states(tmp_path / "epoch=0.ckpt"):
        assert states["module"]
        assert not [name for name in states["module"] if ".base." in f".{name}"]

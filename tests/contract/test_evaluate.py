"""Promise 3: test, validate and predict from a trainable-only checkpoint give what the model in memory gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provider
import pytest
import runs
import torch
from under_test import PRECISIONS

pytestmark = [pytest.mark.promise(3), pytest.mark.series]


def evaluate(trainer: Any, module: Any, data: Any, ckpt_path: str | None) -> dict[str, Any]:
    validated = trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)
    tested = trainer.test(module, data, ckpt_path=ckpt_path, verbose=False)
    predicted = trainer.predict(module, data, ckpt_path=ckpt_path)
    return {"validated": validated, "tested": tested, "predicted": runs.digest(torch.stack(predicted))}


def in_memory_and_loaded(out: str, stage: int, precision: str) -> tuple[Any, Any, Any]:
    provider.trainable_only()
    data = runs.batches(2)
    trainer = runs.trainer(out, 2, stage, epochs=1, precision=precision)
    module = runs.LoraRun()
    trainer.fit(module, data)
    trained = evaluate(trainer, module, data, None)

    def fresh() -> Any:
        return runs.trainer(out, 2, stage, precision=precision)

    untrained = evaluate(fresh(), runs.LoraRun(), data, None)
    loaded = evaluate(fresh(), runs.LoraRun(), data, f"{out}/epoch=0.ckpt")
    with provider.full_checkpoint():
        trainer = runs.trainer(f"{out}/full", 2, stage, epochs=1, precision=precision)
        trainer.fit(runs.LoraRun(), data)
    assert evaluate(fresh(), runs.LoraRun(seed=2), data, f"{out}/full/epoch=0.ckpt") == loaded
    return trained, untrained, loaded


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_from_checkpoint(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    for trained, untrained, loaded in ranks(
        2, in_memory_and_loaded, out=str(tmp_path), stage=stage, precision=precision
    ):
        assert loaded == trained
        assert untrained["predicted"] != trained["predicted"]

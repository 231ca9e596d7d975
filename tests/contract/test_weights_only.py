"""Promise 8: `save_weights_only=True` gives one file with the weights, and no optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import provider
import pytest
import runs
import torch
from under_test import PRECISION, DeepSpeedStrategy, ModelCheckpoint

pytestmark = [pytest.mark.promise(8), pytest.mark.series("alone")]


def save_weights_only(out: str, stage: int) -> dict[str, Any]:
    provider.trainable_only()
    callback = ModelCheckpoint(out, filename="weights", save_weights_only=True)
    # In ZeRO-3 small parameters stay whole otherwise, and nothing has to be gathered.
    strategy = DeepSpeedStrategy(config=runs.config(stage, stage3_param_persistence_threshold=0))
    trainer = runs.trainer(out, 2, strategy=strategy, epochs=1, callbacks=[callback])
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    (trained,) = trainer.test(module, runs.batches(2), verbose=False)
    digests = runs.trained_state(module)
    (best,) = trainer.test(module, runs.batches(2), ckpt_path="best", verbose=False)
    fresh = runs.trainer(out, 2, stage, enable_checkpointing=False)
    (tested,) = fresh.test(runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/weights.ckpt", verbose=False)
    return {"trained": trained, "best": best, "tested": tested, "digests": digests}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_save_weights_only(ranks: Any, tmp_path: Path, stage: int) -> None:
    first, second = ranks(2, save_weights_only, out=str(tmp_path), stage=stage)
    assert first["tested"] == first["best"] == first["trained"]
    assert second["tested"] == second["best"] == second["trained"]
    file = tmp_path / "weights.ckpt"
    assert file.is_file()
    saved = torch.load(file, weights_only=False)
    weights = saved["state_dict"]
    assert {name for name in first["digests"] if "lora_" in name or name == "seen"} == weights.keys()
    assert {name: runs.digest(value) for name, value in weights.items()}.items() <= first["digests"].items()
    assert not saved.keys() & {"optimizer_states", "lr_schedulers", "module", "optimizer"}
    assert weights["model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].dtype == (
        torch.bfloat16 if PRECISION == "bf16-mixed" else torch.float32
    )

"""Promise 2: strict resume without any setting; the resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
from disk import model_states
from lightning.pytorch.strategies import DeepSpeedStrategy

import ds_frozen_patch


def whole_and_resumed(out: str, world_size: int, stage: int, precision: str, extra: dict[str, Any]) -> dict[str, Any]:
    ds_frozen_patch.patch()
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


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "extra"),
    [
        (2, 0, "32-true", {}),
        (2, 0, "bf16-mixed", {}),
        (2, 1, "bf16-mixed", {}),
        (2, 1, "32-true", {}),
        (2, 2, "bf16-mixed", {}),
        (2, 2, "32-true", {}),
        (2, 2, "bf16-mixed", OFFLOAD),
        (2, 3, "bf16-mixed", {}),
        (2, 3, "32-true", {}),
        (2, 3, "bf16-mixed", OFFLOAD_BOTH),
        (2, 3, "bf16-mixed", {"stage3_param_persistence_threshold": 0}),
        (1, 2, "bf16-mixed", {}),
        (1, 3, "bf16-mixed", {}),
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

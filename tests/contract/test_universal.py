"""Promise 10: DeepSpeed converts our checkpoints to universal ones, from which runs resume on other ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import DeepSpeedStrategy
from torch.utils.data import DataLoader

import ds_frozen_patch
from ds_frozen_patch.record import KEY

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday, pytest.mark.once]

SAMPLES = 12  # for each step of the optimizer
STEPS = 3  # in an epoch


class Run(runs.LoraRun):
    """Remembers the keys of the checkpoint that it is resumed from."""

    loaded: tuple[str, ...] = ()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = tuple(checkpoint)


def train(out: str, world_size: int, stage: int, resume: str | None = None) -> dict[str, Any]:
    ds_frozen_patch.patch()
    config = runs.config(stage)
    if resume is not None:
        config["checkpoint"] = {"load_universal": True}
    options: dict[str, Any] = {"strategy": DeepSpeedStrategy(config=config), "precision": "32-true"}
    trainer = runs.trainer(out, world_size, stage, **options)
    tokens = torch.randint(runs.VOCABULARY, (SAMPLES * STEPS, 8), generator=torch.Generator().manual_seed(0))
    module = Run()
    with runs.heard() as said:
        batches: DataLoader[Any] = DataLoader(tokens, batch_size=SAMPLES // world_size)  # type: ignore[arg-type]
        trainer.fit(module, batches, ckpt_path=resume)
    return {
        "losses": module.losses,
        "steps": trainer.global_step,
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "keys": module.loaded,
        "said": [message for message in said if "load_universal" in message],
    }


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.short), 3])
def test_a_run_resumes_from_a_universal_checkpoint(ranks: Any, tmp_path: Path, stage: int) -> None:
    whole = ranks(2, train, out=str(tmp_path / "run"), world_size=2, stage=stage)
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    source, target = tmp_path / "run" / "epoch=0.ckpt", tmp_path / "universal.ckpt"
    folders = ["--input_folder", str(source / "checkpoint"), "--output_folder", str(target / "checkpoint")]
    subprocess.run([*converter, *folders], check=True, capture_output=True)
    trained = {folder.name for folder in (target / "checkpoint" / "zero").iterdir() if folder.is_dir()}
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)
    resumed = ranks(3, train, out=str(tmp_path / "resumed"), world_size=3, stage=stage, resume=str(target))
    expected, found = (torch.tensor([rank["losses"] for rank in run]).mean(0) for run in (whole, resumed))
    assert len(expected) == 2 * STEPS
    assert found.tolist() == pytest.approx(expected[STEPS:].tolist(), rel=1e-6)
    for number, rank in enumerate(resumed):
        assert (rank["steps"], rank["lr"]) == (whole[0]["steps"], whole[0]["lr"])
        assert "epoch" in rank["keys"]
        assert not [key for key in rank["keys"] if KEY in key]
        assert len(rank["said"]) == (number == 0)
        assert all("loads neither buffers nor frozen parameters" in message for message in rank["said"])

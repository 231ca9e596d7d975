"""Promise 13: a checkpoint of older releases resumes under newer ones, its base verified."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import CELL, LambdaCallback, ModelCheckpoint

import ds_frozen_patch

pytestmark = pytest.mark.promise(13)
STAGES = (0, 2, 3)


class Portable(runs.LoraRun):
    """The run's model with values that no release of torch or transformers has a say in."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                steps = torch.arange(parameter.numel()) * 7919 + zlib.crc32(name.encode()) + seed
                parameter.copy_(((steps % 1009) / 5045 - 0.1).view_as(parameter))


def save(out: str, stage: int) -> dict[str, Any]:
    """Train two epochs, saving after each; gives the second one's losses, and what was trained by the first."""
    ds_frozen_patch.patch()
    states: list[Any] = []
    callbacks = [
        ModelCheckpoint(out, filename="{epoch}", save_top_k=-1),
        LambdaCallback(on_train_epoch_end=lambda trainer, module: states.append(runs.trained_state(module))),
    ]
    module = Portable()
    runs.trainer(out, 2, stage, callbacks=callbacks, precision="32-true").fit(module, runs.batches(2))
    return {"losses": module.losses[runs.BATCHES :], "state": states[0]}


def resume(saved: str, out: str, stage: int) -> dict[str, Any]:
    """Resume after the first epoch; give what `save` gave, and what a base of another seed is told."""
    ds_frozen_patch.patch()
    states: list[Any] = []
    callback = LambdaCallback(on_train_start=lambda trainer, module: states.append(runs.trained_state(module)))
    options: Any = {"enable_checkpointing": False, "precision": "32-true"}
    module = Portable()
    trainer = runs.trainer(out, 2, stage, callbacks=[callback], **options)
    with runs.heard() as messages:
        trainer.fit(module, runs.batches(2), ckpt_path=f"{saved}/epoch=0.ckpt")
    other = runs.trainer(out, 2, stage, **options)
    refused = runs.refusal(other.fit, Portable(seed=2), runs.batches(2), ckpt_path=f"{saved}/epoch=0.ckpt")
    warned = [message for message in messages if message.startswith("WARNING")]
    return {"losses": module.losses, "state": states[0], "warned": warned, "refused": refused}


@pytest.mark.parametrize("stage", STAGES)
def test_saves_for_newer_cells(ranks: Any, saved: Path, stage: int) -> None:
    """Leaves what the next test takes in the environments of newer cells."""
    out = saved / CELL.name / f"zero{stage}"
    facts = ranks(2, save, out=str(out), stage=stage)
    assert len(facts[0]["losses"]) == runs.BATCHES
    (out / "facts.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("older", [cell.name for cell in CELL.resumes] or ["none"])
def test_resumes_what_older_cells_saved(ranks: Any, saved: Path, tmp_path: Path, older: str, stage: int) -> None:
    check_that_it_resumes(ranks, saved / older / f"zero{stage}", tmp_path, stage)


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.parametrize("stage", [2, 3])
def test_resumes_what_the_oldest_cell_saved_in_2026(ranks: Any, tmp_path: Path, stage: int) -> None:
    """`oldest.zip` has what `test_saves_for_newer_cells` left in the cell `oldest`; no other environment is needed."""
    shutil.unpack_archive(Path(__file__).with_name("oldest.zip"), tmp_path)
    assert not ds_frozen_patch.verify(tmp_path / f"zero{stage}" / "epoch=0.ckpt").problems
    check_that_it_resumes(ranks, tmp_path / f"zero{stage}", tmp_path / "again", stage)


def check_that_it_resumes(ranks: Any, folder: Path, out: Path, stage: int) -> None:
    facts = json.loads((folder / "facts.json").read_text())
    for before, after in zip(facts, ranks(2, resume, saved=str(folder), out=str(out), stage=stage), strict=True):
        trained = {name: digest for name, digest in before["state"].items() if "lora_" in name or name == "seen"}
        assert len(trained) == 9
        assert {name: after["state"][name] for name in trained} == trained
        assert after["warned"] == []
        assert after["refused"][0] == "CheckpointMismatchError"
        assert "left-out parameters have other fingerprints" in after["refused"][1]
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-3)

"""Lightning's Trainer: under `patch()`, and plain with and without its own flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from compare import task
from compare.task import EPOCHS, LEARNING_RATE, MIDDLE, SAMPLES, Run, Seen
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import deepspeed as utilities
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    """The model that all systems train."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = task.model(run)
        self.strict_loading = run.strict

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def test_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(run: Run) -> Seen:
    """Fit, and test what is in memory then."""
    module, trainer = Module(run), _trainer(run)
    with task.disturbed(run):
        trainer.fit(module, _data(run), ckpt_path=f"{run.out}/last.ckpt" if run.last else run.resume)
    (evaluated,) = trainer.test(module, _data(run), verbose=False)
    return task.seen(module.model, evaluated["loss"])


def evaluate(run: Run) -> float:
    """Test from a checkpoint."""
    (evaluated,) = _trainer(run).test(Module(run), _data(run), ckpt_path=run.resume, verbose=False)
    return evaluated["loss"]


def consolidate(run: Run, folder: str, target: str) -> dict[str, str]:
    """Run Lightning's own converter; returns a digest of each tensor in its file."""
    task.patch(run)
    assert run.resume
    utilities.convert_zero_checkpoint_to_fp32_state_dict(run.resume, target)
    weights = torch.load(target, weights_only=False)["state_dict"]
    return {name.removeprefix("model."): task.digest(value) for name, value in weights.items()}


def _trainer(run: Run) -> pl.Trainer:
    task.patch(run)
    if run.halt or run.last:
        saving = [ModelCheckpoint(run.out, filename="last", enable_version_counter=False)]
    else:
        ends = ModelCheckpoint(run.out, filename="{epoch}", save_top_k=-1, save_weights_only=run.weights_only)
        saving = [ends, ModelCheckpoint(run.out, filename="{step}", every_n_train_steps=MIDDLE, save_top_k=-1)]
    return pl.Trainer(
        accelerator="cpu",
        devices=run.world_size,
        strategy=DeepSpeedStrategy(config=task.settings(run), **task.flag(run)),
        precision="32-true",
        max_epochs=EPOCHS,
        default_root_dir=Path(run.out),
        callbacks=saving,  # type: ignore[arg-type]
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _data(run: Run) -> Any:
    return DataLoader(task.tokens(), batch_size=SAMPLES // run.world_size)

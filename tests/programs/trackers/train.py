"""Train with real trackers that upload each checkpoint, and a slow disk: `train.py lightning` or `train.py trainer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from kit import owners, runs
from kit.cell import ModelCheckpoint, pl
from kit.owners import writing
from transformers.integrations.integration_utils import MLflowCallback, WandbCallback

OUT = Path("out").absolute()


def by_lightning() -> None:
    loggers = [
        pl.loggers.WandbLogger(project="none", save_dir=".", log_model="all"),
        pl.loggers.MLFlowLogger(tracking_uri=f"file:{OUT.parent / 'mlruns'}", log_model="all"),
    ]
    trainer = runs.trainer(OUT, 2, callbacks=[ModelCheckpoint(OUT, filename="{epoch}", save_top_k=-1)])
    trainer.loggers = loggers
    trainer.fit(runs.LoraRun(), runs.batches(2))


class Wandb(WandbCallback):
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Not what transformers does then: it saves a model that no engine has, which fails with DeepSpeed."""


def by_trainer() -> None:
    trainer = owners.Run("trainer", str(OUT), 2, 2).trainer
    trainer.add_callback(Wandb)
    trainer.add_callback(MLflowCallback)
    trainer.train()


with writing(seconds=1):
    by_lightning() if sys.argv[1] == "lightning" else by_trainer()
torch.distributed.destroy_process_group()

"""Where the runs of `tests/gpu/` execute: on GPUs with NCCL, or on CPU ranks instead.

With the environment variable GPU_TESTS_ON=cpu, `pytest -m gpu tests/gpu` runs everything on CPU ranks, so that the
tests themselves can be tested without a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch.utils.data import DataLoader

from kit import runs
from kit.cell import Callback, DeepSpeedStrategy, ModelCheckpoint, pl

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PARTITIONED: dict[str, Any] = {"stage3_param_persistence_threshold": 0}  # parameters as small as these too


@dataclass(frozen=True)
class Place:
    """Where the ranks of a run execute: each on a GPU of its own, or on the CPU."""

    accelerator: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks}-{self.accelerator}"

    def trainer(self, out: str, strategy: Any, *callbacks: Any, epochs: int = 2, precision: str = "bf16-mixed") -> Any:
        """Return a Trainer as programs build it, plus `deterministic`, without which the order of some sums on a GPU
        varies.

        A bit-for-bit resume needs that, and the same number of GPUs of the same kind, because other GPUs have other
        kernels.
        """
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=self.ranks,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            deterministic="warn",  # True would refuse what has no such kernel
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(out, filename="{epoch}", save_top_k=-1), *callbacks],
            default_root_dir=out,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def data(self) -> DataLoader[Any]:
        """Return data with the same samples for each optimizer step, whatever the world size."""
        tokens = torch.randint(runs.VOCABULARY, (4 * runs.BATCHES, 8), generator=torch.Generator().manual_seed(0))
        return DataLoader(tokens, batch_size=4 // self.ranks)  # type: ignore[arg-type]


def skip_without(place: Place) -> None:
    if place.accelerator == "gpu" and (found := torch.cuda.device_count()) < place.ranks:
        pytest.skip(f"CUDA devices: {place.ranks} needed, and torch {torch.__version__} sees {found}")


def on(ranks: Any, place: Place, function: Any, **arguments: Any) -> list[Any]:
    """Return the results of a function on each rank of a place."""
    skip_without(place)
    return list(ranks(place.ranks, function, accelerator=place.accelerator, place=place, **arguments))


def strategy(stage: int, zero: dict[str, Any]) -> Any:
    """Return a strategy with the constructor's defaults, except its buckets of 400 MB.

    ZeRO-3 engines outlive their runs.
    """
    config = runs.config(stage, **zero) if zero else None
    return DeepSpeedStrategy(config=config) if config else DeepSpeedStrategy(stage=stage, reduce_bucket_size=5_000_000)


class Looks(Callback):
    """Digests of what was trained, taken before Lightning moves it to the CPU at the end of a fit."""

    state: dict[str, str]
    masters: dict[str, str]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: runs.digest(safe_get_full_fp32_param(p)) for name, p in trained.items()}
        self.state = runs.trained_state(module)


def fit(place: Place, out: str, strategy: Any, module: Any, *callbacks: Any, resume: str | None = None) -> Any:
    """Return the losses of the last epoch and digests of the trained state, and then the loss of a validation."""
    looks = Looks()
    trainer = place.trainer(out, strategy, looks, *callbacks)
    trainer.fit(module, place.data(), place.data(), ckpt_path=resume)
    run = (module.losses[-runs.BATCHES :], looks.state, looks.masters, trainer.global_step)
    return run, trainer.callback_metrics["val_loss"].item()


ON = os.environ.get("GPU_TESTS_ON", "gpu")
PLACES = [Place(ON, 1), Place(ON, 2)]

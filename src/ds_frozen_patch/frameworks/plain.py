"""The owner of an engine that no strategy describes: all that is needed is read from the engine itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..engine.batch import own_batch, saved_batch, warn_of_another_batch
from ..engine.owner import Owner
from ..internals import config_of


def logger_of(package: str) -> logging.Logger:
    """Ours, as a child of a framework's."""
    return logging.getLogger(f"{package}.ds_frozen_patch" if package else "ds_frozen_patch")


def owner_of(engine: Any, package: str = "") -> Owner:
    """The owner of an engine of Accelerate, or of a program that has created it itself."""
    return Owner(
        rank=int(engine.global_rank),
        local_rank=int(engine.local_rank),
        device=engine.device,
        logger=logger_of(package),
        config=config_of(engine),
        names_each_save=bool(package),
        leaves_out=lambda: True,
        after_load=_after_load,
    )


def _after_load(owner: Owner, engine: Any, state: Mapping[str, Any], _: dict[str, Any]) -> None:
    """The program, or Trainer, counts its own batches; DeepSpeed divides the loss."""
    warn_of_another_batch(owner, saved_batch(state), own_batch(engine))

"""What a save and a load need of Lightning, see `engine.owner`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

from ...engine.owner import Owner
from ...settings import FLAG
from . import loops
from .targets import TARGETS

BUILT = "_ds_frozen_patch_built"
"""An attribute of strategies that were built under `patch()`: their own flag counts."""


def owner_of(strategy: Any) -> Owner:
    """A `DeepSpeedStrategy`, of Trainer or Fabric, as the owner of its engine."""
    modules = {cls.__module__ for cls in type(strategy).__mro__}
    package = next((target.name for target in TARGETS if target.module in modules), "lightning")
    config = getattr(strategy, "config", None)
    reference, last = ref(strategy), _leaves_out(strategy)

    def leaves_out() -> bool:
        living = reference()
        return last if living is None else _leaves_out(living)

    return Owner(
        rank=int(strategy.global_rank),
        local_rank=int(strategy.local_rank),
        device=strategy.root_device,
        logger=logging.getLogger(f"{package}.ds_frozen_patch"),
        config=config if isinstance(config, Mapping) else {},
        names_each_save=True,
        leaves_out=leaves_out,
        # With Fabric, the program divides the loss and counts its batches.
        after_load=loops.resume if hasattr(strategy, "lightning_module") else lambda *_: None,
    )


def _leaves_out(strategy: Any) -> bool:
    return not hasattr(strategy, BUILT) or bool(getattr(strategy, FLAG))

"""What a save and a load need of Lightning, see `engine.owner`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

from ... import settings
from ...settings import FLAG
from . import loops
from .targets import TARGETS

BUILT = "_ds_frozen_patch_built"
"""An attribute of strategies that were built under `patch()`: their own flag counts."""


class LightningOwner:
    """A `DeepSpeedStrategy`, of Trainer or Fabric. It holds the strategy weakly, since that holds the engine."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = ref(strategy)

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._strategy()

    @property
    def is_alive(self) -> bool:
        """See `Owner`."""
        return self._strategy() is not None

    @property
    def rank(self) -> int:
        """See `Owner`."""
        return int(self.strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """See `Owner`."""
        return int(self.strategy.local_rank)

    @property
    def device(self) -> Any:
        """See `Owner`."""
        return self.strategy.root_device

    @property
    def logger(self) -> logging.Logger:
        """See `Owner`."""
        modules = {cls.__module__ for cls in type(self.strategy).__mro__}
        package = next((target.name for target in TARGETS if target.module in modules), "lightning")
        return logging.getLogger(f"{package}.ds_frozen_patch")

    @property
    def config(self) -> Mapping[str, Any]:
        """See `Owner`."""
        config = getattr(self.strategy, "config", None)
        return config if isinstance(config, Mapping) else {}

    @property
    def names_each_save(self) -> bool:
        """See `Owner`."""
        return True

    def excludes(self, requested: bool | None) -> bool:
        """See `Owner`."""
        if settings.full_is_requested():
            return False
        if requested is not None:
            return requested  # a direct call of the engine, which means what it says
        return not hasattr(self.strategy, BUILT) or bool(getattr(self.strategy, FLAG))

    def after_load(self, engine: Any, state: Mapping[str, Any], client_state: dict[str, Any]) -> None:
        """See `Owner`."""
        if getattr(self.strategy, "lightning_module", None) is not None:
            loops.resume(self, engine, state, client_state)
        # With Fabric, the program divides the loss and counts its batches.

"""The `Owner` of an engine that no strategy describes: all it needs is read from the engine itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

from ..engine.batch import own_batch, saved_batch, warn_of_another_batch
from ..settings import full_is_requested


def logger_of(package: str) -> logging.Logger:
    """Ours, as a child of a framework's."""
    return logging.getLogger(f"{package}.ds_frozen_patch" if package else "ds_frozen_patch")


class EngineOwner:
    """The owner of an engine of Accelerate, or of a program that has created it itself. It holds the engine weakly."""

    def __init__(self, engine: Any, package: str = "") -> None:
        self._engine = ref(engine)
        self.package = package

    @property
    def is_alive(self) -> bool:
        """See `Owner`."""
        return self._engine() is not None

    @property
    def rank(self) -> int:
        """See `Owner`."""
        return int(self._engine().global_rank)  # type: ignore[union-attr]

    @property
    def local_rank(self) -> int:
        """See `Owner`."""
        return int(self._engine().local_rank)  # type: ignore[union-attr]

    @property
    def device(self) -> Any:
        """See `Owner`."""
        return self._engine().device  # type: ignore[union-attr]

    @property
    def logger(self) -> logging.Logger:
        """See `Owner`."""
        return logger_of(self.package)

    @property
    def config(self) -> Mapping[str, Any]:
        """See `Owner`."""
        config = getattr(self._engine()._config, "_param_dict", None)  # type: ignore[union-attr]
        return config if isinstance(config, Mapping) else {}

    @property
    def names_each_save(self) -> bool:
        """See `Owner`."""
        return bool(self.package)

    def excludes(self, requested: bool | None) -> bool:
        """See `Owner`."""
        return requested is not False and not full_is_requested()

    def after_load(self, engine: Any, state: Mapping[str, Any], client_state: dict[str, Any]) -> None:
        """See `Owner`. The program, or Trainer, counts its own batches; DeepSpeed divides the loss."""
        warn_of_another_batch(self, saved_batch(state), own_batch(engine))

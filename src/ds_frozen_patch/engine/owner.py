"""What a save and a load need of whoever made an engine.

The engine is the centre of this package. A framework that makes engines, such as Lightning, is described by one class
with these members (see `owners`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol


class Owner(Protocol):
    """The owner of one engine or more, on one rank."""

    @property
    def is_alive(self) -> bool:
        """Whether its framework still holds it; if not, its engines are no longer served."""

    @property
    def rank(self) -> int:
        """Of all ranks."""

    @property
    def local_rank(self) -> int:
        """Of the node's ranks."""

    @property
    def device(self) -> Any:
        """Where the process group's backend can reach a tensor: a `torch.device`."""

    @property
    def logger(self) -> logging.Logger:
        """Ours, as a child of the framework's, so that its settings count."""

    @property
    def config(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration as the program gave it; an engine for tests may have less of it."""

    @property
    def names_each_save(self) -> bool:
        """Whether each save has a folder of its own, and not only a tag in a folder of many."""

    def excludes(self, requested: bool | None) -> bool:
        """Whether a save leaves frozen parameters out.

        Args:
            requested: `exclude_frozen_parameters` of `engine.save_checkpoint`; None if it was not given.
        """

    def after_load(self, engine: Any, state: Mapping[str, Any], client_state: dict[str, Any]) -> None:
        """Called on every rank after the optimizer has been restored.

        Args:
            engine: that has loaded.
            state: the checkpoint's own state, reduced to `load.elastic.NEEDED`.
            client_state: what the framework restores itself from. It may be changed.

        Raises:
            CheckpointMismatchError: the framework cannot resume from it at this world size.
        """


def is_first(owner: Owner) -> bool:
    """Whether this is rank 0."""
    return owner.rank == 0


def warn(owner: Owner, message: str) -> None:
    """Log a warning, on rank 0 only."""
    if is_first(owner):
        owner.logger.warning(message)

"""What a save and a load need of whoever made an engine.

The engine is the centre of this package. Each framework that makes engines, such as Lightning, has a function that
describes itself in this way (see `frameworks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import process


@dataclass(frozen=True)
class Owner:
    """Whoever made an engine, on one rank. It must hold neither the engine nor what holds that.

    Attributes:
        rank: of all ranks.
        local_rank: of the node's ranks.
        device: where the process group's backend can reach a tensor, a `torch.device`.
        logger: ours, as a child of the framework's, so that its settings count.
        config: DeepSpeed's configuration as the program gave it; an engine for tests may have less of it.
        names_each_save: whether each save has a folder of its own, and not only a tag in a folder of many.
        leaves_out: returns whether saves leave frozen parameters out, if the call does not say.
        after_load: called on every rank after the optimizer has been restored. It gets the engine; the checkpoint's own
            state, reduced to `load.elastic.NEEDED`; and what the framework restores itself from, which it may change.
            It raises CheckpointMismatchError if the framework cannot resume at this world size.
    """

    rank: int
    local_rank: int
    device: Any
    logger: logging.Logger
    config: Mapping[str, Any]
    names_each_save: bool
    leaves_out: Callable[[], bool]
    after_load: Callable[[Owner, Any, Mapping[str, Any], dict[str, Any]], None]

    def excludes(self, requested: bool | None) -> bool:
        """Whether a save leaves frozen parameters out.

        Args:
            requested: `exclude_frozen_parameters` of `engine.save_checkpoint`; None if it was not given.
        """
        if process.state.full_requests:
            return False
        return self.leaves_out() if requested is None else requested


def is_first(owner: Owner) -> bool:
    """Whether this is rank 0."""
    return owner.rank == 0


def warn(owner: Owner, message: str) -> None:
    """Log a warning, on rank 0 only."""
    if is_first(owner):
        owner.logger.warning(message)

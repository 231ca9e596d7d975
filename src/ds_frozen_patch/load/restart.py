"""A load that goes on from the masters of a checkpoint with a fresh optimizer: `patch(restart_optimizer=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.overrides import Attributes
from ..engine.owner import warn
from ..internals import inner_optimizer
from ..settings import current
from .running import Load


def restarts(load: Load) -> bool:
    """Whether the optimizer's state is not to be loaded, although the call asks for it."""
    return load.restores_optimizer and current().restart_optimizer


def with_fresh_optimizer(load: Load) -> Attributes:
    """Lets the innermost optimizer keep its own state, whatever it is to load; DeepSpeed loads the masters itself."""
    if not restarts(load):
        return []
    optimizer = inner_optimizer(load.engine)
    warn(
        load.owner,
        "patch(restart_optimizer=True): the state of the optimizer in the checkpoint is not loaded."
        f" {type(optimizer).__name__} starts anew from the checkpoint's master weights, with its learning rates.",
    )

    def load_learning_rates(state: Any) -> None:
        saved = state.get("param_groups") if isinstance(state, Mapping) else None
        if saved is not None and len(saved) == len(optimizer.param_groups):
            for group, before in zip(optimizer.param_groups, saved, strict=True):
                group["lr"] = before.get("lr", group["lr"])

    return [(optimizer, "load_state_dict", load_learning_rates)]

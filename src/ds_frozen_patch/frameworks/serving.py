"""The setup of a new engine.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..common.errors import named
from ..core.base import frozen, mark_built_once, mark_trained
from ..engine.origins import forget_other_layouts, notice_earlier_training, record_at_start
from ..engine.owner import Owner, warn
from ..engine.served import attach
from ..parameters import Contents
from ..settings import current as settings
from ..settings import matches


def init(wrapped: Callable[..., None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`DeepSpeedEngine(args, model, ...)`, which changes the dtypes of the module, and partitions it."""
    module = inspect.signature(wrapped).bind_partial(*args, **kwargs).arguments.get("model")
    if module is not None:
        notice_earlier_training(module)
    wrapped(*args, **kwargs)


def begin_serving(engine: Any, owner: Owner) -> None:
    """Attach a new engine, before training."""
    served = attach(engine, owner)
    if served is None:
        return
    mark_trained(engine)
    mark_built_once(engine, owner)
    forget_other_layouts(engine)
    record_at_start(engine, served)
    _check_patterns(owner, engine.module)


def _check_patterns(owner: Owner, module: Any) -> None:
    """Warn of patterns that match nothing in this module, for they may be misspelt."""
    now = settings()
    if not now.keep and not now.leave_out:
        return
    names = [entry.names for entry in frozen(Contents(module))]
    for option, patterns in (("keep", now.keep), ("leave_out", now.leave_out)):
        if idle := [pattern for pattern in patterns if not any(matches(aliases, [pattern]) for aliases in names)]:
            warn(owner, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")

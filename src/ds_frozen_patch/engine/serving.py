"""The setup of a new engine."""

from __future__ import annotations

from typing import Any

from ..common.errors import named
from ..parameters import names_by_parameter
from ..settings import current as settings
from ..settings import matches
from . import frozen
from .attached import attach
from .owner import Owner, warn


def begin_serving(engine: Any, owner: Owner) -> None:
    """Attach a new engine, before training."""
    by_parameter = names_by_parameter(engine.module)
    trained = frozenset(names[0] for parameter, names in by_parameter.items() if parameter.requires_grad)
    frozen.sample_at_start(attach(engine, owner, trained), engine)
    _check_patterns(owner, engine.module)


def _check_patterns(owner: Owner, module: Any) -> None:
    """Warn of patterns that match nothing in this module, for they may be misspelt."""
    now = settings()
    if not now.keep and not now.leave_out:
        return
    names = [one.names for one in frozen.frozen(module)]
    for option, patterns in (("keep", now.keep), ("leave_out", now.leave_out)):
        if idle := [pattern for pattern in patterns if not any(matches(own, [pattern]) for own in names)]:
            warn(owner, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")

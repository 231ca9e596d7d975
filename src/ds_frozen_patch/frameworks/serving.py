"""The set-up of every engine: whoever makes it, each DeepSpeed engine passes its constructor.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..base import Base, notice_earlier_training, watch_base
from ..common.errors import named
from ..common.probing import probe
from ..engine import handshake
from ..engine.owner import Owner, warn
from ..engine.served import attach
from ..engine.topology import has_all_ranks
from ..settings import current as settings
from ..settings import matches
from . import plain
from .for_lightning.targets import TARGETS

_owners: list[Callable[[Any], Owner]] = []
"""What describes the framework that is making an engine, the innermost last; the program makes all other engines."""

notes: list[str] = []
"""What `ds-frozen-patch run` has to tell a program of DeepSpeed's, at its first engine."""


@contextmanager
def owned_by(owner_of: Callable[[Any], Owner]) -> Iterator[None]:
    """While this lasts, the engines that are made have this owner."""
    _owners.append(owner_of)
    try:
        yield
    finally:
        _owners.pop()


def init(wrapped: Callable[..., None], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`DeepSpeedEngine(args, model, ...)`, which changes the dtypes of the module, and partitions it."""
    module = inspect.signature(wrapped).bind_partial(*args, **kwargs).arguments.get("model")
    if module is not None:
        notice_earlier_training(module)
    if not _owners and _has_patched_lightning():
        wrapped(*args, **kwargs)  # it may be Lightning's; the first save of another one says what to call
        return
    handshake.announce()
    wrapped(*args, **kwargs)
    if has_all_ranks(engine):
        handshake.check(handshake.LONG_WAIT_SECONDS if _is_for_inference_in_stage_3(engine) else None)
    owner = _owners[-1](engine) if _owners else plain.owner_of(engine)
    while notes:
        warn(owner, notes.pop(0))
    begin_serving(engine, owner)


def _has_patched_lightning() -> bool:
    """Whether the process has imported a Lightning with our patch series, whose engines `patch()` leaves alone."""
    return any(probe(what).complete for what in TARGETS if what.module in sys.modules)


def _is_for_inference_in_stage_3(engine: Any) -> bool:
    """Whether DeepSpeed may have made the engine without a collective."""
    return int(engine.zero_optimization_stage()) == 3 and not hasattr(engine.optimizer, "step")


def has_both_kinds(engine: Any) -> bool:
    """Whether an engine trains some parameters and has frozen ones, which its full checkpoints contain."""
    kinds = {parameter.requires_grad for parameter in engine.module.parameters()}
    return len(kinds) == 2 and hasattr(engine.optimizer, "step")


def begin_serving(engine: Any, owner: Owner) -> None:
    """Attach a new engine, before training; every rank must call it."""
    served = attach(engine, owner)
    if served is None:
        return
    _check_patterns(owner, watch_base(engine, served))


def _check_patterns(owner: Owner, base: Base) -> None:
    """Warn of patterns that match nothing in this base, for they may be misspelt."""
    now = settings()
    if not now.keep and not now.leave_out:
        return
    names = [entry.names for entry in base.frozen]
    for option, patterns in (("keep", now.keep), ("leave_out", now.leave_out)):
        if idle := [pattern for pattern in patterns if not any(matches(aliases, [pattern]) for aliases in names)]:
            warn(owner, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")

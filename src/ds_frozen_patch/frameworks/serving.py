"""The set-up of every engine: whoever makes it, each DeepSpeed engine passes its constructor.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import process
from ..base import Base, notice_earlier_training, watch_base
from ..common.errors import named
from ..common.probing import Target, probe
from ..engine import handshake
from ..engine.served import Owner, attach, warn
from ..engine.topology import has_all_ranks
from ..settings import current as settings
from ..settings import matches
from . import for_accelerate as accelerate
from . import for_transformers as transformers
from . import plain
from .for_lightning.strategy import TARGETS as LIGHTNING
from .for_lightning.strategy import owner_of

_CLIPS = (
    "DeepSpeed clips gradients to a norm of 1.0, which nothing has asked for: it is the default since DeepSpeed 0.19.3,"
    ' and Fabric does not change it. Put "gradient_clipping": 0.0 into the config of DeepSpeedStrategy to train without'
    " clipping, as before, or 1.0 to train with it."
)


def init(wrapped: Callable[..., None], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`DeepSpeedEngine(args, model, ...)`, which changes the dtypes of the module, and partitions it."""
    module = inspect.signature(wrapped).bind_partial(*args, **kwargs).arguments.get("model")
    if module is not None:
        notice_earlier_training(module)
    makers = _makers()
    if any(probe(what).complete for what in makers):  # Lightning with our patch series, which `patch()` leaves alone
        wrapped(*args, **kwargs)
        return
    handshake.announce()
    wrapped(*args, **kwargs)
    if has_all_ranks(engine):
        handshake.check(handshake.LONG_WAIT_SECONDS if _is_for_inference_in_stage_3(engine) else None)
    what = next(iter(makers), None)
    owner = owner_of(engine, makers[what]) if what in LIGHTNING else plain.owner_of(engine, *makers)
    while process.state.notes:
        warn(owner, process.state.notes.pop(0))
    if what in LIGHTNING and _clips_unasked(engine, owner.config):
        warn(owner, _CLIPS)
    begin_serving(engine, owner)


def _makers() -> dict[Target, Any]:
    """The strategy, or the Accelerator and the Trainer, that make an engine, as their methods are on the call stack."""
    classes = {what.cls: what for what in (*LIGHTNING, accelerate.TARGET, transformers.TARGET)}
    found: dict[Target, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            maker = frame.f_locals.get("self")
            what = next((classes[cls] for cls in type(maker).__mro__ if cls in classes), None)
            if what is not None and (found or what is not transformers.TARGET):
                found.setdefault(what, maker)
        frame = frame.f_back
    return found


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


def _clips_unasked(engine: Any, config: Mapping[str, Any]) -> bool:
    """True if an engine clips gradients though its configuration says nothing of that.

    Trainer sets `gradient_clipping` to what it was asked for, or to 0. Fabric leaves it to DeepSpeed.
    """
    return "gradient_clipping" not in config and bool(engine.optimizer) and engine.gradient_clipping() > 0

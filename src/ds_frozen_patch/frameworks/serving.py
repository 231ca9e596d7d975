"""The set-up of every engine: whoever makes it, each DeepSpeed engine passes its constructor.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import process
from ..base import notice_earlier_training, watch_base
from ..common.errors import named
from ..common.probing import Target, probe
from ..engine import handshake
from ..engine.served import Owner, attach, warn
from ..engine.topology import has_all_ranks
from ..settings import current as settings
from ..settings import matches, switch
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
        # DeepSpeed may make an engine in stage 3 that does not train without a collective.
        may_be_early = int(engine.zero_optimization_stage()) == 3 and not hasattr(engine.optimizer, "step")
        handshake.check(handshake.LONG_WAIT_SECONDS if may_be_early else None)
    what = next(iter(makers), None)
    owner = owner_of(engine, makers[what]) if what in LIGHTNING else plain.owner_of(engine, *makers)
    while process.state.notes:
        warn(owner, process.state.notes.pop(0))
    if what in LIGHTNING and _clips_unasked(engine, owner.config):
        warn(owner, _CLIPS)
    refuse = process.state.patch.refuse if process.state.patch is not None else None
    if owner.unserved and refuse is not None and switch("DS_FROZEN_PATCH_STRICT") and has_both_kinds(engine):
        refuse(owner.unserved)  # ends the program
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


def has_both_kinds(engine: Any) -> bool:
    """Whether an engine trains some parameters and has frozen ones, which its full checkpoints contain."""
    kinds = {parameter.requires_grad for parameter in engine.module.parameters()}
    return len(kinds) == 2 and hasattr(engine.optimizer, "step")


def begin_serving(engine: Any, owner: Owner) -> None:
    """Attach a new engine, before training; every rank must call it."""
    served = attach(engine, owner)
    if served is None:
        return
    base = watch_base(engine, served)
    for option in ("keep", "leave_out"):
        patterns = getattr(settings(), option)
        idle = [one for one in patterns if not any(matches(entry.names, [one]) for entry in base.frozen)]
        if idle:  # they may be misspelt
            warn(owner, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")


def _clips_unasked(engine: Any, config: Mapping[str, Any]) -> bool:
    """True if an engine clips gradients though its configuration says nothing of that.

    Trainer sets `gradient_clipping` to what it was asked for, or to 0. Fabric leaves it to DeepSpeed.
    """
    return "gradient_clipping" not in config and bool(engine.optimizer) and engine.gradient_clipping() > 0

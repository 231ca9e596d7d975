"""Which function wraps which method, and how to put a wrapper on and take it off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import wrapt

from ..common.probing import Finding, Target, Wrapper, takes
from ..core import load, save
from ..engine.tuners import merge_adapter
from ..frameworks import for_accelerate, for_transformers, serving
from ..frameworks.for_lightning import strategy
from ..publish.in_flight import after_it, before_end
from ..settings import FLAG


def _judge(cls: Any | None, text: str) -> Finding:
    """It must take the flag, as it does since 0.10.1."""
    if not takes(cls, text, "save_checkpoint", FLAG):
        return Finding("refused", f"DeepSpeedEngine.save_checkpoint has no argument {FLAG}")
    return Finding("patchable", f"save_checkpoint takes {FLAG}")


ENGINE = Target(
    "deepspeed",
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    {"__init__": serving.init, "save_checkpoint": save.save_checkpoint, "load_checkpoint": load.load_checkpoint},
    _judge,
    ("deepspeed",),
    "install DeepSpeed 0.10.1 or newer: pip install -U 'deepspeed>=0.10.1'",
    beside={
        "deepspeed.utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint": after_it,
        # Also called by a program that has imported the one above before `patch()`.
        "deepspeed.utils.zero_to_fp32:_get_fp32_state_dict_from_zero_checkpoint": after_it,
        "torch.distributed:destroy_process_group": before_end,
        "peft.tuners.tuners_utils:BaseTuner.merge_adapter": merge_adapter,
    },
)
TARGETS = (*strategy.TARGETS, for_accelerate.TARGET, for_transformers.TARGET, ENGINE)


def _in_place_of(original: Any, wrapper: Wrapper, enabled: Callable[[], bool], is_method: bool) -> Any:
    """A function that calls a wrapper, with wrapt's arguments, or the original one while it is not enabled.

    It is a plain function, and so is pickled by its name, copied, bound and inspected as the original is.
    """
    if isinstance(original, staticmethod):
        return staticmethod(_in_place_of(original.__func__, wrapper, enabled, is_method=False))

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not enabled():
            return original(*args, **kwargs)
        if not is_method:
            return wrapper(original, None, args, kwargs)
        instance, *others = args
        return wrapper(original.__get__(instance, type(instance)), instance, tuple(others), kwargs)

    if wrapper is strategy.init:
        call.__signature__ = strategy.signature_with_flag(original)  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class Wrapping:
    """One wrapped attribute of a class or a module."""

    cls: Any
    attribute: str
    original: Any
    inherited: bool
    wrapper: Any

    def is_in_place(self) -> bool:
        """Whether a call of the attribute still reaches our wrapper: somebody may have replaced or wrapped it."""
        function = self.cls.__dict__.get(self.attribute)
        while function is not None and function is not self.wrapper:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    def undo(self) -> None:
        """Restore the original object, if the attribute is still our wrapper."""
        if self.cls.__dict__.get(self.attribute) is not self.wrapper:
            return  # somebody has wrapped it again: ours stays inside, disabled
        if self.inherited:
            delattr(self.cls, self.attribute)
        else:
            setattr(self.cls, self.attribute, self.original)


def wrap(what: Target, module: ModuleType, enabled: Callable[[], bool]) -> list[Wrapping]:
    """Wrap what a module has of a target: the methods of its class, all or none, and what is beside it."""
    wrappings = []
    if module.__name__ == what.module:
        for method, wrapper in what.wrappers.items():
            _, attribute, original = wrapt.resolve_path(what.cls, method)
            call = _in_place_of(original, wrapper, enabled, is_method=True)
            wrappings.append(Wrapping(what.cls, attribute, original, method not in what.cls.__dict__, call))
    for path, wrapper in what.beside.items():
        place, _, names = path.partition(":")
        *classes, name = names.split(".")
        owner = getattr(module, classes[0], None) if classes else module
        if place == module.__name__ and owner is not None and name in vars(owner):
            original = vars(owner)[name]
            call = _in_place_of(original, wrapper, enabled, is_method=bool(classes))
            wrappings.append(Wrapping(owner, name, original, False, call))
    for wrapping in wrappings:
        wrapt.apply_patch(wrapping.cls, wrapping.attribute, wrapping.wrapper)
    return wrappings

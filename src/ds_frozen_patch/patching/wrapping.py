"""Which function wraps which method, and how to put a wrapper on and take it off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import wrapt

from ..common.probing import Target
from ..core import load, save
from ..engine.tuners import merge_adapter
from ..frameworks import for_accelerate as accelerate
from ..frameworks import for_transformers as transformers
from ..frameworks import serving
from ..frameworks.for_lightning import checkpoints, strategy
from ..frameworks.for_lightning.strategy import TARGETS
from ..internals import ENGINE
from ..publish.in_flight import after_it, before_end

_STRATEGY = {
    "__init__": strategy.init,
    "save_checkpoint": strategy.save_checkpoint,
    "load_checkpoint": strategy.load_checkpoint,
    "remove_checkpoint": strategy.remove_checkpoint,
    "teardown": strategy.teardown,
}
WRAPPERS: dict[str, dict[str, Callable[..., Any]]] = {
    **{target.class_name: _STRATEGY for target in TARGETS},
    accelerate.TARGET.class_name: {
        "save_state": accelerate.save_state,
        "load_state": accelerate.load_state,
    },
    transformers.TARGET.class_name: {
        "_save_checkpoint": transformers.save_checkpoint,
        "_get_output_dir": after_it,  # at the end of training, Trainer lists this folder, and removes from it
    },
    ENGINE.class_name: {
        "__init__": serving.init,
        "save_checkpoint": save.save_checkpoint,
        "load_checkpoint": load.load_checkpoint,
    },
}
"""What wraps the methods of each class; others of its target's methods are only needed."""
_WRAPPERS_BESIDE: dict[str, Callable[..., Any]] = {
    "save_checkpoint": strategy.save_of_trainer,
    "convert_zero_checkpoint_to_fp32_state_dict": checkpoints.convert,
    "_find_last_checkpoints": checkpoints.find_last,
    "file_exists": after_it,
    "_CheckpointConnector__max_ckpt_version_in_folder": checkpoints.find_requeued,
    "deepspeed_load_checkpoint": transformers.load_checkpoint,
    "get_last_checkpoint": transformers.find_last,
    "get_fp32_state_dict_from_zero_checkpoint": after_it,
    "_get_fp32_state_dict_from_zero_checkpoint": after_it,
    "destroy_process_group": before_end,
    "merge_adapter": merge_adapter,
}


def _in_place_of(original: Any, wrapper: Callable[..., Any], enabled: Callable[[], bool], is_method: bool) -> Any:
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


def wrap_beside(what: Target, module: ModuleType, enabled: Callable[[], bool]) -> list[Wrapping]:
    """Wrap a function of a module, or of a class in it, if it exists."""
    owner = getattr(module, what.class_name, None) if what.class_name else module
    (name,) = what.methods
    original = vars(owner).get(name) if owner is not None else None
    if original is None:
        return []
    wrapper = _in_place_of(original, _WRAPPERS_BESIDE[name], enabled, is_method=bool(what.class_name))
    wrapt.apply_patch(owner, name, wrapper)
    return [Wrapping(owner, name, original, False, wrapper)]


def wrap(what: Target, cls: Any, enabled: Callable[[], bool]) -> list[Wrapping]:
    """Wrap the methods of a target's class, all or none."""
    wrappers = WRAPPERS[what.class_name]
    wrappings = []
    for method in (name for name in what.methods if name in wrappers):
        _, attribute, original = wrapt.resolve_path(cls, method)
        wrapper = _in_place_of(original, wrappers[method], enabled, is_method=True)
        wrappings.append(Wrapping(cls, attribute, original, method not in cls.__dict__, wrapper))
    for wrapping in wrappings:
        wrapt.apply_patch(wrapping.cls, wrapping.attribute, wrapping.wrapper)
    return wrappings

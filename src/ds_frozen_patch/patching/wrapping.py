"""Which function wraps which method, and how to put a wrapper on and take it off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import wrapt

from ..common.probing import Target
from ..core import load, save
from ..engine.tuners import merge_adapter, unmerge_adapter
from ..frameworks import for_accelerate as accelerate
from ..frameworks import for_transformers as transformers
from ..frameworks import serving
from ..frameworks.for_lightning import converter, loops, newest, strategy
from ..frameworks.for_lightning.targets import TARGETS
from ..internals import ENGINE
from ..publish.in_flight import after_it, before_end
from .wrappers import FunctionWrapper, InitWrapper

_STRATEGY = {
    "__init__": strategy.init,
    "setup": strategy.setup,
    "setup_module": strategy.setup,
    "setup_module_and_optimizers": strategy.setup,
    "save_checkpoint": strategy.save_checkpoint,
    "load_checkpoint": strategy.load_checkpoint,
    "remove_checkpoint": strategy.remove_checkpoint,
    "teardown": strategy.teardown,
}
WRAPPERS: dict[str, dict[str, Callable[..., Any]]] = {
    **{target.class_name: _STRATEGY for target in TARGETS},
    accelerate.TARGET.class_name: {
        "_prepare_deepspeed": accelerate.prepare,
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
        "module_state_dict": save.module_state_dict,
        "load_module_state_dict": load.load_module_state_dict,
    },
}
"""What wraps the methods of each class; others of its target's methods are only needed."""
_WRAPPERS_BESIDE: dict[str, Callable[..., Any]] = {
    "save_checkpoint": strategy.save_of_trainer,
    "convert_zero_checkpoint_to_fp32_state_dict": converter.convert,
    "on_run_start": loops.begin_epoch,
    "_find_last_checkpoints": newest.find_last,
    "file_exists": after_it,
    "_CheckpointConnector__max_ckpt_version_in_folder": newest.find_requeued,
    "_link_checkpoint": after_it,  # of save_last="link"
    "deepspeed_load_checkpoint": transformers.load_checkpoint,
    "get_last_checkpoint": transformers.find_last,
    "get_fp32_state_dict_from_zero_checkpoint": after_it,
    "_get_fp32_state_dict_from_zero_checkpoint": after_it,
    "destroy_process_group": before_end,
    "merge_adapter": merge_adapter,
    "unmerge_adapter": unmerge_adapter,
}


def _with_bound(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that gets a bound method also where a class's method is called with an instance.

    wrapt passes a partial then, whose signature has `self` in its newest releases.
    """

    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(wrapped, wrapt.PartialCallableObjectProxy):
            wrapped = MethodType(wrapped.__wrapped__, instance)
        return wrapper(wrapped, instance, args, kwargs)

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
        while function is not None and _unbound(function) is not self.wrapper:
            function = getattr(function, "__wrapped__", None)
        return function is not None

    def undo(self) -> None:
        """Restore the original object, if the attribute is still our wrapper."""
        if _unbound(self.cls.__dict__.get(self.attribute)) is not self.wrapper:
            return  # somebody has wrapped it again: ours stays inside, disabled
        if self.inherited:
            delattr(self.cls, self.attribute)
        else:
            setattr(self.cls, self.attribute, self.original)


def _unbound(value: Any) -> Any:
    """A wrapper as we have put it on: `cls.method = cls.method`, as at the end of `zero.Init`, leaves a bound one."""
    return value._self_parent if isinstance(value, wrapt.BoundFunctionWrapper) else value


def wrap_beside(what: Target, module: ModuleType, enabled: Callable[[], bool]) -> list[Wrapping]:
    """Wrap a function of a module, or of a class in it, if it exists."""
    owner = getattr(module, what.class_name, None) if what.class_name else module
    (name,) = what.methods
    original = vars(owner).get(name) if owner is not None else None
    if original is None:
        return []
    wrapper = FunctionWrapper(original, _with_bound(_WRAPPERS_BESIDE[name]), enabled=enabled)
    setattr(owner, name, wrapper)
    return [Wrapping(owner, name, original, False, wrapper)]


def wrap(what: Target, cls: Any, enabled: Callable[[], bool]) -> list[Wrapping]:
    """Wrap the methods of a target's class, all or none."""
    wrappers = WRAPPERS[what.class_name]
    wrappings = []
    for method in (name for name in what.methods if name in wrappers):
        make = InitWrapper if wrappers[method] is strategy.init else FunctionWrapper
        _, attribute, original = wrapt.resolve_path(cls, method)
        wrapper = make(original, _with_bound(wrappers[method]), enabled=enabled)
        wrappings.append(Wrapping(cls, attribute, original, method not in cls.__dict__, wrapper))
    for wrapping in wrappings:
        setattr(wrapping.cls, wrapping.attribute, wrapping.wrapper)
    return wrappings

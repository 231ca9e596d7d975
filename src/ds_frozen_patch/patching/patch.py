"""`patch()`, `unpatch()` and `serve()`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, get_type_hints

import wrapt

from .. import process
from .. import settings as _settings
from ..common.errors import PatchError
from ..common.probing import Finding, Target, modules_of, probe
from ..engine import handshake
from ..engine.served import attached, release_all
from ..engine.topology import topology_of
from ..frameworks.plain import owner_of
from ..frameworks.serving import begin_serving, has_both_kinds
from ..publish import in_flight
from .status import Status, check, notes_on, probe_all, refusal, status, to_be_wrapped, waiting
from .wrapping import ENGINE, TARGETS, Wrapping, wrap


@dataclass
class Patch:
    """The state between `patch()` and `unpatch()`.

    Attributes:
        findings: of probing, by the name of the target.
        modules: what of each to wrap, imported yet or not.
        wrappings: what has been wrapped.
        specs: of the modules of which all is wrapped, as they were then: a reload makes another one.
        refuse: called if the program has not called `patch()` itself, see `patch_quietly`.
    """

    findings: dict[str, Finding]
    modules: dict[str, list[Target]]
    wrappings: list[Wrapping] = field(default_factory=list)
    specs: dict[str, object] = field(default_factory=dict)
    refuse: Callable[[str], None] | None = None

    def has_wrapped(self, module: str) -> bool:
        """Whether a module is imported, and wrapped as it is now."""
        return module in self.specs and getattr(sys.modules.get(module), "__spec__", None) is self.specs[module]

    def replaced(self, what: Target) -> list[str]:
        """The wrapped methods of a target that somebody has replaced since, perhaps by one that calls ours."""
        return [one.attribute for one in self.wrappings if one.cls is what.cls and not one.is_in_place()]


_IN_FORCE = "_ds_frozen_patch_unpatch"
"""The attribute of `sys` with the `unpatch` of the copy of this package that is in force, see `_unpatch_other_copy`."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_lock = threading.RLock()


def _taking(options: Callable[_P, object]) -> Callable[[Callable[[Mapping[str, Any]], _T]], Callable[_P, _T]]:
    """Give a function the options as keyword arguments; it gets those that are named in a call."""

    def decorated(function: Callable[[Mapping[str, Any]], _T]) -> Callable[_P, _T]:
        @wraps(function)
        def taking(*_: _P.args, **named: _P.kwargs) -> _T:
            return function(named)

        taking.__signature__ = inspect.signature(options).replace(return_annotation=Status)  # type: ignore[attr-defined]
        taking.__annotations__ = get_type_hints(options) | {"return": Status}
        entries = [f"{option.name}: {_settings.described(option)}" for option in _settings.OPTIONS.values()]
        lines = [textwrap.fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
        # There is no docstring under -OO; it is indented before Python 3.13.
        taking.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("    {options}", "\n".join(lines))
        return taking

    return decorated


@_taking(_settings.Settings)
def patch(options: Mapping[str, Any]) -> Status:
    """Make the checkpoints of Lightning, Accelerate, Trainer and DeepSpeed alone trainable-only, and loadable.

    What is imported already is wrapped now, the rest when it is imported. Call it before the engine is created.
    A second call changes only the settings that it names.

    Args:
        {options}

    For each argument that the first call does not name, an environment variable counts, such as
    DS_FROZEN_PATCH_VERIFY_BASE: `keep` and `leave_out` are separated by commas there, and True and False are 1 and 0.

    Returns:
        What `status()` returns afterwards.

    Raises:
        TypeError, ValueError: an argument has none of its possible values.
        PatchError: DeepSpeed is not installed, or something that is installed cannot be patched. The message says why
            and what to do, and nothing is patched. What only the import of a framework shows is raised there. An
            Accelerate or Trainer that cannot be patched is no error, but a warning when it creates an engine.
    """
    return _put_in_force(options, _warn_caller)


def _put_in_force(
    options: Mapping[str, Any], tell: Callable[[str], object], refuse: Callable[[str], None] | None = None
) -> Status:
    new_settings = _settings.checked(options, _settings.current() if is_in_force() else None)
    _unpatch_other_copy()
    _finish_imports()
    with _lock:
        if not is_in_force():
            findings = probe_all()
            check(findings)
            process.state.patch = Patch(findings, to_be_wrapped(findings))
            setattr(sys, _IN_FORCE, unpatch)
            for note in notes_on(findings):
                tell(note)
        _serve_all()
        process.state.settings = new_settings
    # What another thread was importing meanwhile is complete only now.
    _finish_imports()
    with _lock:
        if (now := process.state.patch) is not None:  # else another thread has called unpatch() since
            _serve_all()
            for module in now.modules:
                if module in sys.modules and module not in now.specs and module not in process.state.hooked:
                    unpatch()
                    raise PatchError(
                        f"patch() was called while {module} was being imported; nothing is patched."
                        " Call it before or after that import."
                    )
            now.refuse = refuse
            process.state.refused = ""
        return status()


def _unpatch_other_copy() -> None:
    """Take off the wrappers of another copy: a notebook may drop our modules, and import them again."""
    unpatch_it = getattr(sys, _IN_FORCE, unpatch)
    if unpatch_it is not unpatch:
        unpatch_it()


def _warn_caller(message: str) -> None:
    """Warn the caller of `patch()`, once per node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(message, stacklevel=5)


def patch_quietly(refuse: Callable[[str], None]) -> None:
    """`patch()` for a program that has not called it, and may have nothing to do with DeepSpeed.

    It says nothing until the program creates an engine. If it has failed, now or at an import, `refuse` gets the reason
    then, unless the checkpoints of this engine have no frozen parameters anyway.
    """
    if is_in_force():
        return
    try:
        _put_in_force({}, process.state.notes.append, refuse)
    except PatchError as error:
        _refuse_engines(str(error), refuse)


def _refuse_engines(reason: str, refuse: Callable[[str], None]) -> None:
    """Call `refuse` at the first engine that needs `patch()`, unless the program has called it, or `unpatch()`."""
    process.state.refused = reason

    def init(wrapped: Callable[..., None], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if process.state.refused and has_both_kinds(engine):
            refuse(process.state.refused)

    def wrap_engine(module: ModuleType) -> None:
        if hasattr(module, ENGINE.class_name):
            wrapt.wrap_function_wrapper(module, f"{ENGINE.class_name}.__init__", init)
        elif process.state.refused:
            refuse(process.state.refused)

    wrapt.register_post_import_hook(wrap_engine, ENGINE.module)


def is_in_force() -> bool:
    """Whether `patch()` has been called, and `unpatch()` not since."""
    return process.state.patch is not None


def unpatch() -> None:
    """Restore everything that was wrapped. Without `patch()` before, it does nothing.

    Engines are forgotten too: after another `patch()`, those that the program has created itself need `serve(engine)`.

    Raises:
        CheckpointError: on every rank, if a save was still in flight, and has failed.
    """
    try:
        in_flight.wait()
    finally:
        _unpatch()


def _unpatch() -> None:
    for finder in waiting():
        finder.leave_unpatched()
    with _lock:
        if (patch := process.state.patch) is not None:
            for wrapping in reversed(patch.wrappings):
                wrapping.undo()
            release_all()
            if not in_flight.is_any():  # an interrupt has not ended the wait for it
                in_flight.release_process()
        if getattr(sys, _IN_FORCE, None) is unpatch:
            delattr(sys, _IN_FORCE)
        process.drop()


@contextmanager
@_taking(_settings.Settings)
def patched(options: Mapping[str, Any]) -> Iterator[Status]:
    """`patch(...)` while this lasts, and the previous state afterwards, for tests and notebooks.

    It takes the arguments of `patch()`, and its value is what `patch()` returns.
    """
    before = _settings.current() if is_in_force() else None
    now = _put_in_force(options, _warn_caller)
    try:
        yield now
    finally:
        if before is None:
            unpatch()
        else:
            process.state.settings = before


def _finish_imports() -> None:
    """Wait until another thread has finished its imports.

    Never called with our lock held: that thread may be waiting for the lock, in our import hook.
    """
    for module in {module for what in TARGETS for module in modules_of(what)}:
        if module in sys.modules:
            importlib.import_module(module)


def _serve_all() -> None:
    """Wrap each class whose module is imported, and register a hook for the others."""
    assert process.state.patch is not None
    for module in process.state.patch.modules:
        if module in sys.modules:
            _on_import(sys.modules[module])
        elif module not in process.state.hooked:
            process.state.hooked.add(module)
            wrapt.register_post_import_hook(_hook, module)


def _hook(module: ModuleType) -> None:
    """Called by wrapt once a module is imported."""
    with _lock:
        process.state.hooked.discard(module.__name__)
        refuse = process.state.patch.refuse if process.state.patch else None
        try:
            _on_import(module, is_complete=True)
        except PatchError as error:
            if refuse is None:
                raise
            _refuse_engines(str(error), refuse)


def _on_import(module: ModuleType, is_complete: bool = False) -> None:
    """Wrap the class of an imported module, unless that is done. Called with our lock held."""
    patch = process.state.patch
    targets = patch.modules.get(module.__name__) if patch else None
    if patch is None or targets is None or patch.has_wrapped(module.__name__):
        return
    wrappings: list[Wrapping] = []
    for what in targets:
        if module.__name__ == what.module:
            if what.cls is None and not is_complete and getattr(module.__spec__, "_initializing", False):
                return  # half imported: patch() returns to it
            finding = patch.findings[what.name] = probe(what, is_imported=True)
            if finding.verdict == "refused" and not what.is_optional:
                unpatch()
                raise PatchError(refusal([(what.name, finding)]))
        if patch.findings[what.name].verdict != "refused":
            wrappings += wrap(what, module, lambda: process.state.patch is patch)
    patch.wrappings += wrappings
    patch.specs[module.__name__] = module.__spec__


def serve(engine: Any) -> None:
    """Make the checkpoints of one engine trainable-only, and loadable, if it was created before `patch()`.

    Call it on every rank, after `deepspeed.initialize` and before training. It calls `patch()` if the program has not
    called it. An engine that is created after `patch()` does not need it.

    Args:
        engine: the first of what `deepspeed.initialize` returns.

    Raises:
        TypeError: it is not an engine of DeepSpeed's.
        PatchError: DeepSpeed cannot be patched; another rank has not called it, or has other settings; or it is a kind
            of engine that is not supported.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        name = f"{type(engine).__module__}.{type(engine).__qualname__}"
        raise TypeError(
            f"serve() takes the engine that deepspeed.initialize returns first, not an object of {name}. Engines that"
            " are created after patch(), by any framework or none, do not need it."
        )
    if not is_in_force():
        patch()
    if attached(engine) is not None:
        return
    owner = owner_of(engine)
    handshake.check(handshake.LONG_WAIT_SECONDS, "serve()")
    if reason := topology_of(engine).unserved:
        raise PatchError(f"{type(engine).__name__}: ds_frozen_patch does not support {reason}.")
    begin_serving(engine, owner)

"""`patch()`, `unpatch()` and `status()`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, get_type_hints

import wrapt

from .. import settings as _settings
from ..common.errors import PatchError
from ..common.probing import Finding, Target, imported_class, probe
from ..engine.served import release_all
from ..frameworks.serving import has_both_kinds, notes
from ..frameworks.targets import BESIDE, OWNERS, may_be_left_alone
from ..internals import ENGINE
from ..publish import in_flight
from .findings import check, note_on_refused, notes_on, probe_all, refusal, to_be_served
from .status import Status, TargetStatus
from .wrapping import Wrapping, wrap, wrap_beside


@dataclass
class _Patch:
    """The state between `patch()` and `unpatch()`.

    Attributes:
        findings: of probing, by the name of the target.
        modules: what of each to wrap, imported yet or not.
        wrappings: what has been wrapped, by module.
        specs: of these modules as they were then: a reload makes another one.
        tell: called with what the program is to know.
        refuse: called if the program has not called `patch()` itself, see `patch_quietly`.
    """

    findings: dict[str, Finding]
    modules: dict[str, list[Target]]
    tell: Callable[[str], object]
    wrappings: dict[str, list[Wrapping]] = field(default_factory=dict)
    specs: dict[str, object] = field(default_factory=dict)
    refuse: Callable[[str], None] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the targets that are served."""
        return frozenset(what.name for targets in self.modules.values() for what in targets)

    def has_wrapped(self, module: str) -> bool:
        """Whether a module is imported, and wrapped as it is now."""
        imported = sys.modules.get(module)
        return module in self.wrappings and imported is not None and imported.__spec__ is self.specs[module]

    def replaced(self, what: Target) -> list[str]:
        """The wrapped methods of a target that somebody has replaced since, perhaps by one that calls ours."""
        cls = imported_class(what)
        wrappings = [wrapping for wrapping in self.wrappings.get(what.module, ()) if wrapping.cls is cls]
        return [wrapping.attribute for wrapping in wrappings if not wrapping.is_in_place()]


_current: _Patch | None = None
_IN_FORCE = "_ds_frozen_patch_unpatch"
"""The attribute of `sys` with the `unpatch` of the copy of this package that is in force, see `_unpatch_other_copy`."""
_refused = ""
"""Why `patch_quietly` has failed."""
_hooked: set[str] = set()  # wrapt cannot remove an import hook: without a current patch, ours does nothing
_P = ParamSpec("_P")
_lock = threading.RLock()


def _taking(options: Callable[_P, object]) -> Callable[[Callable[[Mapping[str, Any]], Status]], Callable[_P, Status]]:
    """Give a function the options as keyword arguments; it gets those that are named in a call."""

    def decorated(function: Callable[[Mapping[str, Any]], Status]) -> Callable[_P, Status]:
        @wraps(function)
        def taking(*_: _P.args, **named: _P.kwargs) -> Status:
            return function(named)

        shown = inspect.signature(options)
        taking.__signature__ = shown.replace(return_annotation=Status)  # type: ignore[attr-defined]
        taking.__annotations__ = get_type_hints(_settings.Settings) | {"return": Status}
        entries = [f"{option.name}: {_settings.described(option)}" for option in _settings.OPTIONS.values()]
        lines = [textwrap.fill(entry, 120, initial_indent=" " * 8, subsequent_indent=" " * 12) for entry in entries]
        # There is no docstring under -OO.
        taking.__doc__ = (function.__doc__ or "").replace("        {options}", "\n".join(lines))
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
            and what to do, and nothing is patched. What only the import of a framework shows is raised there. Where
            Lightning is served, an Accelerate or Trainer that cannot be patched is a warning.
    """
    return _put_in_force(options, _warn_caller)


def _put_in_force(
    options: Mapping[str, Any], tell: Callable[[str], object], refuse: Callable[[str], None] | None = None
) -> Status:
    global _current, _refused
    new_settings = _settings.checked(options, _settings.current() if _current else None)
    _unpatch_other_copy()
    _finish_imports()
    findings = probe_all() if _current is None else {}
    with _lock:
        if _current is None:
            findings = findings or probe_all()
            check(findings)
            _current = _Patch(findings, to_be_served(findings), tell)
            setattr(sys, _IN_FORCE, unpatch)
            for note in notes_on(findings):
                tell(note)
        _serve_all()
        _settings.put_in_force(new_settings)
    # What another thread was importing meanwhile is complete only now.
    _finish_imports()
    with _lock:
        if _current is not None:  # else another thread has called unpatch() since
            _serve_all()
            _refuse_half_imported(_current)
            _current.tell, _current.refuse = tell, refuse
            _refused = ""
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
    if _current is not None:
        return
    try:
        _put_in_force({}, notes.append, refuse)
    except PatchError as error:
        _refuse_engines(str(error), refuse)


def _refuse_engines(reason: str, refuse: Callable[[str], None]) -> None:
    """Call `refuse` at the first engine that needs `patch()`, unless the program has called it, or `unpatch()`."""
    global _refused
    _refused = reason

    def init(wrapped: Callable[..., None], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if _refused and has_both_kinds(engine):
            refuse(_refused)

    def wrap_engine(module: ModuleType) -> None:
        if hasattr(module, ENGINE.class_name):
            wrapt.wrap_function_wrapper(module, f"{ENGINE.class_name}.__init__", init)
        elif _refused:
            refuse(_refused)

    wrapt.register_post_import_hook(wrap_engine, ENGINE.module)


def is_in_force() -> bool:
    """Whether `patch()` has been called, and `unpatch()` not since."""
    return _current is not None


def _refuse_half_imported(current: _Patch) -> None:
    for module in current.modules:
        if module in sys.modules and module not in current.wrappings and module not in _hooked:
            unpatch()
            raise PatchError(
                f"patch() was called while {module} was being imported; nothing is patched."
                " Call it before or after that import."
            )


def unpatch() -> None:
    """Restore everything that was wrapped. Without `patch()` before, it does nothing.

    Raises:
        CheckpointError: on every rank, if a save was still in flight, and has failed.
    """
    try:
        in_flight.wait()
    finally:
        _unpatch()


def _unpatch() -> None:
    global _current, _refused
    _refused = ""
    for finder in _waiting():
        finder.leave_unpatched()
    with _lock:
        if _current is not None:
            for wrapping in (w for wrappings in _current.wrappings.values() for w in reversed(wrappings)):
                wrapping.undo()
            release_all()
        _current = None
        if getattr(sys, _IN_FORCE, None) is unpatch:
            delattr(sys, _IN_FORCE)
        notes.clear()
        _settings.put_in_force(None)


def _for_a_while(patch: Callable[_P, Status]) -> Callable[_P, AbstractContextManager[Status]]:
    @contextmanager
    @wraps(patch)
    def patched(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[Status]:
        before = _settings.current() if _current is not None else None
        now = patch(*args, **kwargs)
        try:
            yield now
        finally:
            if before is None:
                unpatch()
            else:
                _settings.put_in_force(before)

    patched.__name__ = patched.__qualname__ = "patched"
    patched.__doc__ = """`patch(...)` while this lasts, and the previous state afterwards, for tests and notebooks.

    It takes the arguments of `patch()`, and its value is what `patch()` returns.
    """
    return patched


patched = _for_a_while(patch)


def status() -> Status:
    """What is installed, and what `patch()` has done or would do with it.

    A target that is not imported yet is judged by the text of its source; its import may show more.

    Returns:
        The frameworks by name, including those that are not installed. They are the four packages of Lightning,
        "accelerate", "transformers" and "deepspeed".
    """
    patch, findings, problem = _current, _current.findings if _current else probe_all(), ""
    if patch is None:
        try:
            check(findings)
        except PatchError as error:
            problem = str(error)
    in_force = patch is not None or (not problem and bool(_waiting()))
    targets = {what: findings[what.name] for what in (*OWNERS, ENGINE)}
    states = {what.name: _status_of(what, finding, patch, in_force, problem) for what, finding in targets.items()}
    return Status(states, in_force, problem)


def _waiting() -> list[Any]:
    """The bootstrap's finder, under `ds-frozen-patch run` and until it has patched."""
    return [finder for finder in sys.meta_path if hasattr(finder, "leave_unpatched")]


def _status_of(what: Target, finding: Finding, patch: _Patch | None, in_force: bool, problem: str) -> TargetStatus:
    state, reason, remedy = finding.verdict, finding.reason, finding.remedy
    if state == "refused":
        state = "cannot be wrapped"
    elif problem and state != "not installed":
        state, reason = "cannot be wrapped", "patch() raises here, and patches nothing"
    elif finding.complete or (state == "native" and not in_force):
        state = "has it itself"
    elif state != "not installed":
        state = "waiting for import" if in_force else "can be wrapped"
    if patch is not None and what.name in patch.names and what.module in patch.wrappings:
        state = "wrapped"
        if not patch.has_wrapped(what.module):
            state, reason, remedy = "can be wrapped", f"{what.module} has been reloaded since patch()", "call it again"
        elif replaced := patch.replaced(what):
            state, reason = "can be wrapped", f"{what.class_name}.{', '.join(replaced)} has been replaced since patch()"
            remedy = "call patch() after whatever replaces it, or let that call the method which it replaces"
    return TargetStatus(state, finding.version, reason, remedy)


def _finish_imports() -> None:
    """Wait until another thread has finished its imports.

    Never called with our lock held: that thread may be waiting for the lock, in our import hook.
    """
    for what in (*OWNERS, ENGINE, *BESIDE):
        if what.module in sys.modules:
            importlib.import_module(what.module)


def _serve_all() -> None:
    """Wrap each class whose module is imported, and register a hook for the others."""
    assert _current is not None
    for module in _current.modules:
        if module in sys.modules:
            _on_import(sys.modules[module])
        elif module not in _hooked:
            _hooked.add(module)
            wrapt.register_post_import_hook(_hook, module)


def _hook(module: ModuleType) -> None:
    """Called by wrapt once a module is imported."""
    with _lock:
        _hooked.discard(module.__name__)
        refuse = _current.refuse if _current else None
        try:
            _on_import(module, is_complete=True)
        except PatchError as error:
            if refuse is None:
                raise
            _refuse_engines(str(error), refuse)


def _on_import(module: ModuleType, is_complete: bool = False) -> None:
    """Wrap the class of an imported module, unless that is done. Called with our lock held."""
    targets = _current.modules.get(module.__name__) if _current else None
    if _current is None or targets is None or _current.has_wrapped(module.__name__):
        return
    wrappings: list[Wrapping] = []
    for what in targets:
        if what in BESIDE:
            wrappings += wrap_beside(what, module, _enabled(_current))
            continue
        cls = imported_class(what)
        if cls is None and not is_complete and getattr(module.__spec__, "_initializing", False):
            return  # half imported: patch() returns to it
        finding = probe(what, is_imported=True)
        if finding.verdict == "refused":
            if not may_be_left_alone(what.name, _current.names):
                unpatch()
                raise PatchError(refusal([(what.name, finding)]))
            _current.tell(note_on_refused([(what.name, finding)]))
            _current.findings[what.name] = finding
            _current.modules[module.__name__] = []
            break
        _current.findings[what.name] = finding
        wrappings += wrap(what, cls, _enabled(_current))
    _current.wrappings.setdefault(module.__name__, []).extend(wrappings)
    _current.specs[module.__name__] = module.__spec__


def _enabled(patch: _Patch) -> Callable[[], bool]:
    return lambda: _current is patch

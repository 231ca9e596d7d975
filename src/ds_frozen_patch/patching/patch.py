"""`patch()`, `unpatch()` and `status()`."""

from __future__ import annotations

import importlib
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import ParamSpec

import wrapt

from .. import settings as _settings
from ..common.errors import PatchError
from ..common.probing import Finding, Target, imported_class, probe
from ..engine.served import release_all
from ..engine.target import ENGINE
from ..frameworks.targets import BESIDE, OWNERS, may_be_left_alone
from ..publish import in_flight
from ..settings import Export, Optimizer, VerifyBase
from .findings import (
    probe_all,
    refusal,
    to_be_served,
    warn_of_complete,
    warn_of_refused,
    warn_of_unknown_variables,
    warn_of_untested,
)
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
        refuse: called with the reason if a target is refused at its import, and the program has not called `patch()`
            itself.
    """

    findings: dict[str, Finding]
    modules: dict[str, list[Target]]
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
_hooked: set[str] = set()  # wrapt cannot remove an import hook: without a current patch, ours does nothing
_P = ParamSpec("_P")
_lock = threading.RLock()


def patch(
    *,
    verify_base: VerifyBase | None = None,
    keep: Iterable[str] | None = None,
    leave_out: Iterable[str] | None = None,
    export: Export | None = None,
    elastic: bool | None = None,
    optimizer: Optimizer | None = None,
    sync: bool | None = None,
    trust: bool | None = None,
    whole_model: bool | None = None,
    async_save: bool | None = None,
    verify_files: bool | None = None,
) -> Status:
    """Make the checkpoints of Lightning, Accelerate, Trainer and DeepSpeed alone trainable-only, and loadable.

    What is imported already is wrapped now, the rest when it is imported. Call it before the engine is created.
    A second call changes only the settings that it names.

    Args:
        {options}

    For each argument that is not given, an environment variable counts, such as DS_FROZEN_PATCH_VERIFY_BASE: `keep` and
    `leave_out` are separated by commas there, and True and False are 1 and 0.

    Returns:
        What `status()` returns afterwards.

    Raises:
        TypeError, ValueError: an argument has none of its possible values.
        PatchError: DeepSpeed is not installed, or something that is installed cannot be patched. The message says why
            and what to do, and nothing is patched. What only the import of a framework shows is raised there. Where
            Lightning is served, an Accelerate or Trainer that cannot be patched is a warning.
    """
    arguments = dict(locals())
    global _current
    new_settings = _settings.checked(arguments, _settings.current() if _current else None)
    _finish_imports()
    findings = probe_all() if _current is None else {}
    with _lock:
        if _current is None:
            findings = findings or probe_all()
            _current = _Patch(findings, to_be_served(findings))
            warn_of_untested(findings)
            warn_of_complete(findings)
            warn_of_refused(findings)
            warn_of_unknown_variables()
        _serve_all()
        _settings.put_in_force(new_settings)
    # What another thread was importing meanwhile is complete only now.
    _finish_imports()
    with _lock:
        if _current is not None:  # else another thread has called unpatch() since
            _serve_all()
            _refuse_half_imported(_current)
            _current.refuse = None
        return status()


def _with_options(docstring: str) -> str:
    """The docstring of `patch()`, with a line for each option."""
    entries = [f"{option.name}: {_settings.described(option)}" for option in _settings.OPTIONS.values()]
    lines = [textwrap.fill(entry, 120, initial_indent=" " * 8, subsequent_indent=" " * 12) for entry in entries]
    return docstring.replace("        {options}", "\n".join(lines))


patch.__doc__ = _with_options(patch.__doc__ or "")  # which is None under -OO


def patch_quietly(refuse: Callable[[str], None]) -> None:
    """`patch()` for a program that has not called it; `refuse` gets the reason if that fails, now or at an import."""
    if _current is not None:
        return
    try:
        patch()
    except PatchError as error:
        refuse(str(error))
    with _lock:
        if _current is not None:
            _current.refuse = refuse


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
    global _current
    for patch_now in _waiting():
        patch_now()  # else it would patch at the import of a framework
    with _lock:
        if _current is not None:
            for wrapping in (w for wrappings in _current.wrappings.values() for w in reversed(wrappings)):
                wrapping.undo()
            release_all()
        _current = None
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
        The targets by name, including those that are not installed. They are the four of Lightning, "accelerate",
        "transformers" and "deepspeed".
    """
    patch = _current
    return Status({what.name: _status_of(what, patch) for what in (*OWNERS, ENGINE)})


def _waiting() -> list[Callable[[], None]]:
    """Under `ds-frozen-patch run`, and until a framework is imported: what patches then, or when it is called."""
    return [finder.before_framework for finder in sys.meta_path if hasattr(finder, "before_framework")]


def _status_of(what: Target, patch: _Patch | None) -> TargetStatus:
    finding = patch.findings[what.name] if patch else probe(what)
    state, reason, remedy = finding.verdict, finding.reason, finding.remedy
    wrapped = patch is not None and what.name in patch.names and patch.has_wrapped(what.module)
    if patch is not None and wrapped and (replaced := patch.replaced(what)):
        wrapped = False
        reason = f"{what.class_name}.{', '.join(replaced)} has been replaced since patch()"
        remedy = "call patch() after whatever replaces it, or let that call the method which it replaces"
    elif patch is not None and what.name in patch.names and what.module in patch.wrappings and not wrapped:
        reason, remedy = f"{what.module} has been reloaded since patch()", "call patch() again"
    if state == "patchable" and (what.name in patch.names if patch else _waiting()):
        state = "applied" if patch is not None and what.module in patch.wrappings else "armed"
    return TargetStatus(state, finding.version, wrapped, reason, remedy)


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
            refuse(str(error))


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
            warn_of_refused({what.name: finding})
            _current.findings[what.name] = finding
            _current.modules[module.__name__] = []
            break
        _current.findings[what.name] = finding
        wrappings += wrap(what, cls, _enabled(_current))
    _current.wrappings.setdefault(module.__name__, []).extend(wrappings)
    _current.specs[module.__name__] = module.__spec__


def _enabled(patch: _Patch) -> Callable[[], bool]:
    return lambda: _current is patch

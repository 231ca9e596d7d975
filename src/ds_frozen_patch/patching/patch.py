"""`patch()`, `unpatch()` and `status()`: put the wrappers on, take them off, say what is what."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from .. import settings as _settings
from ..common.errors import PatchError
from ..common.probing import Finding, Target, imported_class, probe
from ..engine.attached import restore_methods
from ..engine.target import ENGINE
from ..load import engine as load_engine
from ..owners.lightning import converter, strategy
from ..owners.lightning.targets import BESIDE, TARGETS
from ..save import engine as save_engine
from ..settings import FLAG
from .tested import newer_than_tested

_STRATEGY_WRAPPERS: dict[str, Callable[..., Any]] = {
    "__init__": strategy.init,
    "setup": strategy.setup,
    "setup_module": strategy.setup,
    "setup_module_and_optimizers": strategy.setup,
    "save_checkpoint": strategy.save_checkpoint,
    "load_checkpoint": strategy.load_checkpoint,
}
_ENGINE_WRAPPERS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": save_engine.save_checkpoint,
    "load_checkpoint": load_engine.load_checkpoint,
    "module_state_dict": save_engine.module_state_dict,
    "load_module_state_dict": load_engine.load_module_state_dict,
}
_WRAPPERS_BESIDE: dict[str, Callable[..., Any]] = {
    "convert_zero_checkpoint_to_fp32_state_dict": converter.convert,
    "_find_last_checkpoints": strategy.find_last,
}


@dataclass(frozen=True)
class TargetStatus:
    """What the shim makes of one target.

    `state` is "native" (this Lightning has the flag itself; see `wrapped` and `found`), "patchable" (`patch()`
    would serve it), "armed" (will be wrapped when it is imported), "applied" (wrapped), "refused"
    (cannot be served) or "not installed". `version` is that of its distribution, None where there is none. `wrapped`
    says whether our wrappers are on it now. `found` and `remedy` are sentences for a person.
    """

    state: str
    version: str | None
    wrapped: bool
    found: str
    remedy: str


class Status(dict[str, TargetStatus]):
    """A `TargetStatus` per target, by its package's name, and one for "deepspeed". Prints as a table."""

    def __str__(self) -> str:
        rows = [("target", "version", "state", "wrapped", "found")]
        for name, item in self.items():
            found = f"{item.found}: {item.remedy}" if item.remedy else item.found
            rows.append((name, item.version or "-", item.state, "yes" if item.wrapped else "no", found))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        )


class _BoundInitWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """What access through the class or an instance gives; wrapt 1.16 does not ask its parent for the signature."""

    @property
    def __signature__(self) -> inspect.Signature:
        signature: inspect.Signature = self._self_parent.__signature__
        bound = self._self_instance is not None
        return signature.replace(parameters=list(signature.parameters.values())[bound:])

    @property
    def __func__(self) -> Any:
        """What `inspect` looks at instead of a bound method, from Python 3.13 on for a class too."""
        return self._self_parent


class _InitWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped constructor that shows the argument which it adds to `inspect`, and so to LightningCLI."""

    __bound_function_wrapper__ = _BoundInitWrapper

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__wrapped__)
        parameters = [p for p in signature.parameters.values() if p.name != FLAG]
        # None, not upstream's False: LightningCLI passes every default on, and a default is not a choice.
        flag = inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
        end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        return signature.replace(parameters=[*parameters[:end], flag, *parameters[end:]])


@dataclass(frozen=True)
class _Wrapping:
    """One wrapper on one attribute of one class, or of a module."""

    cls: Any
    attribute: str
    original: Any
    inherited: bool
    wrapper: Any

    def undo(self) -> None:
        """Put the very original back, if the attribute is still our wrapper."""
        if self.cls.__dict__.get(self.attribute) is not self.wrapper:
            return  # somebody wrapped over it: ours stays inside, switched off
        if self.inherited:
            delattr(self.cls, self.attribute)
        else:
            setattr(self.cls, self.attribute, self.original)


@dataclass
class _Patch:
    """What one `patch()` did, until `unpatch()`.

    `modules` are those to be served, imported yet or not. `refuse` is told of what is refused at its import, where
    the program has not called `patch()` itself.
    """

    findings: dict[str, Finding]
    modules: dict[str, Target]
    wrappings: dict[str, list[_Wrapping]] = field(default_factory=dict)
    refuse: Callable[[str], None] | None = None


_current: _Patch | None = None
_hooked: set[str] = set()  # wrapt cannot take an import hook back: without a current patch ours does nothing
_lock = threading.RLock()


def patch(
    *,
    verify_base: str | None = None,
    keep: Iterable[str] | None = None,
    leave_out: Iterable[str] | None = None,
    export: str | None = None,
    fp32_weights: bool | None = None,
    elastic: bool | None = None,
    sync: bool | None = None,
    trust: bool | None = None,
) -> Status:
    """Make the checkpoints of every installed Lightning trainable-only, and loadable.

    What is imported already is wrapped now, the rest when it is imported. Call it before training.
    A second call changes only the settings that it names.

    Args:
        verify_base: what to do if a checkpoint is loaded onto another base than it was saved with: "error" (the
            default), "warn", or "off" to not look.
        keep: shell patterns such as "*.random_features": frozen parameters with such names are saved all the
            same, because no base holds their values.
        leave_out: shell patterns such as "*.qweight": buffers with such names are left out as part of the base, and
            frozen parameters even if training changes them. The buffers of the quantized layers of GPTQ, AWQ, HQQ,
            optimum-quanto and torchao are left out without it.
        export: what to put into each checkpoint's directory, to be used at once: "safetensors" for
            a file `trainable.safetensors`, or "peft" for a folder `adapter`.
        fp32_weights: let single files (of `save_weights_only=True`) and what `export` makes hold the
            optimizer's fp32 masters instead of the model's own weights, which may be of 16 bits.
        elastic: reshard a checkpoint that another number of ranks has saved, when it is loaded: once, into a folder of
            its own directory. Otherwise such a load is an error that says how to, which offers this option unless it
            is False.
        sync: whether a save waits until its files are on the disk (True by default), so that a power cut or a crash of
            the machine loses neither it nor the checkpoint that it replaces. With False it can lose both.
        trust: whether a load may run what a checkpoint names. False: it loads tensors, plain values and DeepSpeed's own
            classes, and refuses all else before anything is read (torch 2.6 or newer; releases before 2.10 have known
            ways around it). True: it may. Not given: it may, and a warning names what is not expected in a checkpoint.

    For each argument that is not given, an environment variable counts, such as DS_FROZEN_PATCH_VERIFY_BASE; `keep`
    and `leave_out` are lists with commas there, and what is True or False is 1 or 0.

    Returns:
        What `status()` gives afterwards.

    Raises:
        TypeError, ValueError: an argument is not of these.
        PatchError: Lightning or DeepSpeed is not installed, or one of them cannot be served. The
            message says why and what to do. Then nothing at all is patched. What can be seen only
            at a target's import is raised there.
    """
    global _current
    before = _settings.current() if _current else None
    new_settings = _settings.settings(verify_base, keep, export, fp32_weights, elastic, sync, leave_out, trust, before)
    _finish_imports()
    findings = _probe_all() if _current is None else {}
    with _lock:
        if _current is None:
            findings = findings or _probe_all()
            served = [what for what in (*TARGETS, ENGINE, *BESIDE) if _is_to_be_served(findings[what.name])]
            _current = _Patch(findings, {what.module: what for what in served})
            _warn_of_untested(findings)
            _warn_of_complete(findings)
        _serve_all()
        _settings.put_in_force(new_settings)
    # What another thread had begun to import in between is whole only now.
    _finish_imports()
    with _lock:
        if _current is not None:  # else another thread has called unpatch() since
            _serve_all()
            _refuse_half_imported(_current)
            _current.refuse = None
        return status()


def patch_quietly(refuse: Callable[[str], None]) -> None:
    """`patch()` for a program that has not called it; what is refused, now or at its import, is told to `refuse`."""
    if _current is not None:
        return
    try:
        patch()
    except PatchError as error:
        refuse(str(error))
    with _lock:
        if _current is not None:
            _current.refuse = refuse


def _warn_of_untested(findings: dict[str, Finding]) -> None:
    newer = {
        f"{what.distributions[0]} {findings[what.name].version} (tested: up to {tested})"
        for what in (*TARGETS, ENGINE)
        if (tested := newer_than_tested(what, findings[what.name].version))
    }
    if newer:
        _warn_caller(
            f"ds_frozen_patch is applied to a release that is newer than all that it was tested with:"
            f" {', '.join(sorted(newer))}. It has all that the shim relies on. Look for a newer ds_frozen_patch."
        )


def _is_to_be_served(finding: Finding) -> bool:
    return finding.verdict != "not installed" and not finding.complete


def _warn_of_complete(findings: dict[str, Finding]) -> None:
    complete = [f"{name} {finding.version}" for name, finding in findings.items() if finding.complete]
    if complete:
        _warn_caller(
            f"patch() leaves alone what has our patch series already: {', '.join(complete)}. Its checkpoints are full"
            f" unless you say DeepSpeedStrategy({FLAG}=True), and it does not verify the base."
        )


def _warn_caller(message: str) -> None:
    """Warn whoever called `patch()`, once per node; for the functions that it calls."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(message, stacklevel=4)


def _refuse_half_imported(current: _Patch) -> None:
    for module in current.modules:
        if module in sys.modules and module not in current.wrappings and module not in _hooked:
            unpatch()
            raise PatchError(
                f"patch() was called while {module} was being imported; nothing is patched."
                " To do: call it before that import or after it."
            )


def unpatch() -> None:
    """Restore the very originals. Without `patch()` before, it does nothing."""
    global _current
    _stop_waiting()
    with _lock:
        if _current is not None:
            for wrapping in (w for wrappings in _current.wrappings.values() for w in reversed(wrappings)):
                wrapping.undo()
            restore_methods()
        _current = None
        _settings.put_in_force(None)


@contextmanager
def patched(
    *,
    verify_base: str | None = None,
    keep: Iterable[str] | None = None,
    leave_out: Iterable[str] | None = None,
    export: str | None = None,
    fp32_weights: bool | None = None,
    elastic: bool | None = None,
    sync: bool | None = None,
    trust: bool | None = None,
) -> Iterator[Status]:
    """`patch(...)` while this lasts, then the state from before: for tests and notebooks. Gives what `patch()` does."""
    before = _settings.current() if _current is not None else None
    now = patch(
        verify_base=verify_base,
        keep=keep,
        leave_out=leave_out,
        export=export,
        fp32_weights=fp32_weights,
        elastic=elastic,
        sync=sync,
        trust=trust,
    )
    try:
        yield now
    finally:
        if before is None:
            unpatch()
        else:
            _settings.put_in_force(before)


def status() -> Status:
    """What is installed and what `patch()` did, or would do, per target.

    A target that is not imported yet is judged by its source, where that is enough.

    Returns:
        The four targets and "deepspeed" by name, those that are not installed too.
    """
    _stop_waiting()
    patch = _current
    return Status({what.name: _status_of(what, patch) for what in (*TARGETS, ENGINE)})


def _stop_waiting() -> None:
    """Under `ds-frozen-patch run`, patch what waits for Lightning's import: who asks takes it for patched."""
    for finder in list(sys.meta_path):
        if before_lightning := getattr(finder, "before_lightning", None):
            before_lightning()


def _status_of(what: Target, patch: _Patch | None) -> TargetStatus:
    finding = patch.findings[what.name] if patch else probe(what)
    wrapped = patch is not None and what.module in patch.wrappings
    state = finding.verdict
    if patch and state == "patchable":
        state = "applied" if wrapped else "armed"
    return TargetStatus(state, finding.version, wrapped, finding.reason, finding.remedy)


def _probe_all() -> dict[str, Finding]:
    findings = {what.name: probe(what) for what in (*TARGETS, ENGINE)}
    if all(findings[target.name].verdict == "not installed" for target in TARGETS):
        raise PatchError("Lightning is not installed. To do: pip install 'ds_frozen_patch[lightning]'.")
    if findings[ENGINE.name].verdict == "not installed":
        raise PatchError("DeepSpeed is not installed. To do: pip install 'deepspeed>=0.10.1'.")
    if refused := [(name, finding) for name, finding in findings.items() if finding.verdict == "refused"]:
        raise PatchError(_refusal(refused))
    return findings


def _refusal(refused: list[tuple[str, Finding]]) -> str:
    lines = [f"{name} {finding.version or ''}: {finding.reason}. To do: {finding.remedy}." for name, finding in refused]
    return "\n".join(["ds_frozen_patch cannot serve what is installed; nothing is patched.", *lines])


def _finish_imports() -> None:
    """Wait until what another thread is importing is there.

    Never called with our lock held: that thread may be waiting for it, in our import hook.
    """
    for what in (*TARGETS, ENGINE, *BESIDE):
        if what.module in sys.modules:
            importlib.import_module(what.module)


def _serve_all() -> None:
    """Wrap each class whose module is imported, and wait for the import of the others."""
    assert _current is not None
    for module in _current.modules:
        if module in sys.modules:
            _on_import(sys.modules[module])
        elif module not in _hooked:
            _hooked.add(module)
            wrapt.register_post_import_hook(_hook, module)


def _hook(module: ModuleType) -> None:
    """wrapt calls this once a module that we wait for is imported."""
    with _lock:
        _hooked.discard(module.__name__)
        refuse = _current.refuse if _current else None
        try:
            _on_import(module)
        except PatchError as error:
            if refuse is None:
                raise
            refuse(str(error))


def _on_import(module: ModuleType) -> None:
    """Wrap the class of a module that is imported, unless that is done. Called with our lock held."""
    what = _current.modules.get(module.__name__) if _current else None
    if _current is None or what is None or what.module in _current.wrappings:
        return
    if what in BESIDE:
        _current.wrappings[what.module] = _wrap_beside(what, module, _current)
        return
    cls = imported_class(what)
    if cls is None and getattr(module.__spec__, "_initializing", False):
        return  # half imported: patch() comes back to it
    finding = probe(what)
    if finding.verdict == "refused":
        unpatch()
        raise PatchError(_refusal([(what.name, finding)]))
    _current.findings[what.name] = finding
    _current.wrappings[what.module] = _wrap(what, cls, _current)


def _wrap_beside(what: Target, module: ModuleType, patch: _Patch) -> list[_Wrapping]:
    owner = getattr(module, what.class_name, None) if what.class_name else module
    (name,) = what.methods
    original = vars(owner).get(name) if owner is not None else None
    if original is None:
        return []
    wrapper = wrapt.FunctionWrapper(original, _WRAPPERS_BESIDE[name], enabled=lambda: _current is patch)
    setattr(owner, name, wrapper)
    return [_Wrapping(owner, name, original, False, wrapper)]


def _wrap(what: Target, cls: Any, patch: _Patch) -> list[_Wrapping]:
    wrappers = _ENGINE_WRAPPERS if what is ENGINE else _STRATEGY_WRAPPERS
    wrappings = []
    for method in what.methods:
        make = _InitWrapper if method == "__init__" else wrapt.FunctionWrapper
        _, attribute, original = wrapt.resolve_path(cls, method)
        wrapper = make(original, wrappers[method], enabled=lambda: _current is patch)
        wrappings.append(_Wrapping(cls, attribute, original, method not in cls.__dict__, wrapper))
    for wrapping in wrappings:
        setattr(wrapping.cls, wrapping.attribute, wrapping.wrapper)
    return wrappings

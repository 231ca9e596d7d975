"""The wrappers of a strategy's methods, of Trainer and Fabric.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...common.durable import wait_for_name
from ...common.errors import named
from ...common.overrides import overridden, set_to
from ...common.work_folder import is_left_behind, left_behind, moved_away
from ...cures import moved_in_deepspeed, unwrapped
from ...engine import frozen, handshake
from ...engine.attached import attach
from ...engine.owner import is_first, warn
from ...load.load import Load
from ...load.load import current as current_load
from ...load.look import Look
from ...load.trust import trust
from ...parameters import names_by_parameter
from ...save.agreement import explaining_errors
from ...save.engine import begin, writes_before_it_returns
from ...save.save import Save
from ...save.save import current as current_save
from ...settings import FLAG, matches
from ...settings import current as settings
from . import single_file
from .owner import BUILT, LightningOwner

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def init(wrapped: Callable[..., None], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`DeepSpeedStrategy(exclude_frozen_parameters=None | True | False)`; None follows `patch()`."""
    signature = inspect.signature(wrapped)
    if FLAG in signature.parameters:
        call = signature.bind_partial(*args, **kwargs)
        choice = call.arguments.get(FLAG)
        call.arguments[FLAG] = effective = _checked(choice)
        args, kwargs = call.args, call.kwargs
    else:
        kwargs = dict(kwargs)
        effective = _checked(kwargs.pop(FLAG, None))
    wrapped(*args, **kwargs)
    setattr(strategy, FLAG, effective)
    setattr(strategy, BUILT, True)


def _checked(choice: Any) -> bool:
    if choice is not None and not isinstance(choice, bool):
        raise TypeError(f"{FLAG} must be True, False or None (follow patch()), not {choice!r}")
    return choice is not False


def setup(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trainer's `setup`, Fabric's `setup_module` and `setup_module_and_optimizers`: they create an engine."""
    owner = LightningOwner(strategy)
    handshake.announce(owner)
    result = wrapped(*args, **kwargs)
    handshake.check(owner)
    engine = strategy.model
    if engine is not None:
        by_parameter = names_by_parameter(engine.module)
        trained = frozenset(names[0] for parameter, names in by_parameter.items() if parameter.requires_grad)
        frozen.sample_at_start(attach(engine, owner, trained), engine)
        _check_patterns(owner, engine.module)
    return result


def _check_patterns(owner: LightningOwner, module: Any) -> None:
    """Warn of patterns that match nothing in this module, for they may be misspelt."""
    now = settings()
    if not now.keep and not now.leave_out:
        return
    names = [one.names for one in frozen.frozen(module)]
    for option, patterns in (("keep", now.keep), ("leave_out", now.leave_out)):
        if idle := [pattern for pattern in patterns if not any(matches(own, [pattern]) for own in names)]:
            warn(owner, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")


def save_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `save_checkpoint`: writes beside the final path, and publishes.

    With `weights_only=True`, Lightning would let the engine save everything all the same.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    name = next((name for name in ("filepath", "path") if name in call.arguments), None)  # Trainer's and Fabric's
    engine = strategy.model
    if engine is None:
        return wrapped(*args, **kwargs)
    owner = LightningOwner(strategy)
    known = attach(engine, owner)
    if name is None:
        return wrapped(*args, **kwargs)  # the strategy has been changed: its engine saves to wherever it says
    path = call.arguments[name]
    with explaining_errors(path) as saves:
        alone = is_local(path) and single_file.is_weights_only(call.arguments.get("checkpoint", {}))
        save = begin(engine, known, path, "the weights alone" if alone else "a checkpoint", owner.excludes(None))
        saves.append(save)
        if alone:
            return single_file.save(save, call.arguments["checkpoint"], call.arguments.get("storage_options"))
        if is_local(path):
            call.arguments[name] = _begin(save)
        else:
            save.is_in_place = True
        try:
            with set_to(current_save, save):
                result = wrapped(*call.args, **call.kwargs)
        except BaseException:
            save.discard()
            raise
        save.raise_on_all_ranks() if save.is_in_place else save.publish()
        return result


def is_local(path: Any) -> bool:
    """Whether a path is one of a mounted file system, and not an address such as s3://bucket/name, a `Path` or not."""
    return _ADDRESS.match(str(path)) is None


def _begin(save: Save) -> Path:
    """The path that the engine is to write to."""
    if not writes_before_it_returns(save.engine):
        save.is_in_place = True
        save.attached.warn_once(
            f"DeepSpeed's {type(save.engine.checkpoint_engine).__name__} writes after a save has returned. So a"
            f" checkpoint is written to {save.target.parent} in place: a save that is killed or fails leaves an"
            " incomplete one. Use DeepSpeed's default checkpoint engine to prevent that."
        )
        return save.target
    save.begin()
    if is_first(save.owner) and (other := save.other_job()):
        warn(save.owner, other)
    assert save.disks is not None
    if save.disks.are_several and not save.engine.use_node_local_storage():
        save.attached.warn_once(
            f"The nodes write {save.target.parent} to disks of their own, but DeepSpeed is configured for a shared"
            ' one: it will not find all files at a resume. Set "checkpoint": {"use_node_local_storage": true} in its'
            " configuration, or save to a disk that all nodes share.",
        )
    return save.new


def load_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `load_checkpoint`: finds the checkpoint, and loads single files that Trainer has saved."""
    with trust(), overridden(moved_in_deepspeed()):
        return _load(wrapped, strategy, inspect.signature(wrapped).bind(*args, **kwargs))


def _load(wrapped: Callable[..., Any], strategy: Any, call: inspect.BoundArguments) -> Any:
    owner, engine = LightningOwner(strategy), strategy.model
    if engine is not None:
        attach(engine, owner)
    state = call.arguments.get("state")  # Fabric's: what to restore, by name; or the module alone
    name = next((name for name in ("checkpoint_path", "path") if name in call.arguments), None)
    if name is None or (strategy.load_full_weights and strategy.zero_stage_3) or not is_local(call.arguments[name]):
        return wrapped(*call.args, **call.kwargs)
    load = Load(owner, tuple(map(unwrapped, state.values())) if isinstance(state, Mapping) else (), engine)
    path, content, problem = Path(call.arguments[name]), None, None
    try:
        if name == "checkpoint_path" and path.is_file() and path.parent.name != "checkpoint":
            options = {key: value for key, value in call.arguments.items() if key not in (name, "kwargs")}
            content = single_file.read(strategy, path, **options, **call.arguments.get("kwargs", {}))
        if content is None:
            call.arguments[name] = _find(owner, path)
    except Exception as error:  # raised below, on all ranks
        problem = error
    if problem is not None or content is not None:
        load.share_look(Look(problem=str(problem or "")))
        load.agree("a checkpoint" if content is None else "a single file", problem)
    if content is not None:
        return single_file.load(load, path, content)
    with set_to(current_load, load):
        return wrapped(*call.args, **call.kwargs)


def _find(owner: LightningOwner, path: Path) -> Path:
    """The path, or where a save that was killed while it renamed has left the checkpoint of that name."""
    wait_for_name(path)
    if not path.exists() and (copies := left_behind(path)):
        path = copies[0]
    _check_path(path)
    if is_left_behind(path):
        warn(
            owner,
            f"A save was killed while it renamed its checkpoint. The previous checkpoint {path.name} is loaded from"
            f" {path}.",
        )
    return path


def _check_path(path: Path) -> None:
    """Raise FileNotFoundError for what cannot be a checkpoint: before 2.1 Lightning goes on, and DeepSpeed fails."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Pass the directory that a save wrote (it contains `latest` and"
            " `checkpoint/`), by a path that is the same on every node."
        )
    inner = path if path.name == "checkpoint" else path.parent
    if inner.name == "checkpoint" and (inner.parent / "latest").is_file():
        raise FileNotFoundError(f"{path} is a part of a DeepSpeed checkpoint. Pass all of it: {inner.parent}")
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file, and a DeepSpeed checkpoint is a directory. Trainer loads single files that Lightning"
            " has saved, Fabric does not: load the weights into the module before you pass it on, with"
            " ds_frozen_patch.load_trainable(module, path)."
        )


def find_last(wrapped: Callable[..., set[str]], callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._find_last_checkpoints`, for `ckpt_path="last"`: also finds one that a killed save has moved.

    Where the file system cannot exchange two names in one step, a save that is killed in between has moved the last
    checkpoint away, and `fit` would start from nothing.
    """
    found = wrapped(*args, **kwargs)
    folder = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", lambda _: callback.dirpath)(*args, **kwargs)
    last = str(getattr(callback, "CHECKPOINT_NAME_LAST", "last"))
    if not folder or not is_local(folder):
        return found
    moved = (copy for copy in moved_away(Path(folder)) if copy.name.startswith(last) and copy.suffix == ".ckpt")
    return found | {str(copy) for copy in moved}

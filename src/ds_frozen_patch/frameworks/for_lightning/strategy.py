"""The wrappers of a strategy's methods, of Trainer and Fabric.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...common.overrides import overridden, set_to
from ...core.save import begin
from ...engine.owner import warn
from ...engine.served import attach
from ...load.agreement import agree, list_files
from ...load.listing import Listing
from ...load.running import Load
from ...load.running import current as current_load
from ...load.trust import runs_nothing, trust
from ...publish import in_flight
from ...publish.durable import wait_for_name
from ...publish.publication import is_local
from ...save.agreement import explaining_errors
from ...settings import FLAG
from ...settings import current as settings
from ...workarounds.for_fabric import CLIPS, clips_unasked, moved_in_deepspeed, unwrapped
from ..serving import owned_by
from . import loops, single_file
from .owner import BUILT, owner_of
from .retention import forget_paths_outside


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
    with owned_by(lambda _: owner_of(strategy)):
        result = wrapped(*args, **kwargs)
    if strategy.model is not None and clips_unasked(strategy.model, (owner := owner_of(strategy)).config):
        warn(owner, CLIPS)
    return result


def save_of_trainer(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.save_checkpoint`: with `weights_only=True` it writes a single file.

    With that, Lightning would let the engine save everything all the same. What the program has asked for counts, not
    what a hook has left of the checkpoint.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    strategy, path = trainer.strategy, call.arguments["filepath"]
    asked = call.arguments.get("weights_only") and is_local(path)
    engine = getattr(strategy, "deepspeed_engine", None) if asked else None  # which only DeepSpeedStrategy has
    served = attach(engine, owner_of(strategy)) if engine is not None else None
    if served is None or served.topology.is_divided:  # no rank has all weights, so the engine saves
        return wrapped(*args, **kwargs)
    path = strategy.broadcast(path)  # as Lightning does before the engine saves
    file, is_managed = single_file.place_of(Path(path)), single_file.writes_locally(strategy.checkpoint_io)
    with explaining_errors(path) as saves:
        exclude = served.owner.excludes(None)
        save = begin(engine, served, file, "the weights alone", exclude, shown=Path(path), is_managed=is_managed)
        saves.append(save)
    single = single_file.SingleFile(save, strategy.lightning_module)
    whole = partial(single.state, strategy.lightning_module_state_dict)
    try:
        with set_to(single_file.current, single), overridden([(strategy, "lightning_module_state_dict", whole)]):
            return wrapped(*args, **kwargs)
    except BaseException:
        save.discard()
        raise


def save_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `save_checkpoint`: lets the engine save, or writes the single file that Trainer has begun."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    name = next((name for name in ("filepath", "path") if name in call.arguments), None)  # Trainer's and Fabric's
    engine = strategy.model
    if engine is None:
        return wrapped(*args, **kwargs)
    owner = owner_of(strategy)
    if attach(engine, owner) is None:
        with overridden([(strategy, FLAG, False)] if hasattr(strategy, FLAG) else []):
            return wrapped(*args, **kwargs)
    if name is None:
        return wrapped(*args, **kwargs)  # the strategy has been changed: its engine saves to wherever it says
    if (single := single_file.current.get()) is not None and single.save.engine is engine:
        single.write(strategy, call.arguments["checkpoint"], call.arguments.get("storage_options"))
        return None
    path = call.arguments[name]
    is_first_on_disk = owner.rank == 0 or (owner.local_rank == 0 and engine.use_node_local_storage())
    if is_local(path) and is_first_on_disk:
        with suppress(OSError):  # the engine's save says what is wrong, on every rank
            single_file.make_way(Path(path))
    with overridden([(strategy, FLAG, owner.excludes(None))] if hasattr(strategy, FLAG) else []):
        result = wrapped(*args, **kwargs)
    if is_local(path) and is_first_on_disk:
        in_flight.afterwards(partial(single_file.remove_from, Path(path)))
    is_async = name == "filepath" and settings().async_save
    for logger in strategy.lightning_module.trainer.loggers if is_async else ():
        if _may_read(logger):
            in_flight.wait_for(type(logger).__name__)
    if Path(path).name.startswith("hpc_ckpt"):  # Lightning's handler of Slurm's signals lets the job end after it
        in_flight.wait()
    return result


def _may_read(logger: Any) -> bool:
    """Whether a logger, which ModelCheckpoint calls next, may read the checkpoint.

    Most of Lightning's own upload files alone, and the checkpoints of engines are folders; Neptune's uploads both.
    """
    is_own = logger.after_save_checkpoint.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    return not is_own or getattr(logger, "_log_model_checkpoints", False)


def remove_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A strategy's `remove_checkpoint`, of Trainer: only once the save in flight, which may replace it, is complete."""
    in_flight.afterwards(partial(wrapped, *args, **kwargs))


def teardown(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The end of a run: waits for the save in flight, and raises its error unless there is one already."""
    wrapped(*args, **kwargs)
    in_flight.wait_at_end()


def load_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `load_checkpoint`: finds the checkpoint, and loads single files that Trainer has saved."""
    in_flight.wait()
    with trust(), overridden(moved_in_deepspeed()):
        checkpoint = _load(wrapped, strategy, inspect.signature(wrapped).bind(*args, **kwargs))
    module = getattr(strategy, "lightning_module", None)
    if runs_nothing() and module is not None:
        folders = [str(path) for item in module.trainer.checkpoint_callbacks if (path := getattr(item, "dirpath", ""))]
        if ignored := forget_paths_outside(checkpoint, folders):
            warn(owner_of(strategy), ignored)
    if isinstance(checkpoint, dict) and "loops" in checkpoint:
        loops.loaded[strategy] = owner_of(strategy), checkpoint["loops"]
    return checkpoint


def _load(wrapped: Callable[..., Any], strategy: Any, call: inspect.BoundArguments) -> Any:
    engine = strategy.model
    if engine is not None and attach(engine, owner_of(strategy)) is None:
        return wrapped(*call.args, **call.kwargs)
    state = call.arguments.get("state")  # Fabric's: what to restore, by name; or the module alone
    name = next((name for name in ("checkpoint_path", "path") if name in call.arguments), None)
    if name is None or (strategy.load_full_weights and strategy.zero_stage_3) or not is_local(call.arguments[name]):
        return wrapped(*call.args, **call.kwargs)
    owner = owner_of(strategy)
    load = Load(owner, tuple(map(unwrapped, state.values())) if isinstance(state, Mapping) else (), engine)
    path, content, problem = Path(call.arguments[name]), None, None
    path = single_file.file_in(path)
    try:
        if name == "checkpoint_path" and path.is_file() and not _is_part(path):
            options = {key: value for key, value in call.arguments.items() if key not in (name, "kwargs")}
            content = single_file.read(strategy, path, **options, **call.arguments.get("kwargs", {}))
        if content is None:
            call.arguments[name] = path
            wait_for_name(path / "checkpoint")
            _check_path(path)
    except Exception as error:  # raised below, on all ranks
        problem = error
    if problem is not None or content is not None:
        list_files(load, Listing(problem=str(problem or "")))
        agree(load, "a checkpoint" if content is None else "a single file", problem=problem)
    if content is not None:
        return single_file.load(load, strategy, path, content)
    with set_to(current_load, load):
        return wrapped(*call.args, **call.kwargs)


def _check_path(path: Path) -> None:
    """Raise FileNotFoundError for what cannot be a checkpoint: before 2.1 Lightning goes on, and DeepSpeed fails."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Pass the directory that a save wrote (it contains `latest` and"
            " `checkpoint/`), by a path that is the same on every node."
        )
    if _is_part(path):
        whole = path.parent if path.name == "checkpoint" else path.parent.parent
        raise FileNotFoundError(f"{path} is a part of a DeepSpeed checkpoint. Pass all of it: {whole}")
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file, and a DeepSpeed checkpoint is a directory. Trainer loads single files that Lightning"
            " has saved, Fabric does not: load the weights into the module before you pass it on, with"
            " ds_frozen_patch.load_trainable(module, path)."
        )


def _is_part(path: Path) -> bool:
    """Whether a path is of the folder of a checkpoint's tag, or of a file in it."""
    inner = path if path.name == "checkpoint" else path.parent
    return inner.name == "checkpoint" and (inner.parent / "latest").is_file()

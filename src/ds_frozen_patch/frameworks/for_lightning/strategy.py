"""Lightning's strategies, of Trainer and Fabric: what of them is wrapped, how they own an engine, and the wrappers.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from ...common.files import WEIGHTS_FILE, shown
from ...common.overrides import Attributes, overridden
from ...common.probing import Finding, Target, Wrapper, takes
from ...core.save import begin
from ...engine.served import Owner, ServedEngine, attached, warn
from ...load.agreement import agree, from_bucket, list_files
from ...load.listing import Listing
from ...load.running import Load
from ...load.trust import trust
from ...publish import in_flight
from ...publish.durable import wait_for_name
from ...publish.publication import is_local
from ...save.agreement import explaining_errors
from ...save.running import place_of
from ...settings import FLAG
from ...settings import current as settings
from .. import plain
from . import NAMES, STRATEGY, STRATEGY_OF_TRAINER, checkpoints, loops, single_file, uses
from .checkpoints import forget_paths_outside

BUILT = "_ds_frozen_patch_built"
"""An attribute of strategies that were built under `patch()`: their own flag counts."""


@uses(STRATEGY, "config", "model")
def owner_of(engine: Any, strategy: Any) -> Owner:
    """A `DeepSpeedStrategy`, of Trainer or Fabric, as the owner of its engine."""
    modules = {cls.__module__ for cls in type(strategy).__mro__}
    what = next(target for target in TARGETS if target.module in modules)
    config = getattr(strategy, "config", None)
    reference, last = ref(strategy), True

    def leaves_out() -> bool:
        living = reference()
        return last if living is None else not hasattr(living, BUILT) or bool(getattr(living, FLAG))

    last = leaves_out()
    return replace(
        plain.owner_of(engine, what),
        config=config if isinstance(config, Mapping) else {},
        leaves_out=leaves_out,
        # With Fabric, the program divides the loss and counts its batches.
        after_load=loops.resume if what in OF_TRAINER else lambda *_: None,
    )


def init(wrapped: Callable[..., None], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`DeepSpeedStrategy(exclude_frozen_parameters=None | True | False)`; None follows `patch()`."""
    call = signature_with_flag(wrapped).bind_partial(*args, **kwargs)
    choice = call.arguments.pop(FLAG, None)
    if choice is not None and not isinstance(choice, bool):
        raise TypeError(f"{FLAG} must be True, False or None (follow patch()), not {choice!r}")
    effective = choice is not False
    if FLAG in inspect.signature(wrapped).parameters:
        call.arguments[FLAG] = effective
    wrapped(*call.args, **call.kwargs)
    setattr(strategy, FLAG, effective)
    setattr(strategy, BUILT, True)


def signature_with_flag(init: Callable[..., None]) -> inspect.Signature:
    """What a constructor shows to `inspect`, and so to LightningCLI: the flag, whether upstream has it or not."""
    signature = inspect.signature(init)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != FLAG]
    # None, not upstream's False: LightningCLI passes every default, and a default is not a choice.
    flag = inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
    end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:end], flag, *parameters[end:]])


@uses("Trainer", "strategy")
@uses(STRATEGY_OF_TRAINER, "broadcast", "checkpoint_io", "lightning_module", "lightning_module_state_dict")
@uses(STRATEGY_OF_TRAINER, "deepspeed_engine")
def save_of_trainer(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.save_checkpoint`: with `weights_only=True` it writes a single file.

    With that, Lightning would let the engine save everything all the same. What the program has asked for counts, not
    what a hook has left of the checkpoint.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    strategy: Any = getattr(trainer, "strategy", None)
    path = call.arguments.get("filepath")
    if not call.arguments.get("weights_only") or not hasattr(strategy, "deepspeed_engine"):
        return wrapped(*args, **kwargs)  # or the strategy is another one
    engine: Any = getattr(strategy, "model", None)
    served = attached(engine, partial(owner_of, engine, strategy))
    if served is None or served.topology.is_divided:  # no rank has all weights, so the engine saves
        return wrapped(*args, **kwargs)
    path = strategy.broadcast(path)  # as Lightning does before the engine saves
    is_managed = single_file.writes_locally(strategy.checkpoint_io)
    if not is_local(path):
        if not is_managed:  # it may write to an address itself
            return wrapped(*args, **kwargs)
        from ...buckets import scratch_of

        path = scratch_of(path)
    file = single_file.place_of(Path(path))
    with explaining_errors(path) as saves:
        place = place_of(engine, served, file, Path(path), is_managed)
        save = begin(engine, served, place, "the weights alone", served.owner.excludes(None))
        saves.append(save)
    single = single_file.SingleFile(save, strategy.lightning_module)
    whole = partial(single.state, strategy.lightning_module_state_dict)
    try:
        with overridden([(served, "single_file", single), (strategy, "lightning_module_state_dict", whole)]):
            return wrapped(*args, **kwargs)
    except BaseException:
        save.discard()
        raise


@uses("Trainer", "checkpoint_callbacks", "loggers")
@uses(STRATEGY_OF_TRAINER, "lightning_module")
@uses("callbacks", "save_last?")
def save_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `save_checkpoint`: lets the engine save, or writes the single file that Trainer has begun."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    name = next((name for name in ("filepath", "path") if name in call.arguments), None)  # Trainer's and Fabric's
    engine: Any = getattr(strategy, "model", None)
    served = attached(engine, partial(owner_of, engine, strategy))
    if served is None:
        with overridden([(strategy, FLAG, False)] if hasattr(strategy, FLAG) else []):
            return wrapped(*args, **kwargs)
    if name is None:
        return wrapped(*args, **kwargs)  # the strategy has been changed: its engine saves to wherever it says
    if served.single_file is not None:
        served.single_file.write(strategy, call.arguments["checkpoint"], call.arguments.get("storage_options"))
        return None
    path, owner = call.arguments[name], served.owner
    is_first_on_disk = owner.rank == 0 or (owner.local_rank == 0 and engine.use_node_local_storage())
    with suppress(OSError):  # the engine's save says what is wrong, on every rank
        if is_local(path) and is_first_on_disk and Path(path).is_file():
            single_file.make_way(Path(path))
    with overridden([(strategy, FLAG, owner.excludes(None))] if hasattr(strategy, FLAG) else []):
        result = wrapped(*args, **kwargs)
    with suppress(OSError):  # the save has succeeded on every rank
        if is_local(path) and is_first_on_disk and Path(path, WEIGHTS_FILE).exists():
            in_flight.afterwards(partial(single_file.remove_from, Path(path)))
    if name == "filepath" and settings().async_save:
        trainer = strategy.lightning_module.trainer
        for logger in filter(_may_read, trainer.loggers):
            in_flight.wait_for(type(logger).__name__)
        if any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks):
            in_flight.wait()  # ModelCheckpoint is about to replace its link to the checkpoint before
    if Path(path).name.startswith("hpc_ckpt"):  # Lightning's handler of Slurm's signals lets the job end after it
        in_flight.wait()
    return result


@uses("loggers", "_log_model_checkpoints?")
def _may_read(logger: Any) -> bool:
    """Whether a logger, which ModelCheckpoint calls next, may read the checkpoint.

    Most of Lightning's own upload files alone, and the checkpoints of engines are folders; Neptune's uploads both.
    """
    is_own = logger.after_save_checkpoint.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    return not is_own or getattr(logger, "_log_model_checkpoints", False)


@uses(STRATEGY_OF_TRAINER, "is_global_zero")
def remove_checkpoint(
    wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A strategy's `remove_checkpoint`, of Trainer: only once the save in flight, which may replace it, is complete."""
    (path,) = inspect.signature(wrapped).bind(*args, **kwargs).arguments.values()
    if not is_local(path) and strategy.is_global_zero:
        from ...buckets import remove

        in_flight.afterwards(partial(remove, [Path(path, "latest")]))  # without which what is there is no checkpoint
    in_flight.afterwards(partial(wrapped, *args, **kwargs))


def teardown(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The end of a run: waits for the save in flight, and raises its error unless there is one already."""
    wrapped(*args, **kwargs)
    in_flight.wait_at_end()


@uses("Trainer", "checkpoint_callbacks", "state")
@uses(STRATEGY_OF_TRAINER, "lightning_module")
@uses("callbacks", "dirpath?")
def load_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `load_checkpoint`: finds the checkpoint, and loads single files that Trainer has saved."""
    in_flight.wait()
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    with trust(), overridden(_moved_in_deepspeed() if "path" in call.arguments else []):  # Fabric's
        checkpoint = _load(wrapped, strategy, call)
    engine: Any = getattr(strategy, "model", None)
    served = attached(engine, partial(owner_of, engine, strategy))
    if engine is None or not isinstance(checkpoint, dict) or not hasattr(strategy, "lightning_module"):
        return checkpoint  # Fabric's
    owner = served.owner if served is not None else owner_of(engine, strategy)
    if owner.unserved:
        return checkpoint
    trainer = strategy.lightning_module.trainer
    if settings().weights_only:
        folders = [str(path) for item in trainer.checkpoint_callbacks if (path := getattr(item, "dirpath", ""))]
        if ignored := forget_paths_outside(checkpoint, folders):
            warn(owner, ignored)
    if trainer.state.fn == "fit" and "loops" in checkpoint:
        loops.restore_loaders_in(trainer, owner, checkpoint["loops"])
    return checkpoint


@uses(STRATEGY, "load_full_weights", "zero_stage_3")
def _load(wrapped: Callable[..., Any], strategy: Any, call: inspect.BoundArguments) -> Any:
    state = call.arguments.get("state")  # Fabric's: what to restore, by name; or the module alone
    requested = tuple(map(_unwrapped, state.values())) if isinstance(state, Mapping) else ()
    own = getattr(strategy, "model", None)
    engine = next((item for item in requested if isinstance(item, type(own))), own)
    served = attached(engine, partial(owner_of, engine, strategy))
    if served is None:
        return wrapped(*call.args, **call.kwargs)
    name = next((name for name in ("checkpoint_path", "path") if name in call.arguments), None)
    if name is None or (strategy.load_full_weights and strategy.zero_stage_3):
        return wrapped(*call.args, **call.kwargs)
    load = Load(served.owner, requested, engine)
    load_from = partial(_load_from, wrapped, strategy, call, name, served, load)
    if is_local(path := call.arguments[name]):
        return load_from(Path(path))
    return from_bucket(load, str(path).removesuffix("/latest"), None, load_from)  # see `checkpoints.find_last`


def _load_from(
    wrapped: Callable[..., Any],
    strategy: Any,
    call: inspect.BoundArguments,
    name: str,
    served: ServedEngine,
    load: Load,
    path: Path,
) -> Any:
    content, problem = None, None
    path = single_file.file_in(path)
    try:
        if name == "checkpoint_path" and path.is_file() and not _is_part(path):
            options = {key: value for key, value in call.arguments.items() if key not in (name, "kwargs")}
            content = single_file.read(strategy, path, **options, **call.arguments.get("kwargs", {}))
        if content is None:
            call.arguments[name] = path
            wait_for_name(path / "checkpoint")
            if not (path / "latest").is_file():
                _check_path(path)
    except Exception as error:  # raised below, on all ranks
        problem = error
    if problem is not None or content is not None:
        list_files(load, Listing(problem=str(problem or "")))
        agree(load, "a checkpoint" if content is None else "a single file", problem=problem)
    if content is not None:
        return single_file.load(load, strategy, path, content)
    with overridden([(served, "load", load)]):
        return wrapped(*call.args, **call.kwargs)


def _check_path(path: Path) -> None:
    """Raise FileNotFoundError for what cannot be a checkpoint: before 2.1 Lightning continues, and DeepSpeed fails."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint at {shown(path)}. Pass the directory that a save wrote (it contains `latest` and"
            " `checkpoint/`), by a path that is the same on every node."
        )
    if _is_part(path):
        whole = path.parent if path.name == "checkpoint" else path.parent.parent
        raise FileNotFoundError(f"{shown(path)} is a part of a DeepSpeed checkpoint. Pass all of it: {shown(whole)}")
    if path.is_file():
        raise FileNotFoundError(
            f"{shown(path)} is a file, and a DeepSpeed checkpoint is a directory. Trainer loads single files that"
            " Lightning has saved, Fabric does not: load the weights into the module before you pass it on, with"
            " ds_frozen_patch.load_trainable(module, path)."
        )


def _is_part(path: Path) -> bool:
    """Whether a path is of the folder of a checkpoint's tag, or of a file in it."""
    inner = path if path.name == "checkpoint" else path.parent
    return inner.name == "checkpoint" and (inner.parent / "latest").is_file()


@uses("optimizers of Fabric", "optimizer?")
def _unwrapped(item: Any) -> Any:
    """The optimizer in Fabric's own wrapper, in which the strategy gets it; anything else as it is."""
    is_fabrics = any(cls.__name__ == "_FabricOptimizer" for cls in type(item).__mro__)
    return getattr(item, "optimizer", item) if is_fabrics else item


def _moved_in_deepspeed() -> Attributes:
    """The class that Fabric imports from `deepspeed.runtime`, where it no longer is."""
    runtime, moved = (sys.modules.get(f"deepspeed.runtime{inner}") for inner in ("", ".base_optimizer"))
    if moved is None or hasattr(runtime, "DeepSpeedOptimizer"):
        return []
    return [(runtime, "DeepSpeedOptimizer", moved.DeepSpeedOptimizer)]


def _judge(cls: Any | None, text: str) -> Finding:
    """A strategy has the flag or not; one with the patch series is complete as well."""
    if not takes(cls, text, "__init__", FLAG):
        return Finding("patchable", f"has no {FLAG}")
    if "_allow_excluded_parameters" in text:  # by which the patch series loads
        return Finding("has the flag", f"complete, by the patch series: pass {FLAG}=True", complete=True)
    return Finding("has the flag", f"has {FLAG}; tied aliases, strict load and ZeRO-3 test need patch()")


def _target(package: str, *distributions: str) -> Target:
    module = f"{package}.strategies.deepspeed"
    wrappers: dict[str, Wrapper] = {
        "__init__": init,
        "save_checkpoint": save_checkpoint,
        "load_checkpoint": load_checkpoint,
    }
    beside: dict[str, Wrapper] = {}
    kinds = {STRATEGY: f"{module}:DeepSpeedStrategy"}
    if "fabric" not in package:
        wrappers |= {"remove_checkpoint": remove_checkpoint, "teardown": teardown}
        beside = {
            f"{package}.trainer.trainer:Trainer.save_checkpoint": save_of_trainer,
            f"{package}.utilities.deepspeed:convert_zero_checkpoint_to_fp32_state_dict": checkpoints.convert,
            f"{package}.callbacks.model_checkpoint:ModelCheckpoint._find_last_checkpoints": checkpoints.find_last,
            f"{package}.callbacks.model_checkpoint:ModelCheckpoint.file_exists": in_flight.after_it,
            f"{package}.trainer.connectors.checkpoint_connector:_CheckpointConnector"
            "._CheckpointConnector__max_ckpt_version_in_folder": checkpoints.find_requeued,
        }
        kinds |= {
            STRATEGY_OF_TRAINER: kinds[STRATEGY],
            "Trainer": f"{package}.trainer.trainer:Trainer",
            "_FitLoop": f"{package}.loops.fit_loop:_FitLoop",
            "_TrainingEpochLoop": f"{package}.loops.training_epoch_loop:_TrainingEpochLoop",
        }
    remedy = (
        "install a tested release (see Compatibility in the documentation), or uninstall"
        f" {distributions[-1]} if nothing uses it"
    )
    return Target(
        package,
        module,
        "DeepSpeedStrategy",
        wrappers,
        _judge,
        distributions,
        remedy,
        beside=beside,
        names=NAMES,
        kinds=kinds,
    )


OF_TRAINER = _target("lightning.pytorch", "lightning"), _target("pytorch_lightning", "pytorch-lightning")
OF_FABRIC = (
    _target("lightning.fabric", "lightning"),
    _target("lightning_fabric", "lightning-fabric", "pytorch-lightning"),
)
TARGETS = (OF_TRAINER[0], OF_FABRIC[0], OF_TRAINER[1], OF_FABRIC[1])

"""Lightning's strategies, of Trainer and Fabric: what of them is wrapped, how they own an engine, and the wrappers.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from ...common.overrides import Attributes, overridden
from ...common.probing import Finding, Installed, Target
from ...core.save import begin
from ...engine.served import Owner, attach, attached, warn
from ...load.agreement import agree, list_files
from ...load.listing import Listing
from ...load.running import Load
from ...load.trust import runs_nothing, trust
from ...publish import in_flight
from ...publish.durable import wait_for_name
from ...publish.publication import is_local
from ...save.agreement import explaining_errors
from ...save.running import place_of
from ...settings import FLAG
from ...settings import current as settings
from . import loops, single_file
from .checkpoints import forget_paths_outside

LOADS_STRICTLY = "_allow_excluded_parameters"
"""What a strategy's `load_checkpoint` uses where our patch series for Lightning is applied."""

_TRAINER = ("__init__", "save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown")
_FABRIC = ("__init__", "save_checkpoint", "load_checkpoint")


def judge(version: str | None, strategy: Installed) -> Finding:
    """A strategy with the flag is native; one with the patch series is complete as well."""
    if not strategy.takes("__init__", FLAG):
        return Finding("patchable", version, f"has no {FLAG}")
    if LOADS_STRICTLY in strategy.text:
        reason = f"complete, by the patch series: pass DeepSpeedStrategy({FLAG}=True)"
        return Finding("native", version, reason, complete=True)
    return Finding("native", version, f"has {FLAG}; tied aliases, strict load and ZeRO-3 test need the shim")


def _strategy(name: str, methods: tuple[str, ...], *distributions: str) -> Target:
    remedy = (
        "install a tested release (see Compatibility in the documentation), or uninstall"
        f" {distributions[-1]} if nothing uses it"
    )
    module = f"{name}.strategies.deepspeed"
    return Target(name, module, "DeepSpeedStrategy", methods, distributions, judge, remedy, "lightning")


TARGETS = (
    _strategy("lightning.pytorch", _TRAINER, "lightning"),
    _strategy("lightning.fabric", _FABRIC, "lightning"),
    _strategy("pytorch_lightning", _TRAINER, "pytorch-lightning"),
    _strategy("lightning_fabric", _FABRIC, "lightning-fabric", "pytorch-lightning"),
)
BESIDE = tuple(
    Target(name, f"{name}.{module}", class_name, (attribute,))
    for name in ("lightning.pytorch", "pytorch_lightning")
    for module, class_name, attribute in (
        ("trainer.trainer", "Trainer", "save_checkpoint"),
        ("utilities.deepspeed", "", "convert_zero_checkpoint_to_fp32_state_dict"),
        ("callbacks.model_checkpoint", "ModelCheckpoint", "_find_last_checkpoints"),
        ("callbacks.model_checkpoint", "ModelCheckpoint", "file_exists"),
        (
            "trainer.connectors.checkpoint_connector",
            "_CheckpointConnector",
            "_CheckpointConnector__max_ckpt_version_in_folder",
        ),
    )
)
"""Functions that are wrapped beside their package's target, where they exist."""


BUILT = "_ds_frozen_patch_built"
"""An attribute of strategies that were built under `patch()`: their own flag counts."""


def owner_of(strategy: Any) -> Owner:
    """A `DeepSpeedStrategy`, of Trainer or Fabric, as the owner of its engine."""
    modules = {cls.__module__ for cls in type(strategy).__mro__}
    package = next((target.name for target in TARGETS if target.module in modules), "lightning")
    config = getattr(strategy, "config", None)
    reference, last = ref(strategy), True

    def leaves_out() -> bool:
        living = reference()
        return last if living is None else not hasattr(living, BUILT) or bool(getattr(living, FLAG))

    last = leaves_out()
    return Owner(
        rank=int(strategy.global_rank),
        local_rank=int(strategy.local_rank),
        device=strategy.root_device,
        logger=logging.getLogger(f"{package}.ds_frozen_patch"),
        config=config if isinstance(config, Mapping) else {},
        names_each_save=True,
        leaves_out=leaves_out,
        # With Fabric, the program divides the loss and counts its batches.
        after_load=loops.resume if hasattr(strategy, "lightning_module") else lambda *_: None,
    )


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


def signature_with_flag(init: Callable[..., None]) -> inspect.Signature:
    """What a constructor shows to `inspect`, and so to LightningCLI: the flag, whether upstream has it or not."""
    signature = inspect.signature(init)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != FLAG]
    # None, not upstream's False: LightningCLI passes on every default, and a default is not a choice.
    flag = inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
    end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:end], flag, *parameters[end:]])


def _checked(choice: Any) -> bool:
    if choice is not None and not isinstance(choice, bool):
        raise TypeError(f"{FLAG} must be True, False or None (follow patch()), not {choice!r}")
    return choice is not False


def save_of_trainer(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Trainer.save_checkpoint`: with `weights_only=True` it writes a single file.

    With that, Lightning would let the engine save everything all the same. What the program has asked for counts, not
    what a hook has left of the checkpoint.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    strategy, path = trainer.strategy, call.arguments["filepath"]
    asked = call.arguments.get("weights_only") and is_local(path)
    engine = getattr(strategy, "deepspeed_engine", None) if asked else None  # which only DeepSpeedStrategy has
    served = attached(engine) or attach(engine, owner_of(strategy)) if engine is not None else None
    if served is None or served.topology.is_divided:  # no rank has all weights, so the engine saves
        return wrapped(*args, **kwargs)
    path = strategy.broadcast(path)  # as Lightning does before the engine saves
    file, is_managed = single_file.place_of(Path(path)), single_file.writes_locally(strategy.checkpoint_io)
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


def save_checkpoint(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's `save_checkpoint`: lets the engine save, or writes the single file that Trainer has begun."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    name = next((name for name in ("filepath", "path") if name in call.arguments), None)  # Trainer's and Fabric's
    engine = strategy.model
    if engine is None:
        return wrapped(*args, **kwargs)
    served = attached(engine) or attach(engine, owner_of(strategy))
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
    if is_local(path) and is_first_on_disk:
        with suppress(OSError):  # the engine's save says what is wrong, on every rank
            single_file.make_way(Path(path))
    with overridden([(strategy, FLAG, owner.excludes(None))] if hasattr(strategy, FLAG) else []):
        result = wrapped(*args, **kwargs)
    if is_local(path) and is_first_on_disk:
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
    with trust(), overridden(_moved_in_deepspeed()):
        checkpoint = _load(wrapped, strategy, inspect.signature(wrapped).bind(*args, **kwargs))
    if not isinstance(checkpoint, dict) or not hasattr(strategy, "lightning_module"):
        return checkpoint  # Fabric's
    trainer, served = strategy.lightning_module.trainer, attached(strategy.model)
    owner = served.owner if served is not None else owner_of(strategy)
    if runs_nothing():
        folders = [str(path) for item in trainer.checkpoint_callbacks if (path := getattr(item, "dirpath", ""))]
        if ignored := forget_paths_outside(checkpoint, folders):
            warn(owner, ignored)
    if trainer.state.fn == "fit" and "loops" in checkpoint:
        loops.restore_loaders_in(trainer, owner, checkpoint["loops"])
    return checkpoint


def _load(wrapped: Callable[..., Any], strategy: Any, call: inspect.BoundArguments) -> Any:
    state = call.arguments.get("state")  # Fabric's: what to restore, by name; or the module alone
    requested = tuple(map(_unwrapped, state.values())) if isinstance(state, Mapping) else ()
    engine = next((item for item in requested if isinstance(item, type(strategy.model))), strategy.model)
    if engine is None or (served := attached(engine) or attach(engine, owner_of(strategy))) is None:
        return wrapped(*call.args, **call.kwargs)
    name = next((name for name in ("checkpoint_path", "path") if name in call.arguments), None)
    if name is None or (strategy.load_full_weights and strategy.zero_stage_3) or not is_local(call.arguments[name]):
        return wrapped(*call.args, **call.kwargs)
    load = Load(served.owner, requested, engine)
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
    with overridden([(served, "load", load)]):
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


def _unwrapped(item: Any) -> Any:
    """The optimizer in Fabric's own wrapper, in which the strategy gets it; anything else as it is."""
    return item.optimizer if any(cls.__name__ == "_FabricOptimizer" for cls in type(item).__mro__) else item


def _moved_in_deepspeed() -> Attributes:
    """The class that Fabric imports from `deepspeed.runtime`, where it no longer is."""
    runtime, moved = (sys.modules.get(f"deepspeed.runtime{inner}") for inner in ("", ".base_optimizer"))
    if moved is None or hasattr(runtime, "DeepSpeedOptimizer"):
        return []
    return [(runtime, "DeepSpeedOptimizer", moved.DeepSpeedOptimizer)]

"""What happens around a save: the wrappers of the constructor and of the ways to disk.

Each wrapper has wrapt's four arguments: what it wraps (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from packaging.version import Version

from . import _handshake, _labels, _ownership, _save, manifest
from ._durable import sync_file, sync_folder
from ._errors import CheckpointError, named
from ._lending import set_to
from ._save import Save, explained
from ._settings import Settings
from ._settings import current as _settings
from ._targets import FLAG, TARGETS
from ._text import human_bytes
from .fingerprint import process_memory

WEIGHTS_ALONE = (
    "What works with it is to save the weights alone: ModelCheckpoint(save_weights_only=True) or"
    " trainer.save_checkpoint(path, weights_only=True)."
)

_full: ContextVar[bool] = ContextVar("ds_frozen_patch_full", default=False)
_built_patched: WeakSet[Any] = WeakSet()
_told: WeakSet[Any] = WeakSet()
_warned_of_disks: WeakSet[Any] = WeakSet()
_trained_at_first: WeakKeyDictionary[Any, frozenset[Any]] = WeakKeyDictionary()


@contextmanager
def full_checkpoint() -> Iterator[None]:
    """Save full checkpoints while this lasts, frozen parameters included.

    Enter it on every rank, around `trainer.save_checkpoint(...)` or `fabric.save(...)`.
    """
    with set_to(_full, True):
        yield


def strategy_init(wrapped: Callable[..., None], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
    strategy.exclude_frozen_parameters = effective
    _built_patched.add(strategy)


def _checked(choice: Any) -> bool:
    if choice is not None and not isinstance(choice, bool):
        raise TypeError(f"{FLAG} must be True, False or None (follow patch()), not {choice!r}")
    return choice is not False


def strategy_setup(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trainer's `setup`, Fabric's `setup_module` and `setup_module_and_optimizers`: an engine is made."""
    _handshake.announce(strategy)
    result = wrapped(*args, **kwargs)
    _handshake.check(strategy)
    engine = strategy.model
    if engine is not None:
        _ownership.own(engine, strategy)
        _trained_at_first[engine] = frozenset(p for p in engine.module.parameters() if p.requires_grad)
        _check_keep(strategy, engine.module)
    return result


def _check_keep(strategy: Any, module: Any) -> None:
    frozen = manifest.frozen_names(module).values()
    idle = [pattern for pattern in _settings().keep if not any(Settings(keep=(pattern,)).keeps(n) for n in frozen)]
    if idle:
        warn(strategy, f"patch(keep=[...]) names what is no frozen parameter: {named(idle)}. Nothing is kept for it.")


def strategy_call(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's own `save_checkpoint`: the engine that it calls knows whom it works for.

    With `weights_only=True` Lightning would have the engine save all that it always does.
    """
    from . import _single_file

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    path = next((name for name in ("filepath", "path") if name in call.arguments), None)  # Trainer's and Fabric's
    given = call.arguments[path] if path else None
    with _ownership.at_work(strategy):
        if path is None or strategy.model is None or not is_local(given):
            return wrapped(*args, **kwargs)  # of a strategy that somebody has changed, or a path that is not ours
        with explained(given) as saves:
            alone = _single_file.is_weights_only(call.arguments.get("checkpoint", {}))  # Fabric has no such argument
            what = "the weights alone" if alone else "a checkpoint"
            save = _agree(strategy, strategy.model, given, what, excludes(strategy))
            saves.append(save)
            if alone:
                options = call.arguments.get("storage_options")
                return _single_file.save(save, call.arguments["checkpoint"], options)
            call.arguments[path] = _begin(save)
            try:
                with set_to(_save.current, save):
                    result = wrapped(*call.args, **call.kwargs)
            except BaseException:
                save.abandon()
                raise
            save.meet() if save.is_in_place else save.publish()
            return result


def is_local(path: Any) -> bool:
    """Whether a path is one of a mounted file system, and not an address such as s3://bucket/name."""
    return "://" not in str(path)


def _agree(strategy: Any, engine: Any, path: Any, what: str, exclude: bool) -> Save:
    """Let the ranks agree on what is saved; raises CheckpointMismatchError on every rank if they do not."""
    told = _settings()
    request = {
        "what is saved": what,
        FLAG: exclude,
        **{name: getattr(told, name) for name in ("keep", "export", "fp32_weights", "sync")},
    }
    return _save.agree(strategy, engine, path, request, _to_leave_out(engine) if exclude else None)


def _begin(save: Save) -> Path:
    """Where the engine is to write."""
    if not writes_at_once(save.engine):
        save.is_in_place = True
        return save.target
    save.begin()
    if save.strategy.is_global_zero and (other := save.other_job()):
        warn(save.strategy, other)
    assert save.disks is not None
    if save.disks.are_several and not save.engine.use_node_local_storage() and save.strategy not in _warned_of_disks:
        _warned_of_disks.add(save.strategy)
        warn(
            save.strategy,
            f"The nodes write {save.target} to disks of their own, and DeepSpeed is told that they share one: it will"
            ' not find all files when it resumes. Set "checkpoint": {"use_node_local_storage": true} in its'
            " configuration, or save to a disk that all nodes share.",
        )
    return save.new


def engine_save(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.save_checkpoint`: sets the flag and adds the manifest."""
    strategy = _ownership.owner(engine)
    if strategy is None:
        return wrapped(*args, **kwargs)
    _check_nvme(engine)
    _check_elastic(engine)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.arguments[FLAG] = exclude = excludes(strategy, call.arguments.get(FLAG))
    save = _save.current.get()
    if save is not None and save.engine is not engine:  # Fabric has several
        save.engine, save.left_out, save.base_is_known = engine, _to_leave_out(engine) if exclude else None, False
    if save is not None:
        return _engine_save(wrapped, engine, call, exclude, save)
    with explained(call.arguments["save_dir"]) as saves:
        save = _agree(strategy, engine, call.arguments["save_dir"], "engine.save_checkpoint()", exclude)
        save.is_in_place = True
        saves.append(save)
        with set_to(_save.current, save):
            return _engine_save(wrapped, engine, call, exclude, save)


def _engine_save(
    wrapped: Callable[..., Any], engine: Any, call: inspect.BoundArguments, exclude: bool, save: Save
) -> Any:
    from . import _elastic
    from .checkpoint import universal

    strategy, folder = save.strategy, Path(call.arguments["save_dir"])
    ours: dict[str, Any] = {}
    if forgets_optimizer(engine):
        ours["optimizer"] = engine.optimizer.state_dict()
    if exclude:
        left_out = leave_out(save)
        save.names_left_out = left_out.names
        ours |= {manifest.KEY: _to_state(save, left_out)} | _kept_fragments(engine)
        _tell_once(strategy, left_out)
    ours |= _elastic.to_save(engine)
    if engine.zero_optimization_stage() in (1, 2):
        ours["universal_checkpoint_info"] = universal.INFO
    call.arguments["client_state"] = {**(call.arguments.get("client_state") or {}), **ours}
    if _settings().export:
        from . import _ready

        _ready.write(save, folder)
    try:
        return _write(wrapped, engine, call, save, folder)
    except (NotImplementedError, AssertionError) as error:
        if "NVMe" not in str(error):
            raise
        raise CheckpointError(f"{error}. {WEIGHTS_ALONE}") from error


def _write(wrapped: Callable[..., Any], engine: Any, call: inspect.BoundArguments, save: Save, folder: Path) -> Any:
    """Let DeepSpeed write all of its files, and then `latest`."""
    if not writes_at_once(engine):
        return wrapped(*call.args, **call.kwargs)
    call.apply_defaults()
    latest, tag = call.arguments["save_latest"], call.arguments["tag"]
    call.arguments["save_latest"] = False  # it is not one of the writes that can be put off
    with _labels.labels(engine, save.id), save.writes_put_off():
        saved = wrapped(*call.args, **call.kwargs)
    writes = save.publishes
    if save.is_in_place:
        rank = save.strategy.local_rank if engine.use_node_local_storage() else save.strategy.global_rank
        failed = save.anyone_failed(rank == 0)
        writes = rank == 0 and not failed
    if writes:
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        with save.put_off(folder / "latest"):
            if latest:
                (folder / "latest").write_text(tag)
            if save.sync and save.is_in_place:
                sync_folder(folder / tag)
                if latest:
                    sync_file(folder / "latest")
                sync_folder(folder)
    if save.is_in_place:
        save.meet()
    return saved


def _to_state(save: Save, left_out: manifest.Manifest) -> dict[str, Any]:
    """The manifest, or in ZeRO-3 a reference to the file of the rank that writes it on this disk."""
    rank, engine = save.strategy.global_rank, save.engine
    own = Path(engine._get_ckpt_name("", "")).name
    part = f"zero_pp_rank_{rank}_"
    is_known = save.disks is not None or not engine.use_node_local_storage()
    if save.publisher != rank and is_known and engine.zero_optimization_partition_weights() and part in own:
        return left_out.to_reference(own.replace(part, f"zero_pp_rank_{save.publisher}_"))
    return left_out.to_state()


def writes_at_once(engine: Any) -> bool:
    """Whether DeepSpeed has written all when it says so, which its engines of other kinds do not promise."""
    return type(getattr(engine, "checkpoint_engine", None)).__name__ == "TorchCheckpointEngine"


def _check_elastic(engine: Any) -> None:
    """Raise CheckpointError where the checkpoint would lack what DeepSpeed asks for in a resume from ZeRO 1 or 2."""
    if not engine.zero_elastic_checkpoint() or engine.zero_optimization_stage() not in (1, 2):
        return
    optimizer = getattr(engine.optimizer, "optimizer", None)
    if engine.global_steps and any("step" not in group for group in getattr(optimizer, "param_groups", [])):
        raise CheckpointError(
            f"DeepSpeed cannot resume {type(optimizer).__name__} with zero_optimization.elastic_checkpoint, only"
            " optimizers that count the steps of each group, as its FusedAdam does. Set elastic_checkpoint to false."
        )


def _check_nvme(engine: Any) -> None:
    """Raise CheckpointError, on every rank, where else one would raise it and the others wait for it."""
    if not keeps_optimizer_on_nvme(engine) or engine.dp_world_size == 1:
        return
    import deepspeed

    if Version(deepspeed.__version__) < Version("0.18.0"):
        raise CheckpointError(
            f"DeepSpeed {deepspeed.__version__} cannot save an optimizer on NVMe with more than one rank: all write"
            f" into one folder. Install deepspeed>=0.18.0. {WEIGHTS_ALONE}"
        )


def keeps_optimizer_on_nvme(engine: Any) -> bool:
    """Whether the engine has an optimizer whose state is on NVMe, in ZeRO-3."""
    asks = getattr(engine, "zero_nvme_offload_optimizer", None)  # since DeepSpeed 0.13
    return asks is not None and bool(asks()) and hasattr(engine.optimizer, "optimizer_swapper")


def _to_leave_out(engine: Any) -> dict[Any, tuple[str, ...]]:
    """The frozen parameters that a save leaves out now, each with all its names."""
    optimized = _optimized(engine)
    return {
        parameter: names
        for parameter, names in manifest.frozen_names(engine.module).items()
        if parameter not in optimized and not _settings().keeps(names)
    }


def leave_out(save: Save) -> manifest.Manifest:
    """The manifest of what is left out now, with a warning where it has changed since it was last read."""
    engine, left_out = save.engine, save.left_out or {}
    memory = process_memory()
    before = [memory.recall(parameter) for parameter in left_out]
    made = manifest.describe(
        left_out,
        module=engine.module,
        device=engine.device,
        zero_stage=int(engine.zero_optimization_stage()),
        world_size=int(engine.dp_world_size),
        all_known=save.base_is_known,
    )
    changed = [
        parameter.name
        for parameter, fingerprint in zip(made.left_out, before, strict=True)
        if fingerprint is not None and parameter.fingerprint != fingerprint
    ]
    if changed:
        warn(
            save.strategy,
            f"The run has changed frozen parameters in place: {named(changed)}. What they hold now is in no checkpoint,"
            " and this one can be loaded only onto a base with the same changes. To save them, name them in"
            " patch(keep=[...]).",
        )
    return made


def _optimized(engine: Any) -> set[Any]:
    """The parameters that the optimizer trains, or did: one that was frozen after training began is not base.

    In ZeRO stage 0 an optimizer made of all of a module's parameters holds those too that were frozen from the start.
    """
    groups = next(
        (
            getattr(engine.optimizer, name)
            for name in ("bit16_groups", "fp16_groups", "bf16_groups")
            if hasattr(engine.optimizer, name)
        ),
        [group["params"] for group in getattr(engine.optimizer, "param_groups", [])],
    )
    trained = _trained_at_first.get(engine)
    return {parameter for group in groups for parameter in group if trained is None or parameter in trained}


def _kept_fragments(engine: Any) -> dict[str, Any]:
    """The values of frozen parameters that are kept, where DeepSpeed saves frozen values apart from the module's.

    It does so from stage 2 on, for all of them or, with its flag, for none; in ZeRO-3 they are nowhere else.
    """
    if not _settings().keep or not engine.zero_optimization_partition_gradients():
        return {}
    prefix = manifest.prefix_of(name for name, _ in engine.module.named_parameters())
    kept = {
        prefix + names[0]: parameter
        for parameter, names in manifest.frozen_names(engine.module).items()
        if _settings().keeps(names)
    }
    if not kept:
        return {}
    shape, fragment = engine._get_param_shape_func, engine._get_param_fragment_func
    return {
        "frozen_param_shapes": {name: shape(parameter) for name, parameter in kept.items()},
        "frozen_param_fragments": {name: fragment(parameter) for name, parameter in kept.items()},
    }


def has_plain_optimizer(engine: Any) -> bool:
    """Whether the engine has an optimizer, and not one of ZeRO's with partitions of its own on disk.

    Not even stage 1 has always one of ZeRO's: see `forgets_optimizer`.
    """
    load = getattr(engine.optimizer, "load_state_dict", None)  # DeepSpeedZeRoOffload has none
    return load is not None and "state_dict_list" not in inspect.signature(load).parameters


def forgets_optimizer(engine: Any) -> bool:
    """Whether this is bf16 with a plain optimizer: ZeRO stage 0, or 1 with gradients accumulated in fp32.

    DeepSpeed 0.17 takes that for a ZeRO optimizer: it saves none of its state, in any checkpoint, and fails in
    a load ("no attribute 'dp_process_group'"). Later releases save it as "optimizer", and so do we.
    """
    return has_plain_optimizer(engine) and bool(engine.bfloat16_enabled())


def excludes(strategy: Any, asked: bool | None = None) -> bool:
    """Whether a save leaves frozen parameters out, if the engine was `asked` so."""
    if _full.get():
        return False
    if asked is not None and not _ownership.in_strategy():
        return asked  # a direct call of the engine: what it says is what it means
    return strategy not in _built_patched or strategy.exclude_frozen_parameters


def engine_module_state_dict(
    wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`DeepSpeedEngine.module_state_dict`: leaves out each frozen parameter under all its names.

    DeepSpeed's own exclusion walks `named_parameters()`, which gives a tied parameter once, and
    before 0.12.3 it raises KeyError for a module whose `state_dict` gives a subset.
    """
    save = _save.current.get()
    left_out = save.names_left_out if save is not None and save.engine is engine else None
    if left_out is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.arguments[FLAG] = False
    state = wrapped(*call.args, **call.kwargs)
    for name in [name for name in state if manifest.plain(name) in left_out]:
        del state[name]
    return state


def _tell_once(strategy: Any, left_out: manifest.Manifest) -> None:
    if strategy in _told or not strategy.is_global_zero:
        return
    _told.add(strategy)
    count = len(left_out.left_out)
    if not count:
        logger_of(strategy).info("Nothing is frozen, so checkpoints leave nothing out.")
        return
    logger_of(strategy).info(
        "Checkpoints leave out %d frozen parameters and so save %s each%s. They must be there again when one is"
        " loaded: build the model as you did for this run.",
        count,
        human_bytes(left_out.total_bytes),
        f" ({', '.join(p.name for p in left_out.left_out[:2])}{', ...' if count > 2 else ''})",
    )


def warn(strategy: Any, message: str) -> None:
    """Log a warning, on rank 0 only."""
    if strategy.is_global_zero:
        logger_of(strategy).warning(message)


def logger_of(strategy: Any) -> logging.Logger:
    """A child of the logger of the strategy's Lightning, so that Lightning's own settings rule ours."""
    modules = {cls.__module__ for cls in type(strategy).__mro__}
    package = next((t.name for t in TARGETS if t.module in modules), "lightning")
    return logging.getLogger(f"{package}.ds_frozen_patch")

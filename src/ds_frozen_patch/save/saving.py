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
from weakref import WeakSet

from packaging.version import Version

from .. import manifest
from ..checkpoint.zero import labels as _labels
from ..common.durable import sync_file, sync_folder
from ..common.errors import CheckpointError, named
from ..common.overrides import set_to
from ..common.text import human_bytes
from ..engine import attached as _ownership
from ..engine import frozen as _frozen
from ..engine import handshake as _handshake
from ..parameters import frozen_names, names_by_parameter, plain
from ..patching.probe import FLAG, TARGETS
from ..settings import current as _settings
from ..settings import matches
from . import save as _save
from .save import Save, explained

WEIGHTS_ALONE = (
    "What works with it is to save the weights alone: ModelCheckpoint(save_weights_only=True) or"
    " trainer.save_checkpoint(path, weights_only=True)."
)

_full: ContextVar[bool] = ContextVar("ds_frozen_patch_full", default=False)
_built_patched: WeakSet[Any] = WeakSet()
_told: WeakSet[Any] = WeakSet()
_warned_of_disks: WeakSet[Any] = WeakSet()


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
        named_ = names_by_parameter(engine.module)
        trained = frozenset(names[0] for parameter, names in named_.items() if parameter.requires_grad)
        _frozen.watch(_ownership.attach(engine, strategy, trained), engine)
        _check_patterns(strategy, engine.module)
    return result


def _check_patterns(strategy: Any, module: Any) -> None:
    """Warn of patterns that say nothing of this module, for they may be misspelt."""
    told = _settings()
    if not told.keep and not told.leave_out:
        return
    names = [one.names for one in _frozen.frozen(module)]
    for option, patterns in (("keep", told.keep), ("leave_out", told.leave_out)):
        if idle := [pattern for pattern in patterns if not any(matches(own, [pattern]) for own in names)]:
            warn(strategy, f"patch({option}=[...]) matches nothing that is frozen: {named(idle)}. It has no effect.")


def strategy_call(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's own `save_checkpoint`: the engine that it calls knows whom it works for.

    With `weights_only=True` Lightning would have the engine save all that it always does.
    """
    from . import single_file as _single_file

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
        **{name: getattr(told, name) for name in ("keep", "leave_out", "export", "fp32_weights", "sync")},
    }
    attached = _ownership.attached(engine)
    candidates = _frozen.to_leave_out(attached, engine) if exclude else None
    changed = _frozen.changed_since_start(attached, candidates or ())
    save = _save.agree(strategy, engine, path, request, candidates, bool(changed))
    if candidates and attached is not None and save.base_has_changed:
        _keep_changed(save, _frozen.on_all_ranks(changed, candidates, engine.device))
    return save


def _keep_changed(save: Save, changed: set[str]) -> None:
    """Save from now on what is in no base, and say so."""
    attached = _ownership.attached(save.engine)
    assert attached is not None
    assert save.left_out is not None
    overruled = {one.group for one in save.left_out if _settings().leaves_out(one.names)}
    if changed := changed - overruled:
        attached.changed |= changed
        save.left_out = [one for one in save.left_out if one.group not in changed]
        warn(
            save.strategy,
            "Frozen parameters are not as the program built them, but changed by training or read from a checkpoint:"
            f" {named(sorted(changed))}. No base holds these values, so checkpoints do from now on. To leave them out"
            " all the same, name them in patch(leave_out=[...]).",
        )


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
        left_out = _frozen.to_leave_out(_ownership.attached(engine), engine) if exclude else None
        save.engine, save.left_out, save.base_is_known = engine, left_out, False
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
    from ..checkpoint.tools import universal
    from ..load import elastic as _elastic

    folder = Path(call.arguments["save_dir"])
    ours: dict[str, Any] = {}
    if forgets_optimizer(engine):
        ours["optimizer"] = engine.optimizer.state_dict()
    if exclude:
        left_out = leave_out(save)
        save.names_left_out = left_out.names
        ours |= {manifest.KEY: _to_state(save, left_out)} | _kept_fragments(save)
    ours |= _elastic.to_save(engine)
    if engine.zero_optimization_stage() in (1, 2):
        ours["universal_checkpoint_info"] = universal.INFO
    call.arguments["client_state"] = {**(call.arguments.get("client_state") or {}), **ours}
    if _settings().export:
        from . import export_trained as _ready

        _ready.write(save, folder)
    try:
        saved = _write(wrapped, engine, call, save, folder)
    except (NotImplementedError, AssertionError) as error:
        if "NVMe" not in str(error):
            raise
        raise CheckpointError(f"{error}. {WEIGHTS_ALONE}") from error
    if exclude:
        _tell_once(save, left_out)
    return saved


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


def leave_out(save: Save) -> manifest.Manifest:
    """The manifest of what is left out now."""
    engine, attached = save.engine, _ownership.attached(save.engine)

    def describe() -> manifest.Manifest:
        return manifest.describe(
            save.left_out or (),
            module=engine.module,
            device=engine.device,
            zero_stage=int(engine.zero_optimization_stage()),
            world_size=int(engine.dp_world_size),
            all_known=save.base_is_known,
        )

    made = describe()
    if attached is None:
        return made
    # Fingerprints see what a sample does not, from the second save on.
    before, groups = attached.prints, {one.name: one.group for one in save.left_out or ()}
    now = {one.name: one.fingerprint for one in made.left_out}
    if changed := {groups[name] for name, print_ in now.items() if print_ and before.get(name, print_) != print_}:
        _keep_changed(save, changed)
        save.base_is_known = True
        made = describe()
    attached.prints = {**before, **{one.name: one.fingerprint for one in made.left_out if one.fingerprint}}
    if unread := [one.name for one in made.left_out if one.fingerprint is None and one.name not in before]:
        attached.prints = {**attached.prints, **dict.fromkeys(unread)}
        warn(
            save.strategy,
            f"The content of {len(unread)} left-out parameters cannot be read ({named(unread)}), so a load cannot"
            " verify that its base has the same.",
        )
    return made


def _kept_fragments(save: Save) -> dict[str, Any]:
    """The values of frozen parameters that are saved, where DeepSpeed saves frozen values apart from the module's.

    It does so from stage 2 on, for all of them or, with its flag, for none; in ZeRO-3 they are nowhere else.
    """
    engine = save.engine
    if not engine.zero_optimization_partition_gradients():
        return {}
    changed = getattr(_ownership.attached(engine), "changed", ())
    actual = {plain(name): name for name, _ in engine.module.named_parameters()}
    kept = {
        actual[names[0]]: parameter
        for parameter, names in frozen_names(engine.module).items()
        if names[0] in changed or _settings().keeps(names)
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
    """`DeepSpeedEngine.module_state_dict`: leaves out the base, each of its parameters under all names.

    DeepSpeed's own exclusion walks `named_parameters()`, which gives a tied parameter once, and
    before 0.12.3 it raises KeyError for a module whose `state_dict` gives a subset.
    """
    save = _save.current.get()
    left_out = save.names_left_out if save is not None and save.engine is engine else None
    if save is None or left_out is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.arguments[FLAG] = False
    state = wrapped(*call.args, **call.kwargs)
    for name in [name for name in state if plain(name) in left_out]:
        save.removed.add(plain(name))
        del state[name]
    return state


def _tell_once(save: Save, left_out: manifest.Manifest) -> None:
    """Log what a save has left out, by what was really taken out of its files."""
    strategy = save.strategy
    if strategy in _told or not strategy.is_global_zero:
        return
    _told.add(strategy)
    count = len(left_out.parameters)
    if not count:
        logger_of(strategy).info("Nothing is frozen, so checkpoints leave nothing out.")
        return
    removed = sum(one.nbytes for one in save.left_out or () if save.removed.intersection(one.names))
    logger_of(strategy).info(
        "Checkpoints leave out %d frozen parameters and so save %s each%s. They must be there again when one is"
        " loaded: build the model as you did for this run.",
        count,
        human_bytes(removed),
        f" ({', '.join(p.name for p in left_out.parameters[:2])}{', ...' if count > 2 else ''})",
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

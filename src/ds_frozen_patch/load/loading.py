"""What happens around a load: a left-out parameter may be missing, and nothing else.

Each wrapper has wrapt's four arguments: what it wraps (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.zero.labels import LABEL
from ..common.durable import wait_for_name
from ..common.errors import CheckpointMismatchError, named
from ..common.overrides import lent, set_to
from ..engine import attached as _ownership
from ..engine import frozen as _frozen
from ..fingerprint import fingerprints, process_memory
from ..manifest import KEY, LeftOut, Manifest
from ..parameters import PARAMETER, PART, Held, frozen_names, names_by_parameter, parameters_by_name, plain, prefix_of
from ..save.save import is_left_behind, left_behind, moved_away
from ..save.saving import forgets_optimizer, has_plain_optimizer, is_local, keeps_optimizer_on_nvme, warn
from ..settings import current
from . import load as _load
from .load import Load, Look
from .quantized import by_name, check_parts, is_part, without_what_is_there
from .trust import trust

_FLOATING = ("float64", "float32", "float16", "bfloat16")


def strategy_load(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A strategy's own `load_checkpoint`; where there is no checkpoint, says so, and why."""
    with trust():
        return _strategy_load(wrapped, strategy, args, kwargs)


def _strategy_load(wrapped: Callable[..., Any], strategy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    state = call.arguments.get("state")  # Fabric's: what is to be restored, by name; the module alone stands for itself
    name = next((name for name in ("checkpoint_path", "path") if name in call.arguments), None)
    if name is None or (strategy.load_full_weights and strategy.zero_stage_3) or not is_local(call.arguments[name]):
        with _ownership.at_work(strategy), lent(_moved_in_deepspeed()):
            return wrapped(*args, **kwargs)
    load = Load(strategy, tuple(map(_unwrapped, state.values())) if isinstance(state, Mapping) else ())
    path, content, problem = Path(call.arguments[name]), None, None
    try:
        if name == "checkpoint_path" and path.is_file():
            options = {key: value for key, value in call.arguments.items() if key not in (name, "kwargs")}
            content = _read_single_file(strategy, path, {**options, **call.arguments.get("kwargs", {})})
        if content is None:
            call.arguments[name] = _found(strategy, path)
    except Exception as error:  # the other ranks wait for this one
        problem = error
    if problem is not None or content is not None:
        load.tell(Look(problem=str(problem or "")))
        load.meet("a checkpoint" if content is None else "a single file", problem)
    if content is not None:
        from ..save import single_file as _single_file

        return _single_file.load(load, path, content)
    with _ownership.at_work(strategy), set_to(_load.current, load), lent(_moved_in_deepspeed()):
        return wrapped(*call.args, **call.kwargs)


def _read_single_file(strategy: Any, file: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What Trainer has saved with `weights_only=True`; None if the file is none of these."""
    from ..save import single_file as _single_file

    return None if file.parent.name == "checkpoint" else _single_file.read(strategy, file, **options)


def _unwrapped(item: Any) -> Any:
    """What Fabric of Lightning 2.0 hands to the strategy still in its wrapper: an optimizer."""
    return item.optimizer if any(cls.__name__ == "_FabricOptimizer" for cls in type(item).__mro__) else item


def _moved_in_deepspeed() -> list[tuple[Any, str, Any]]:
    """What Fabric of Lightning 2.1 to 2.3 imports from `deepspeed.runtime`, where it was before DeepSpeed 0.14.1."""
    runtime, moved = (sys.modules.get(f"deepspeed.runtime{inner}") for inner in ("", ".base_optimizer"))
    if moved is None or hasattr(runtime, "DeepSpeedOptimizer"):
        return []
    return [(runtime, "DeepSpeedOptimizer", moved.DeepSpeedOptimizer)]


def _found(strategy: Any, path: Path) -> Path:
    """The path, or where a save that was killed while it renamed has left the checkpoint of that name."""
    wait_for_name(path)
    if not path.exists() and (copies := left_behind(path)):
        path = copies[0]
    _check_path(path)
    if is_left_behind(path):
        warn(
            strategy,
            f"A save was killed while it renamed. The checkpoint {path.name} from before it is {path}, and is loaded"
            " from there.",
        )
    return path


def find_last(wrapped: Callable[..., set[str]], callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._find_last_checkpoints`, for `ckpt_path="last"`: also where a killed save has left the only one.

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


def _check_path(path: Path) -> None:
    """Raise FileNotFoundError for what cannot be a checkpoint: before 2.1 Lightning goes on, and DeepSpeed fails."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint at {path}. Pass the directory that a save wrote (it holds `latest` and"
            " `checkpoint/`), with the same path on every node."
        )
    inner = path if path.name == "checkpoint" else path.parent
    if inner.name == "checkpoint" and (inner.parent / "latest").is_file():
        raise FileNotFoundError(f"{path} is a part of a DeepSpeed checkpoint. Pass all of it: {inner.parent}")
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file, and a DeepSpeed checkpoint is a directory. Trainer takes single files that Lightning"
            " has saved, Fabric none: put the weights into the module before you hand it over, with"
            " ds_frozen_patch.load_trainable(module, path)."
        )


def engine_load(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.load_checkpoint`: ZeRO-3 without an optimizer works, and the manifest stays ours."""
    strategy = _ownership.owner(engine)
    if strategy is None:
        return wrapped(*args, **kwargs)
    from . import elastic as _elastic

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    load = _load.current.get() or Load(strategy)
    load.engine = engine
    if engine.optimizer is not None and any(item is engine.optimizer for item in load.asked_for):
        # Fabric of Lightning 2.0 does not know DeepSpeed's optimizers for what they are, and restores none.
        call.arguments["load_optimizer_states"] = True
    restores_optimizer = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
    load.restores_optimizer = restores_optimizer
    load.source, load.tag = str(call.arguments["load_dir"]), call.arguments["tag"]
    with set_to(_load.current, load), lent([*_missing_in(engine), *_remembers_module(load)]):
        look = load.look()
        if (made := _elastic.resharded(load, look)) is not None:
            load.tag = made
            look = load.look()
        load.check(look)
        call.arguments["load_dir"], call.arguments["tag"] = load.source, load.tag
        with _noticing_another_base(engine):
            path, client_state = wrapped(*call.args, **call.kwargs)
    forget_second_copies(engine)
    if restores_optimizer and keeps_optimizer_on_nvme(engine):
        warn(
            strategy,
            "The optimizer is on NVMe: DeepSpeed restores neither how many steps it has taken nor sub-groups that are"
            " too small to be kept there, so the run does not go on exactly as it was."
            ' With offload_optimizer: {"device": "cpu"} it would.',
        )
    if client_state is not None:
        for key in (KEY, LABEL, _elastic.KEY, "universal_checkpoint_info"):
            client_state.pop(key, None)
        if restores_optimizer and load.state:
            _elastic.carry_on(strategy, engine, load.state, client_state)
    return path, client_state


@contextmanager
def _noticing_another_base(engine: Any) -> Iterator[None]:
    """Remember what is frozen and gets other values from a checkpoint: what the program builds is not its base."""
    attached = _ownership.attached(engine)
    if attached is None:
        yield
        return
    before = _frozen.sample(_frozen.frozen(engine.module))
    yield
    after = _frozen.sample(_frozen.frozen(engine.module))
    attached.loaded |= _frozen.differing(before, after)
    attached.at_start = after if attached.at_start else {}
    attached.prints = {}


def forget_second_copies(engine: Any) -> None:
    """hpZ's second copy within a node is of before a load; without one, DeepSpeed makes it anew.

    It does so by itself from 0.18.3 on, but not for frozen parameters that the checkpoint holds.
    """
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def _missing_in(engine: Any) -> list[tuple[Any, str, Any]]:
    """What DeepSpeed calls in a load, and has not got."""
    optimizer = engine.optimizer
    missing: list[tuple[Any, str, Any]] = _reading_subclasses(engine)
    if optimizer is not None and not hasattr(optimizer, "_restore_from_bit16_weights"):
        # DeepSpeedZeRoOffload, made for test, validate or predict in ZeRO-3, has no master weights to restore,
        # and no such method from 0.14.5 to at least 0.19.8.
        restore = getattr(optimizer, "refresh_fp32_params", lambda: None)
        missing.append((optimizer, "_restore_from_bit16_weights", restore))
        if engine.zero_optimization_partition_weights() and not hasattr(engine, "_optimizer_has_ckpt_event_prologue"):
            # DeepSpeed 0.10.1 cannot load into it at all: see also `_gathered`.
            missing.append((optimizer, "checkpoint_event_prologue", optimizer.partition_all_parameters))
            missing.append((optimizer, "checkpoint_event_epilogue", lambda: None))
            missing.append((optimizer, "dp_process_group", engine.data_parallel_group))
            missing.append((engine, "_load_zero_checkpoint", lambda *args, **kwargs: True))
    if forgets_optimizer(engine):
        missing.append((engine, "_load_zero_checkpoint", partial(_load_plain_optimizer, engine)))
    return missing


def _reading_subclasses(engine: Any) -> list[tuple[Any, str, Any]]:
    """The `load` of the engine's checkpoint engine, for files with tensor subclasses too.

    DeepSpeed names a function for where storages go, the CPU for each, which torch does not take for a subclass.
    """
    reader = getattr(engine, "checkpoint_engine", None)  # DeepSpeed may make it later
    if reader is None:
        return []
    read = reader.load

    def load(path: str, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(path, map_location, *args, **kwargs)
        except RuntimeError as error:
            if not callable(map_location) or "map_location" not in str(error):
                raise
            return read(path, "cpu", *args, **kwargs)

    return [(reader, "load", load)]


def _remembers_module(load: Load) -> list[tuple[Any, str, Any]]:
    """What keeps `load.module`, in ZeRO-3 without an optimizer: DeepSpeed puts whole fp32 parameters in its place.

    It takes buffers through fp32 as well (integers too up to 0.17.6 at least), which changes packed weights, and
    gives a buffer one of its names only.
    """
    if load.restores_optimizer or not load.engine.zero_optimization_partition_weights():
        return []
    from deepspeed.runtime.state_dict_factory import SDLoaderFactory

    make_loader = SDLoaderFactory.get_sd_loader

    def loader(*args: Any, **kwargs: Any) -> Any:
        made = make_loader(*args, **kwargs)
        read = made.load

        def remember(*args: Any, **kwargs: Any) -> Any:
            path, state, *rest = read(*args, **kwargs)
            load.module = state["module"] if isinstance(state, Mapping) else {}
            return path, state, *rest

        made.load = remember
        return made

    return [(SDLoaderFactory, "get_sd_loader", staticmethod(loader))]


def _with_own_buffers(checkpoint: Mapping[str, Any], load: Load) -> Mapping[str, Any]:
    """The checkpoint with all that is no parameter as it was saved, under all its names and in its own dtype."""
    shapes = [*(checkpoint.get("param_shapes") or []), checkpoint.get("frozen_param_shapes") or {}]
    parameters = {plain(name) for names in (*shapes, checkpoint.get("shared_params") or {}) for name in names}
    parameters |= parameters_by_name(load.engine.module).keys()
    own = {name: value for name, value in load.module.items() if plain(name) not in parameters}
    return {**checkpoint, "module": {**checkpoint["module"], **own}}


def _load_plain_optimizer(engine: Any, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
    """In the place of ZeRO's load, for an optimizer that is not ZeRO's: see `forgets_optimizer`."""
    load = _load.current.get()
    assert load is not None
    engine.optimizer.load_state_dict(load.state["optimizer"], load_optimizer_states=load_optimizer_states)
    return True


def engine_load_module(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.load_module_state_dict`: it gets the whole checkpoint in every release."""
    strategy, load = _ownership.owner(engine), _load.current.get()
    if strategy is None or load is None or load.engine is not engine:
        return wrapped(*args, **kwargs)
    from .elastic import TO_REMEMBER

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    checkpoint = call.arguments["checkpoint"]
    load.state = {key: checkpoint.get(key) for key in ("optimizer", *TO_REMEMBER)}
    manifest = load.manifest or Manifest.from_checkpoint(checkpoint)
    held = by_name(engine.module)
    if manifest is not None:
        if call.arguments.get("strict", True):
            check_left_out(manifest, held)
        verify_base(manifest, held, load)
        may_be_missing = manifest.names
    else:
        may_be_missing = left_out_by_others(checkpoint, engine.module)
        if may_be_missing:
            warn(
                strategy,
                "The checkpoint was saved without its frozen parameters and without a manifest: whether the base"
                " is the one that it was trained on cannot be verified.",
            )
    if load.restores_optimizer:
        _check_optimizer_state(checkpoint, engine)
        _check_optimizer_layout(checkpoint, engine)
    checkpoint = _with_own_buffers(checkpoint, load) if load.module else checkpoint
    state = without_what_is_there(checkpoint["module"], held, manifest, load)
    may_be_missing |= {plain(name) for name in checkpoint["module"].keys() - state.keys()}
    parts = {plain(name): value for name, value in state.items() if is_part(held.get(plain(name)))}
    checkpoint = _with_all_fragments({**checkpoint, "module": state}, engine)
    call.arguments["checkpoint"] = _named_as_now(checkpoint, engine.module)
    with _forgiving(engine.module, may_be_missing, parts), _gathered(call, load):
        result = wrapped(*call.args, **call.kwargs)
    check_parts(parts, by_name(engine.module) if parts else {}, load)
    return result


@contextmanager
def _gathered(call: inspect.BoundArguments, load: Load) -> Iterator[None]:
    """For ZeRO-3 without an optimizer on DeepSpeed 0.10.1, what later releases do: load whole parameters."""
    engine = load.engine
    if (
        "fetch_z3_params" in call.signature.parameters
        or load.restores_optimizer
        or not engine.zero_optimization_partition_weights()
    ):
        yield
        return
    from deepspeed import zero
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    whole = get_fp32_state_dict_from_zero_checkpoint(load.source, load.tag)
    checkpoint = _with_own_buffers({**call.arguments["checkpoint"], "module": whole}, load)
    call.arguments["checkpoint"] = _named_as_now(checkpoint, engine.module)
    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        yield


@contextmanager
def _forgiving(module: Any, missing: frozenset[str], parts: Mapping[str, Any]) -> Iterator[None]:
    """Let these names, and no others, be missing from a state dict that is loaded strictly, or be in it unexpectedly.

    A quantized layer may save parts that it does not load, and may not save its weight under the weight's name.
    """
    saved = {plain(name) for name in module.state_dict()}
    missing = missing | {name for names in frozen_names(module).values() for name in names if name not in saved}

    def forgive(_: Any, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if plain(name) not in missing]
        incompatible.unexpected_keys[:] = [name for name in incompatible.unexpected_keys if plain(name) not in parts]

    handle = module.register_load_state_dict_post_hook(forgive)
    try:
        yield
    finally:
        handle.remove()


def check_left_out(manifest: Manifest, held: Mapping[str, Held]) -> None:
    """All that was left out must be there, frozen, in its shape.

    Args:
        manifest: says what was left out.
        held: what the module holds now, by all names.
    """
    gone: list[str] = []
    quantized: list[str] = []
    trained, reshaped = [], []
    for one in manifest.left_out:
        for name in one.names:
            now = held.get(name)
            if now is None:
                (quantized if one.kind == PART else gone).append(name)
            elif one.kind == PARAMETER and not now.is_frozen:
                trained.append(name)
            elif now.shape != one.shape:
                reshaped.append(f"{name}: saved {list(one.shape)}, now {list(now.shape)}")
    problems = []
    if gone:
        problems.append(
            f"The checkpoint left out parameters that the model does not have: {named(gone)}."
            " Build the model as in the run that saved it."
        )
    if quantized and not gone:
        problems.append(
            f"The base is not quantized as it was at the save: the model has no {named(quantized)}."
            " Quantize it as in the run that saved it."
        )
    if trained:
        problems.append(
            f"The checkpoint left out parameters that the model now trains: {named(trained)}. Their values are in no"
            " checkpoint: freeze them again, or resume from a checkpoint saved while they were trainable."
        )
    if reshaped:
        problems.append(
            f"Left-out parameters have another shape now: {named(reshaped)}."
            " Build the model as in the run that saved it."
        )
    if problems:
        raise CheckpointMismatchError("\n".join(problems))


def verify_base(manifest: Manifest, held: Mapping[str, Held], load: Load) -> None:
    """What was left out must have the content that it had at the save, as the fingerprints tell.

    Args:
        manifest: says what was left out.
        held: what the module holds now, by all names.
        load: that this is done for.
    """
    strategy = load.strategy
    how = current().verify_base
    if how == "off":
        return
    # By all names, because what was tied at the save need not be tied now; of tied ones the first name counts.
    pairs = {held[name]: (name, saved) for saved in manifest.left_out for name in reversed(saved.names) if name in held}
    comparable = [one for one, (_, saved) in pairs.items() if saved.fingerprint and saved.dtype == one.dtype]
    engine = load.engine or strategy.model
    prints = fingerprints(
        [one.tensor for one in comparable], engine.device, process_memory(), all_known=load.base_is_known
    )
    found = dict(zip(comparable, prints, strict=True))
    differ = [
        f"- {pairs[one][0]}: saved {pairs[one][1].fingerprint}, now {content}"
        for one, content in found.items()
        if content and content != pairs[one][1].fingerprint
    ]
    differ += [
        f"- {name}: saved as {saved.dtype}, now {one.dtype}"
        for one, (name, saved) in pairs.items()
        if saved.dtype != one.dtype and not _is_rounded(saved, one)
    ]
    unread = [
        name
        for one, (name, saved) in pairs.items()
        if found.get(one) is None and (saved.dtype == one.dtype or _is_rounded(saved, one))
    ]
    if unread:
        warn(
            strategy,
            f"{len(unread)} of {len(pairs)} left-out parameters cannot be compared with the base that the"
            f" checkpoint was saved with, for they are of another dtype now, quantized, or on NVMe: {named(unread)}",
        )
    if not differ:
        return
    message = "\n".join(
        [
            f"The base is not the one that the checkpoint was saved with: {len(differ)} of {len(pairs)}"
            " left-out parameters have another content (by fingerprint).",
            *differ[:10],
            *([f"- and {len(differ) - 10} more"] if len(differ) > 10 else []),
            "What usually causes it: another base model or revision, another seed, a layer that was initialised anew,"
            " other settings of quantization, weights that the program changed after it had built them. Build the base"
            ' as the run that saved did, or go on all the same with patch(verify_base="warn") or'
            " DS_FROZEN_PATCH_VERIFY_BASE=warn.",
        ]
    )
    if how == "error":
        raise CheckpointMismatchError(message)
    warn(strategy, message)


def _is_rounded(saved: LeftOut, now: Held) -> bool:
    """Whether a base may be the one that was saved with, in another precision."""
    return saved.dtype in _FLOATING and now.dtype in _FLOATING


def left_out_by_others(checkpoint: Mapping[str, Any], module: Any) -> frozenset[str]:
    """What a checkpoint without a manifest may lack: all that is frozen if all of it is missing, else nothing.

    DeepSpeed's own flag leaves a tied parameter in under its alias, so the first name is what counts.
    """
    saved = {plain(name) for name in checkpoint["module"]}
    frozen = frozen_names(module).values()
    if any(names[0] in saved for names in frozen):
        return frozenset()
    return frozenset(name for names in frozen for name in names)


def _check_optimizer_state(checkpoint: Mapping[str, Any], engine: Any) -> None:
    """Without ZeRO, the optimizer's state must be in the checkpoint itself."""
    if has_plain_optimizer(engine) and checkpoint.get("optimizer") is None:
        raise CheckpointMismatchError(
            f"The checkpoint of deepspeed {checkpoint.get('ds_version', '(unknown)')} holds no state for the optimizer"
            " that this run makes: in bf16 with ZeRO stage 0, releases of DeepSpeed save none, or another kind. Resume"
            " with the release that saved it, if that was done under patch(), or start anew with ZeRO stage 1."
        )


def _check_optimizer_layout(checkpoint: Mapping[str, Any], engine: Any) -> None:
    """The parameters that ZeRO's flat partitions hold must be those of the optimizer now.

    DeepSpeed compares their total size only, and in ZeRO-3 the module's state dict holds
    placeholders, so a parameter of another shape would be loaded askew without a word.
    """
    saved_groups = checkpoint.get("param_shapes")
    if not saved_groups or not hasattr(engine.optimizer, "load_state_dict"):
        return
    saved_groups, now_groups = (
        [{plain(name): tuple(shape) for name, shape in group.items()} for group in groups]
        for groups in (saved_groups, engine._get_zero_param_shapes())
    )
    saved = {name: shape for group in saved_groups for name, shape in group.items()}
    now = {name: shape for group in now_groups for name, shape in group.items()}
    problems = []
    if absent := saved.keys() - now.keys():
        problems.append(f"trained in the checkpoint, but frozen or gone in the model: {named(absent)}")
    if new := now.keys() - saved.keys():
        problems.append(f"trained by the model, but missing from the checkpoint: {named(new)}")
    if reshaped := [
        f"{name}: saved {list(saved[name])}, now {list(now[name])}"
        for name in saved.keys() & now.keys()
        if saved[name] != now[name]
    ]:
        problems.append(f"of another shape: {named(reshaped)}")
    if not problems and [list(group) for group in saved_groups] != [list(group) for group in now_groups]:
        problems.append("in another order, or in other parameter groups, than at the save")
    if problems:
        raise CheckpointMismatchError(
            "The checkpoint's trainable parameters are not the model's:\n"
            + "\n".join(f"- {problem}" for problem in problems)
            + "\nBuild the model and its optimizer as in the run that saved it."
        )


def _with_all_fragments(checkpoint: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """The checkpoint with a frozen value for each parameter that is frozen now, if it has them apart.

    Below ZeRO-3 these are second copies of what is in the module's state dict. In ZeRO-3 DeepSpeed looks each of them
    up and raises KeyError for one that is not there: left out, or frozen since a full save. Those are given their own
    values, which what is in the module's state dict may have set before.
    """
    fragments = checkpoint.get("frozen_param_fragments")
    if not fragments:
        return checkpoint
    if not engine.zero_optimization_partition_weights():
        return {**checkpoint, "frozen_param_fragments": None}
    own = {names[0]: getattr(p, "ds_tensor", p) for p, names in names_by_parameter(engine.module).items()}
    saved = {plain(name): value for name, value in fragments.items()}
    return {**checkpoint, "frozen_param_fragments": {**own, **saved}}


def _named_as_now(checkpoint: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The checkpoint with its names as the module has them, whatever either side was wrapped in."""
    prefix = prefix_of(name for name, _ in module.named_parameters())
    names = {
        "module": {plain(name): name for name in module.state_dict()},
        "frozen_param_fragments": {plain(name): name for name, _ in module.named_parameters()},
    }
    renamed = {
        key: {now.get(plain(name), prefix + plain(name)): value for name, value in checkpoint[key].items()}
        for key, now in names.items()
        if checkpoint.get(key)
    }
    # As it is where it can be: what torch has beside the entries of a state dict, such as versions, is kept then.
    return {**checkpoint, **{key: new for key, new in renamed.items() if new.keys() != checkpoint[key].keys()}}

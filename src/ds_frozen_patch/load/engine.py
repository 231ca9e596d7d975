"""What happens around a load into an engine: the wrappers of two methods of `DeepSpeedEngine`.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpoint.zero.labels import ELASTIC_KEY, LABEL, PLAIN_GROUPS, UNIVERSAL_INFO
from ..checkpoint.zero.layout import latest_tag
from ..common.errors import CheckpointError
from ..common.overrides import Attributes, overridden, set_to
from ..engine.gathering import put
from ..engine.origins import replacing
from ..engine.owner import warn
from ..engine.served import ServedEngine, attach, attached
from ..manifest import KEY, Manifest
from ..parameters import names_by_parameter, plain, prefix_of
from ..publish import in_flight
from ..publish.work_folder import entries, is_in_work_folder
from ..workarounds import for_deepspeed as cures
from . import elastic
from .base_check import check_base
from .load import Load, current, where_it_is
from .quantized import by_name, check_parts, is_part, without_own_values
from .reading import check_model, manifest_of, sharing_reads
from .restart import restarts, with_fresh_optimizer
from .strictness import check_optimizer_layout, check_optimizer_state, forgiving, saved_elsewhere
from .trust import refuse_unsafe_in, runs_nothing, trust


def load_checkpoint(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.load_checkpoint`: checks the files first, and works in ZeRO-3 without an optimizer."""
    in_flight.wait()
    load, known = current.get(), attached(engine)
    is_alone = load is None
    if load is None:
        if known is None:
            return _load_by_deepspeed(wrapped, engine, args, kwargs)
        load = Load(known.owner)
    known = attach(engine, load.owner)
    if known is None:
        return _load_by_deepspeed(wrapped, engine, args, kwargs)
    if engine.load_universal_checkpoint():
        return _load_universal(wrapped, engine, known, args, kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    load.engine = engine
    if engine.optimizer is not None and any(item is engine.optimizer for item in load.requested):
        call.arguments["load_optimizer_states"] = True  # see `for_fabric.unwrapped`
    load.restores_optimizer = (
        engine.optimizer is not None
        and call.arguments["load_optimizer_states"]
        and not call.arguments["load_module_only"]
    )
    tag = call.arguments["tag"]
    load.source, load.tag = str(call.arguments["load_dir"]), None if tag is None else str(tag)
    _find_folder(load)
    with trust(), set_to(current, load), overridden(_cures(load)):
        listing = load.list_files()
        if is_alone and listing.is_empty:  # DeepSpeed returns None, and a run may begin like this
            load.agree("no checkpoint")
            return wrapped(*call.args, **call.kwargs)
        with elastic.resharded(load, listing) as listing:
            load.check(listing)
            if load.record is not None:
                load.may_be_missing = _check_base(load, {}, load.record.manifest, call.arguments["load_module_strict"])
            call.arguments["load_dir"], call.arguments["tag"] = load.source, load.tag
            is_shared = listing.tag is not None  # else ranks may read different numbers of files
            with _noticing_another_base(known, engine), overridden(sharing_reads(load) if is_shared else []):
                path, client_state = wrapped(*call.args, **call.kwargs)
        if path is not None and call.arguments["load_dir"] != load.source:  # it was read from a temporary folder
            path = str(Path(load.source, call.arguments["tag"], Path(path).name))
    cures.forget_second_copies(engine)
    if load.restores_optimizer and cures.forgets_optimizer_on_nvme(engine):
        warn(load.owner, cures.FORGETS_OPTIMIZER_ON_NVME)
    if client_state is not None:
        _remove_ours(client_state)
        if load.restores_optimizer and load.state:
            load.owner.after_load(load.owner, engine, load.state, client_state)
    return path, client_state


def _load_universal(
    wrapped: Callable[..., Any], engine: Any, known: ServedEngine, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let DeepSpeed load a universal checkpoint by itself."""
    lost = "DeepSpeed loads neither buffers nor frozen parameters, and " if cures.loads_no_frozen_state(engine) else ""
    known.warn_once(
        f'With "load_universal", {lost}ds_frozen_patch does not verify the base. To avoid this, remove it from the'
        " configuration, and load the checkpoint that the universal one was made from: with patch(elastic=True) that"
        " works at any world size."
    )
    with set_to(current, None), _noticing_another_base(known, engine):
        path, client_state = _load_by_deepspeed(wrapped, engine, args, kwargs)
    _remove_ours(client_state or {})
    return path, client_state


def _load_by_deepspeed(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let DeepSpeed load by itself, and run nothing with `trust=False`."""
    if not runs_nothing():
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    with trust():
        note = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        refuse_unsafe_in(Path(call.arguments["load_dir"]), call.arguments["tag"], note)
        return wrapped(*args, **kwargs)


def _remove_ours(client_state: dict[str, Any]) -> None:
    for key in (KEY, LABEL, ELASTIC_KEY, PLAIN_GROUPS):
        client_state.pop(key, None)
    for key, value in UNIVERSAL_INFO.items():
        if client_state.get(key) == value:
            del client_state[key]


def _find_folder(load: Load) -> None:
    """Find the folder of the tag where a killed save has left it."""
    source = Path(load.source)
    if load.tag is None and is_in_work_folder(source):  # where a strategy has found it
        load.tag = next((item.name for item in entries(source) if item.is_dir()), None)
    with suppress(CheckpointError, OSError):  # `Load.look` finds the same problem, and shares it
        tag = latest_tag(source) if load.tag is None else load.tag
        place = where_it_is(load.owner, source / tag)
        load.source, load.tag = str(place.parent), place.name  # a tag can be a path


def _cures(load: Load) -> Attributes:
    engine = load.engine
    found = cures.read_tensor_subclasses(engine) + cures.load_for_inference(engine)
    found += cures.load_plain_optimizer(engine, lambda: load.state) + with_fresh_optimizer(load)
    if not load.restores_optimizer and engine.zero_optimization_partition_weights():
        found += cures.remember_module(lambda module: setattr(load, "module", module))
        found += cures.weights_of_the_tag(lambda: load.tag)
    return found


@contextmanager
def _noticing_another_base(known: ServedEngine, engine: Any) -> Iterator[None]:
    """Remember what a checkpoint replaces: it is no longer the base that the program builds."""
    with replacing(engine.module):
        yield
    known.prints = {}


def load_module_state_dict(
    wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`DeepSpeedEngine.load_module_state_dict`, which gets the whole checkpoint in every release."""
    load = current.get()
    if load is None or load.engine is not engine:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    checkpoint = call.arguments["checkpoint"]
    load.state = {key: checkpoint.get(key) for key in ("optimizer", *elastic.NEEDED)}
    check_model(load, checkpoint)
    if load.record is not None:
        manifest, may_be_missing = load.record.manifest, load.may_be_missing
    else:
        manifest = manifest_of(load, checkpoint)
        may_be_missing = _check_base(load, checkpoint, manifest, call.arguments.get("strict", True))
    held = by_name(engine.module)
    checkpoint["module"].pop(LABEL, None)  # releases before 0.3 put it into the files of experts, too
    if load.restores_optimizer:
        if not restarts(load):
            check_optimizer_state(checkpoint, engine)
        check_optimizer_layout(checkpoint, engine)
    if load.module:
        checkpoint = cures.with_own_buffers(checkpoint, load.module, engine.module)
    state = without_own_values(checkpoint["module"], held, manifest, load)
    may_be_missing |= {plain(name) for name in checkpoint["module"].keys() - state.keys()}
    fragments, in_partitions = saved_elsewhere(checkpoint, engine.module)
    parts = {plain(name): value for name, value in state.items() if is_part(held.get(plain(name)))}
    checkpoint = _with_all_fragments({**checkpoint, "module": state}, engine)
    call.arguments["checkpoint"] = _renamed(checkpoint, engine.module)
    forgiven = may_be_missing | fragments | in_partitions
    with forgiving(engine.module, forgiven, parts), _gathered(call, load), _frozen_meanwhile(engine, checkpoint):
        result = wrapped(*call.args, **call.kwargs)
    if in_partitions and not (load.restores_optimizer and engine.zero_optimization_partition_weights()):
        put(engine.module, {plain(n): value for n, value in _whole(load).items() if plain(n) in in_partitions})
    check_parts(parts, by_name(engine.module) if parts else {}, load)
    return result


def _check_base(load: Load, checkpoint: Mapping[str, Any], manifest: Manifest | None, strict: bool) -> frozenset[str]:
    """As `check_base`, of an engine; with a record, before there is a checkpoint."""
    if manifest is None and load.record is not None:
        return frozenset()  # nothing was left out
    module = load.engine.module
    unverifiable = (
        "The checkpoint has neither frozen parameters nor a manifest, so it cannot be verified that the base is the one"
        " that it was trained on."
    )
    return check_base(checkpoint, manifest, module, by_name(module), load, strict=strict, unverifiable=unverifiable)


@contextmanager
def _gathered(call: inspect.BoundArguments, load: Load) -> Iterator[None]:
    """Load whole parameters in ZeRO-3 without an optimizer, where DeepSpeed cannot: see `has_no_gathering_load`."""
    engine = load.engine
    needed = cures.has_no_gathering_load(call.signature) and engine.zero_optimization_partition_weights()
    if not needed or load.restores_optimizer:
        yield
        return
    whole = {**call.arguments["checkpoint"], "module": _whole(load)}
    checkpoint = cures.with_own_buffers(whole, load.module, engine.module)
    call.arguments["checkpoint"] = _renamed(checkpoint, engine.module)
    with cures.gathered_for_load(engine):
        yield


def _whole(load: Load) -> dict[str, Any]:
    """The trained parameters of a checkpoint, from the optimizer's partitions."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(load.source, load.tag))


@contextmanager
def _frozen_meanwhile(engine: Any, checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed load all fragments, also of parameters that are no longer frozen."""
    fragments = set(map(plain, checkpoint.get("frozen_param_fragments") or {}))
    thawed = [p for p, names in names_by_parameter(engine.module).items() if p.requires_grad and names[0] in fragments]
    for parameter in thawed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in thawed:
            parameter.requires_grad_(True)


def _with_all_fragments(checkpoint: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
    """The checkpoint with a fragment for each parameter that is frozen now, if it needs fragments at all.

    Below ZeRO-3, fragments are second copies, but of what the state dict lacks. DeepSpeed looks up one for each frozen
    parameter, and raises KeyError if there is none: it was left out, or frozen since a full save. Such a parameter gets
    its own value, which the state dict may have set before.
    """
    saved = {plain(name): value for name, value in (checkpoint.get("frozen_param_fragments") or {}).items()}
    if not engine.zero_optimization_partition_weights():
        in_state = set(map(plain, checkpoint["module"]))
        saved = {name: value for name, value in saved.items() if name not in in_state}
    if not saved:
        return {**checkpoint, "frozen_param_fragments": None}
    own = {names[0]: getattr(p, "ds_tensor", p) for p, names in names_by_parameter(engine.module).items()}
    return {**checkpoint, "frozen_param_fragments": {**own, **saved}}


def _renamed(checkpoint: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The checkpoint with the names of the module, whatever either of them was wrapped in."""
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
    # Unchanged where possible: a copy would lose what torch attaches to a state dict, such as versions.
    return {**checkpoint, **{key: new for key, new in renamed.items() if new.keys() != checkpoint[key].keys()}}

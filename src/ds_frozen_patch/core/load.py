"""One load into an engine, to be read from top to bottom.

1. Rank 0 lists the folder for all ranks, once the journal of a killed save is done.
2. Each rank reads the record and verifies a share of the files. The ranks agree: what one cannot load, none loads.
3. The base is compared with the record, before anything is changed. Another one is an error that names what differs.
4. DeepSpeed reads its files. Each file of model states names its save, which must be the record's.
5. DeepSpeed loads strictly: only what was left out, or is saved elsewhere, may be missing.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from .. import cures
from ..base import replacing
from ..checkpoint.zero.layout import latest_tag
from ..common.errors import CheckpointError
from ..common.files import SCRATCH, shown
from ..common.overrides import Attributes, overridden
from ..engine.served import ServedEngine, attached, warn
from ..internals import forget_second_copies, optimizer_group, remember_module
from ..load import agreement, elastic, fitting
from ..load.quantized import check_parts, without_own_values
from ..load.running import Load
from ..load.strictness import check_base, check_optimizer, forgiving, saved_elsewhere
from ..load.trust import refuse_unsafe_in, trust
from ..parameters import Contents, plain
from ..publish import in_flight
from ..publish.durable import wait_for_name
from ..publish.publication import is_local
from ..record import KEY, UNIVERSAL_INFO, UNKNOWN, unknown
from ..settings import current as settings


def load_checkpoint(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.load_checkpoint`, which every framework calls; it returns a path and the client state."""
    in_flight.wait()
    served = attached(engine)
    if served is None:
        return _load_by_deepspeed(wrapped, engine, args, kwargs)
    is_alone = served.load is None
    load = served.load or Load(served.owner)
    if engine.load_universal_checkpoint():
        return _load_universal(wrapped, engine, served, args, kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    load.engine = engine
    address, tag = str(call.arguments["load_dir"]), call.arguments["tag"]
    if is_alone:  # else a strategy has brought the files down
        address = SCRATCH.sub(r"\2", address)
    if not is_local(address):
        load_from = partial(_load_brought, wrapped, served, load, call, is_alone)
        return agreement.from_bucket(load, address, tag, load_from)
    while True:
        try:
            return _load(wrapped, served, load, call, is_alone)
        except agreement.ReplacedError:  # on every rank
            if load.attempts == agreement.ATTEMPTS or SCRATCH.match(load.source):
                raise
            load.begin_again()


def _load_brought(
    wrapped: Callable[..., Any],
    served: ServedEngine,
    load: Load,
    call: inspect.BoundArguments,
    is_alone: bool,
    place: Path,
) -> Any:
    """Load from a scratch folder, and return the path as an address."""
    call.arguments["load_dir"] = str(place)
    path, client_state = _load(wrapped, served, load, call, is_alone)
    return path and shown(path), client_state


def _load(
    wrapped: Callable[..., Any], served: ServedEngine, load: Load, original: inspect.BoundArguments, is_alone: bool
) -> Any:
    """Load once; it can be called again if another process has replaced the checkpoint meanwhile."""
    engine, call = load.engine, copy(original)
    call.arguments = dict(original.arguments)
    _begin(load, call)
    source = load.source
    load_state_dict = partial(_load_module_state_dict, engine.load_module_state_dict, load)
    with trust(), overridden([*_cures(load), (engine, "load_module_state_dict", load_state_dict)]):
        load.listing = agreement.list_files(load)
        if is_alone and load.listing.is_empty:  # DeepSpeed returns None, and a run may begin like this
            agreement.agree(load, "no checkpoint" if load.tag is None else f"the tag {load.tag}")
            return wrapped(*call.args, **call.kwargs)
        agreement.check(load)
        with elastic.resharded(load) as names:
            if load.record is not None and load.record.kind != UNKNOWN:
                load.may_be_missing = check_base(load, {}, call.arguments["load_module_strict"])
            call.arguments["load_dir"], call.arguments["tag"] = load.source, load.tag
            reads = [*agreement.sharing_reads(load), *names]
            left_out = load.may_be_missing if load.record is not None and load.record.is_trainable_only else None
            with replacing(engine, left_out), overridden(reads):
                path, client_state = wrapped(*call.args, **call.kwargs)
        if path is not None and call.arguments["load_dir"] != source:  # it was read from a temporary folder
            path = str(Path(source, call.arguments["tag"], Path(path).name))
    forget_second_copies(engine)
    if load.restores_optimizer and cures.forgets_optimizer_on_nvme(engine):
        warn(load.owner, cures.FORGETS_OPTIMIZER_ON_NVME)
    if client_state is not None:
        for key, value in {KEY: client_state.get(KEY), **UNIVERSAL_INFO}.items():  # which the program has not passed
            if client_state.get(key) == value:
                client_state.pop(key, None)
        if load.record is not None and load.record.zero_stage == 0 and optimizer_group(engine) is None:
            client_state.update(dict.fromkeys({"param_shapes"} & client_state.keys()))  # None, as DeepSpeed saves it
        if load.restores_optimizer and load.state:
            load.owner.after_load(load.owner, engine, load.state, client_state)
    return path, client_state


def _begin(load: Load, call: inspect.BoundArguments) -> None:
    """Find out what is loaded, and from where; wait for what a network disk's client has not seen yet."""
    engine = load.engine
    if engine.optimizer is not None and any(item is engine.optimizer for item in load.requested):
        call.arguments["load_optimizer_states"] = True  # see `frameworks.for_lightning.strategy`
    restores_states = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
    load.restores_optimizer = engine.optimizer is not None and restores_states
    load.restarts = load.restores_optimizer and settings().restart_optimizer
    source, tag = Path(call.arguments["load_dir"]), call.arguments["tag"]
    load.source, load.tag = str(call.arguments["load_dir"]), None if tag is None else str(tag)
    with suppress(CheckpointError, OSError):  # `agreement.check` finds the same problem, and shares it
        place = source / (latest_tag(source) if load.tag is None else load.tag)
        wait_for_name(place)
        load.source, load.tag = str(place.parent), place.name  # a tag can be a path


def _cures(load: Load) -> Attributes:
    """Cures of faults: no two of them set the same attribute. What merges files later wraps theirs."""
    engine = load.engine
    attributes = cures.load_optimizer(engine, lambda: load.state)
    attributes += fitting.with_fresh_optimizer(load) if load.restarts else []
    if not load.restores_optimizer and engine.zero_optimization_partition_weights():
        attributes += remember_module(lambda module: setattr(load, "module", module))
        attributes += cures.weights_of_the_tag(lambda: load.tag)
    return attributes


def _load_module_state_dict(original: Callable[..., Any], load: Load, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.load_module_state_dict` in a load; it gets the whole checkpoint in every release."""
    call, engine = inspect.signature(original).bind(*args, **kwargs), load.engine
    checkpoint = call.arguments["checkpoint"]
    load.state = {key: checkpoint.get(key) for key in ("optimizer", *elastic.NEEDED)}
    load.state |= {"record": load.record or unknown()}
    may_be_missing = load.may_be_missing
    if may_be_missing is None:  # the record is missing, or in the file
        may_be_missing = check_base(load, checkpoint, call.arguments.get("strict", True))
    if load.restores_optimizer:
        check_optimizer(load, checkpoint)
    if load.module:
        checkpoint = cures.with_own_buffers(checkpoint, load.module, engine.module)
    state, parts = checkpoint["module"], dict[str, Any]()
    if load.parts:
        state = without_own_values(state, load)
        may_be_missing |= {plain(name) for name in checkpoint["module"].keys() - state.keys()}
        parts = {plain(name): value for name, value in state.items() if plain(name) in load.parts}
    fragments, in_partitions = saved_elsewhere(load, checkpoint)
    forgiven = may_be_missing | load.starts_fresh | fragments | in_partitions
    with forgiving(load, forgiven, parts), fitting.with_fragments(load, {**checkpoint, "module": state}) as fitted:
        call.arguments["checkpoint"] = fitting.renamed(fitted, engine.module)
        with fitting.gathered(call, load):
            result = original(*call.args, **call.kwargs)
    if in_partitions:
        fitting.put_from_partitions(load, in_partitions)
    if parts:
        check_parts(parts, Contents(engine.module).by_name, load)
    return result


def _load_universal(
    wrapped: Callable[..., Any], engine: Any, served: ServedEngine, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let DeepSpeed load a universal checkpoint by itself."""
    lost = "DeepSpeed loads neither buffers nor frozen parameters, and " if cures.loads_no_frozen_state(engine) else ""
    served.warn_once(
        f'With "load_universal", {lost}ds_frozen_patch does not verify the base. To avoid this, remove it from the'
        " configuration, and load the checkpoint that the universal one was made from: it loads at any world size."
    )
    with replacing(engine):
        path, client_state = _load_by_deepspeed(wrapped, engine, args, kwargs)
    (client_state or {}).pop(KEY, None)
    return path, client_state


def _load_by_deepspeed(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let DeepSpeed load by itself, and run nothing with `weights_only=True`."""
    if not settings().weights_only:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    with trust():
        note = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        refuse_unsafe_in(Path(call.arguments["load_dir"]), call.arguments["tag"], note)
        return wrapped(*args, **kwargs)

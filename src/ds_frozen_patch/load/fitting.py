"""A checkpoint's state as the engine's `load_module_state_dict` can load it: names, fragments, whole parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..engine.gathering import put
from ..parameters import Contents, plain, prefix_of
from ..workarounds import for_deepspeed as cures
from .running import Load


@contextmanager
def gathered(call: inspect.BoundArguments, load: Load) -> Iterator[None]:
    """Load whole parameters in ZeRO-3 without an optimizer, where DeepSpeed cannot: see `has_no_gathering_load`."""
    engine = load.engine
    needed = cures.has_no_gathering_load(call.signature) and engine.zero_optimization_partition_weights()
    if not needed or load.restores_optimizer:
        yield
        return
    whole = {**call.arguments["checkpoint"], "module": _whole(load)}
    checkpoint = cures.with_own_buffers(whole, load.module, engine.module)
    call.arguments["checkpoint"] = renamed(checkpoint, engine.module)
    with cures.gathered_for_load(engine):
        yield


def _whole(load: Load) -> dict[str, Any]:
    """The trained parameters of a checkpoint, from the optimizer's partitions."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(load.source, load.tag))


@contextmanager
def frozen_meanwhile(engine: Any, checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed load all fragments, also of parameters that are no longer frozen."""
    fragments = set(map(plain, checkpoint.get("frozen_param_fragments") or {}))
    thawed = [p for p, names in Contents(engine.module).names.items() if p.requires_grad and names[0] in fragments]
    for parameter in thawed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in thawed:
            parameter.requires_grad_(True)


def with_all_fragments(checkpoint: Mapping[str, Any], engine: Any) -> Mapping[str, Any]:
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
    values = {names[0]: getattr(p, "ds_tensor", p) for p, names in Contents(engine.module).names.items()}
    return {**checkpoint, "frozen_param_fragments": {**values, **saved}}


def renamed(checkpoint: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
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


def put_from_partitions(load: Load, names: frozenset[str]) -> None:
    """Load the parameters that are only in the partitions of the optimizer, unless DeepSpeed has done so."""
    engine = load.engine
    if names and not (load.restores_optimizer and engine.zero_optimization_partition_weights()):
        put(engine.module, {plain(name): value for name, value in _whole(load).items() if plain(name) in names})

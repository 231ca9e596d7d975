"""A checkpoint's state as the engine's `load_module_state_dict` can load it: names, fragments, whole parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import cures
from ..checkpoint.zero.entries import with_attributes
from ..common.overrides import Attributes
from ..engine.served import warn
from ..internals import inner_optimizer, merged, partition_of
from ..parameters import Contents, plain, prefix_of
from .running import Load

if TYPE_CHECKING:
    import torch


@contextmanager
def gathered(call: inspect.BoundArguments, load: Load) -> Iterator[None]:
    """Load whole parameters in ZeRO-3 without an optimizer, where `load_module_state_dict` cannot gather any."""
    engine = load.engine
    can = "fetch_z3_params" in call.signature.parameters or not engine.zero_optimization_partition_weights()
    if can or load.restores_optimizer:
        yield
        return
    whole = {**call.arguments["checkpoint"], "module": merged(load.source, load.tag)}
    checkpoint = cures.with_own_buffers(whole, load.module, engine.module)
    call.arguments["checkpoint"] = renamed(checkpoint, engine.module)
    from deepspeed import zero

    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):  # rank 0's values count
        yield


@contextmanager
def with_fragments(load: Load, checkpoint: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The checkpoint with a fragment for each parameter that is frozen now or was at the save, if it needs any.

    Below ZeRO-3, fragments are second copies, but of what the state dict lacks. DeepSpeed looks up one for each frozen
    parameter, and raises KeyError if there is none: it was left out, or frozen since a full save. Such a parameter gets
    its own value, which the state dict may have set before. What is no longer frozen counts as frozen meanwhile.
    """
    saved = {plain(name): value for name, value in (checkpoint.get("frozen_param_fragments") or {}).items()}
    if saved and not load.engine.zero_optimization_partition_weights():
        in_state = set(map(plain, checkpoint["module"]))
        saved = {name: value for name, value in saved.items() if name not in in_state}
    if not saved:
        yield {**checkpoint, "frozen_param_fragments": None}
        return
    parameters = {names[0]: parameter for parameter, names in load.base.contents.names.items()}
    frozen = {name: p for name, p in parameters.items() if name in saved or not p.requires_grad}
    thawed = [parameter for parameter in frozen.values() if parameter.requires_grad]
    for parameter in thawed:
        parameter.requires_grad_(False)
    try:
        yield {**checkpoint, "frozen_param_fragments": {n: saved.get(n, partition_of(p)) for n, p in frozen.items()}}
    finally:
        for parameter in thawed:
            parameter.requires_grad_(True)


def renamed(checkpoint: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The checkpoint with the names of the module, whatever either of them was wrapped in."""
    prefix = prefix_of(name for name, _ in module.named_parameters())
    names = {
        "module": {plain(name): name for name in module.state_dict()},
        "frozen_param_fragments": {plain(name): name for name, _ in module.named_parameters()},
    }
    for key, now in names.items():
        if values := checkpoint.get(key):
            renamed = {now.get(plain(name), prefix + plain(name)): value for name, value in values.items()}
            if renamed.keys() != values.keys():
                checkpoint = {**checkpoint, key: with_attributes(values, renamed)}
    return checkpoint


def put_from_partitions(load: Load, names: frozenset[str]) -> None:
    """Load the parameters that are only in the partitions of the optimizer, unless DeepSpeed has done so."""
    engine = load.engine
    if not (load.restores_optimizer and engine.zero_optimization_partition_weights()):
        values = {plain(name): value for name, value in merged(load.source, load.tag).items()}
        put(engine.module, {name: value for name, value in values.items() if name in names})


def put(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights into a module's parameters and buffers, by plain name; every rank must call it."""
    import torch
    from deepspeed import zero

    with torch.no_grad():
        for parameter, names in Contents(module).names.items():
            value = next((weights[name] for name in names if name in weights), None)
            if value is not None:
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    if parameter.shape == value.shape:  # a rank that does not gather has an empty one
                        parameter.copy_(value)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if plain(name) in weights:
                buffer.copy_(weights[plain(name)])


def with_fresh_optimizer(load: Load) -> Attributes:
    """Lets the innermost optimizer keep its own state, whatever it is to load; DeepSpeed loads the masters itself."""
    optimizer = inner_optimizer(load.engine)
    warn(
        load.owner,
        "patch(restart_optimizer=True): the state of the optimizer in the checkpoint is not loaded."
        f" {type(optimizer).__name__} starts anew from the checkpoint's master weights, with its learning rates.",
    )

    def load_learning_rates(state: Any) -> None:
        saved = state.get("param_groups") if isinstance(state, Mapping) else None
        if saved is not None and len(saved) == len(optimizer.param_groups):
            for group, before in zip(optimizer.param_groups, saved, strict=True):
                group["lr"] = before.get("lr", group["lr"])

    return [(optimizer, "load_state_dict", load_learning_rates)]

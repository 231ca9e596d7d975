"""The base of a running engine: what is frozen, and still as the program has built it.

A frozen parameter that training changes (an average of the weights, a teacher) or that a checkpoint has replaced is not
part of the base, so it must be saved. It is recognised by a sample of its values, because a write through `.data`
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.collectives import on_any_rank
from ..engine.origins import Origin, changed, origins
from ..engine.topology import is_divided
from ..parameters import BUFFER, PARAMETER, PART, Contents, ModuleTensor
from ..settings import current as settings
from ..workarounds.for_deepspeed import has_plain_optimizer

if TYPE_CHECKING:
    import torch


def frozen(contents: Contents) -> list[ModuleTensor]:
    """What of a module may be its base."""
    leaves_out = settings().leaves_out
    return [held for held in contents.tensors if held.is_frozen or (held.kind == BUFFER and leaves_out(held.names))]


def optimized(engine: Any) -> set[torch.nn.Parameter]:
    """The parameters that the engine's optimizer has."""
    names = ("bit16_groups", "fp16_groups", "bf16_groups")
    zero_groups = next((getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)), None)
    groups = zero_groups or [group["params"] for group in getattr(engine.optimizer, "param_groups", [])]
    return {parameter for group in groups for parameter in group}


def in_partitions(engine: Any) -> set[torch.nn.Parameter]:
    """The parameters whose values are in the files of ZeRO's optimizer."""
    return set() if has_plain_optimizer(engine) else optimized(engine)


def mark_trained(engine: Any) -> None:
    """Remember what the optimizer of a new engine trains, so that it is no base even if it is frozen later.

    In ZeRO stage 0, an optimizer made of all parameters of a module also has those that are frozen from the start.
    """
    trained, known = optimized(engine), origins(engine.module)
    for name, parameter in Contents(engine.module).parameters.items():
        if parameter in trained and parameter.requires_grad:
            known[name].is_trained = True


def to_leave_out(engine: Any, contents: Contents, known: Mapping[str, Origin]) -> list[ModuleTensor]:
    """What a save leaves out of a module's contents, as far as all ranks know; `known` is what `origins` returns."""
    in_optimizer, candidates = optimized(engine), frozen(contents)
    left_out: list[ModuleTensor] = []
    kept_groups = _not_comparable(engine, contents.parameters, candidates)
    for held in candidates:
        is_kept = held.kind != PART and _is_kept(held, known.get(held.group), in_optimizer)
        if is_kept or held.group in kept_groups or settings().keeps(held.names):
            kept_groups.add(held.group)
        else:
            left_out.append(held)
    return left_out


def _not_comparable(engine: Any, parameters: Mapping[str, Any], candidates: Iterable[ModuleTensor]) -> set[str]:
    """The groups of buffers, and of parameters with parts, of which ranks have different shards.

    Only the fingerprint of a plain parameter is made of all its shards.
    """
    others = (held for held in candidates if held.kind != PARAMETER)
    return {held.group for held in others if is_divided(engine, parameters.get(held.group, held.tensor))}


def _is_kept(held: ModuleTensor, origin: Origin | None, in_optimizer: set[torch.nn.Parameter]) -> bool:
    if origin is None or (origin.is_trained and held.tensor in in_optimizer):
        return origin is not None
    return (origin.is_trained or origin.is_changed) and not settings().leaves_out(held.names)


def changed_since_start(known: Mapping[str, Origin], candidates: Iterable[ModuleTensor]) -> set[str]:
    """The groups that training or a checkpoint has changed, as far as this rank has seen."""
    compared = [held for held in candidates if not settings().leaves_out(held.names)]
    suspected = {held.group for held in compared if held.group in known and known[held.group].is_suspected}
    return suspected | changed(known, compared)


def on_all_ranks(changed: set[str], candidates: Sequence[ModuleTensor], device: Any) -> set[str]:
    """The groups that any rank has seen changed; every rank must call it with the same candidates."""
    flags = on_any_rank([held.group in changed for held in candidates], device)
    return {held.group for held, is_changed in zip(candidates, flags, strict=True) if is_changed}

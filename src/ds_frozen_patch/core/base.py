"""The base of a running engine: what is frozen, and still as the program has built it.

A frozen parameter that training changes (an average of the weights, a teacher) or that a checkpoint has replaced is not
part of the base, so it must be saved. It is recognised by a sample of its values, because a write through `.data`
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.collectives import on_any_rank
from ..engine.origins import Origin, changed, origins, remember
from ..engine.served import ServedEngine
from ..engine.topology import is_divided
from ..parameters import BUFFER, PARAMETER, PART, ModuleTensor, contents, parameters_by_name
from ..settings import current as settings
from ..workarounds.for_deepspeed import has_plain_optimizer

if TYPE_CHECKING:
    import torch


def sample_at_start(engine: Any, known: ServedEngine) -> None:
    """Remember the values of the engine's module when training begins."""

    def sample(engine: Any, _: Any) -> None:
        if engine.module.training:
            handle.remove()  # once is enough
            if not known.is_sampled:
                sample_now(engine, known)

    handle = engine.register_forward_pre_hook(sample)
    known.undo.append(lambda _: handle.remove())


def sample_now(engine: Any, known: ServedEngine) -> None:
    """Remember these values as those that training has begun with."""
    known.is_sampled = True
    remember(engine.module)


def frozen(module: torch.nn.Module) -> list[ModuleTensor]:
    """What of a module may be its base."""
    return [
        one for one in contents(module) if one.is_frozen or (one.kind == BUFFER and settings().leaves_out(one.names))
    ]


def optimized(engine: Any) -> set[torch.nn.Parameter]:
    """The parameters that the engine's optimizer has."""
    names = ("bit16_groups", "fp16_groups", "bf16_groups")
    found = next((getattr(engine.optimizer, name) for name in names if hasattr(engine.optimizer, name)), None)
    groups = found or [group["params"] for group in getattr(engine.optimizer, "param_groups", [])]
    return {parameter for group in groups for parameter in group}


def in_partitions(engine: Any) -> set[torch.nn.Parameter]:
    """The parameters whose values are in the files of ZeRO's optimizer."""
    return set() if has_plain_optimizer(engine) else optimized(engine)


def mark_trained(engine: Any) -> None:
    """Remember what the optimizer of a new engine trains, so that it is no base even if it is frozen later.

    In ZeRO stage 0, an optimizer made of all parameters of a module also has those that are frozen from the start.
    """
    trained, known = optimized(engine), origins(engine.module)
    for name, parameter in parameters_by_name(engine.module).items():
        if parameter in trained and parameter.requires_grad:
            known[name].is_trained = True


def to_leave_out(engine: Any, known: Mapping[str, Origin]) -> list[ModuleTensor]:
    """What a save leaves out, as far as all ranks know; `known` is what `origins` returns."""
    own = optimized(engine)
    chosen: list[ModuleTensor] = []
    held = frozen(engine.module)
    kept = _not_comparable(engine, held)
    for one in held:
        is_kept = one.group in kept or (one.kind != PART and _is_kept(one, known.get(one.group), own))
        if is_kept or settings().keeps(one.names):
            kept.add(one.group)
        else:
            chosen.append(one)
    return chosen


def _not_comparable(engine: Any, held: Iterable[ModuleTensor]) -> set[str]:
    """The groups of buffers, and of parameters with parts, of which ranks have different shards.

    Only the fingerprint of a plain parameter is made of all its shards.
    """
    parameters = parameters_by_name(engine.module)
    others = (one for one in held if one.kind != PARAMETER)
    return {one.group for one in others if is_divided(engine, parameters.get(one.group, one.tensor))}


def _is_kept(one: ModuleTensor, origin: Origin | None, optimized: set[torch.nn.Parameter]) -> bool:
    if origin is None:
        return False
    if origin.is_trained and one.tensor in optimized:
        return True
    return (origin.is_trained or origin.is_changed) and not settings().leaves_out(one.names)


def changed_since_start(known: Mapping[str, Origin], candidates: Iterable[ModuleTensor]) -> set[str]:
    """The groups that training or a checkpoint has changed, as far as this rank has seen."""
    compared = [one for one in candidates if not settings().leaves_out(one.names)]
    suspected = {one.group for one in compared if one.group in known and known[one.group].is_suspected}
    return suspected | changed(known, compared)


def on_all_ranks(changed: set[str], candidates: Sequence[ModuleTensor], device: Any) -> set[str]:
    """The groups that any rank has seen changed; every rank must call it with the same candidates."""
    flags = on_any_rank([one.group in changed for one in candidates], device)
    return {one.group for one, is_changed in zip(candidates, flags, strict=True) if is_changed}

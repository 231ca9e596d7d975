"""The base of a running engine: what is frozen, still as the program has built it, and what it can build again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.collectives import on_any_rank
from ..engine.origins import Origin, origins
from ..engine.owner import Owner, warn
from ..engine.topology import is_divided
from ..engine.tuners import built_once, rewritten
from ..internals import optimized
from ..parameters import BUFFER, PARAMETER, PART, Contents, ModuleTensor
from ..settings import current as settings

if TYPE_CHECKING:
    import torch


def frozen(contents: Contents) -> list[ModuleTensor]:
    """What of a module may be its base."""
    entries, leaves_out = contents.tensors, settings().leaves_out
    return [entry for entry in entries if entry.is_frozen or (entry.kind == BUFFER and leaves_out(entry.names))]


def mark_trained(engine: Any) -> None:
    """Remember what the optimizer of a new engine trains, so that it is no base even if it is frozen later.

    In ZeRO stage 0, an optimizer made of all parameters of a module also has those that are frozen from the start.
    """
    trained, origin_of = optimized(engine), origins(engine.module)
    for name, parameter in Contents(engine.module).parameters.items():
        if parameter in trained and parameter.requires_grad:
            origin_of[name].is_trained = True


def mark_built_once(engine: Any, owner: Owner) -> None:
    """Remember what no program builds again: adapters, and a base that PEFT has rewritten at random."""
    origin_of, inits = origins(engine.module), rewritten(engine.module)
    at_random = [name for name in inits if name in origin_of and not origin_of[name].head]
    for name in {*built_once(engine.module), *at_random} & origin_of.keys():
        origin_of[name].is_built_once = True
    if at_random:
        warn(
            owner,
            f"PEFT has rewritten the base at random (init_lora_weights={inits[at_random[0]]!r}), and the program sets"
            " no seed before, so no later run builds it again: checkpoints contain these weights. Set a seed before the"
            " model is built, and they are left out; or name them in patch(leave_out=[...]).",
        )


def to_leave_out(engine: Any, contents: Contents, origin_of: Mapping[str, Origin]) -> list[ModuleTensor]:
    """What a save leaves out of a module's contents, as far as all ranks know; `origin_of` comes from `origins`."""
    in_optimizer, candidates = optimized(engine), frozen(contents)
    left_out: list[ModuleTensor] = []
    kept_groups = _not_comparable(engine, contents.parameters, candidates)
    for entry in candidates:
        is_kept = entry.kind != PART and _is_kept(entry, origin_of.get(entry.group), in_optimizer)
        if is_kept or entry.group in kept_groups or settings().keeps(entry.names):
            kept_groups.add(entry.group)
        else:
            left_out.append(entry)
    return left_out


def _not_comparable(engine: Any, parameters: Mapping[str, Any], candidates: Iterable[ModuleTensor]) -> set[str]:
    """The groups of buffers, and of parameters with parts, of which ranks have different shards.

    Only the fingerprint of a plain parameter is made of all its shards.
    """
    others = (entry for entry in candidates if entry.kind != PARAMETER)
    return {entry.group for entry in others if is_divided(engine, parameters.get(entry.group, entry.tensor))}


def _is_kept(entry: ModuleTensor, origin: Origin | None, in_optimizer: Container[torch.nn.Parameter]) -> bool:
    if origin is None or (origin.is_trained and entry.tensor in in_optimizer):
        return origin is not None
    return (origin.is_trained or origin.is_changed or origin.is_built_once) and not settings().leaves_out(entry.names)


def on_all_ranks(changed: set[str], candidates: Sequence[ModuleTensor], device: Any) -> set[str]:
    """The groups that any rank has seen changed; every rank must call it with the same candidates."""
    flags = on_any_rank([entry.group in changed for entry in candidates], device)
    return {entry.group for entry, is_changed in zip(candidates, flags, strict=True) if is_changed}

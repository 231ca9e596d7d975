"""The base of a running engine: what is frozen, and still as the program has built it.

A frozen parameter that training changes (an average of the weights, a teacher) or that a checkpoint has replaced is not
part of the base, so it must be saved. It is recognised by a sample of its values, because a write through `.data`
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from ..common.collectives import on_any_rank
from ..fingerprint import is_readable, own_values
from ..parameters import BUFFER, PART, Held, contents, names_by_parameter
from ..settings import current as settings
from .attached import Attached, override

if TYPE_CHECKING:
    import torch

SAMPLE = 64
"""How many values of each tensor are compared, evenly spaced from its first to its last."""


def sample_at_start(attached: Attached, engine: Any) -> None:
    """Take a sample when training begins; changes before that are part of how the program builds its base."""
    reference = ref(engine)

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        engine = reference()
        assert engine is not None
        if engine.module.training:
            del engine.forward  # once is enough
            attached.at_start = sample(frozen(engine.module))
        return type(engine).forward(engine, *inputs, **kwargs)

    override(engine, "forward", forward)


def frozen(module: torch.nn.Module) -> list[Held]:
    """What of a module may be its base."""
    return [
        one for one in contents(module) if one.is_frozen or (one.kind == BUFFER and settings().leaves_out(one.names))
    ]


def to_leave_out(attached: Attached, engine: Any) -> list[Held]:
    """What a save leaves out, as far as this rank knows."""
    optimized = _optimized(attached, engine)
    chosen: list[Held] = []
    kept: set[str] = set()
    for one in frozen(engine.module):
        is_kept = one.group in kept if one.kind == PART else one.group in optimized
        is_changed = one.group in attached.changed and not settings().leaves_out(one.names)
        if is_kept or is_changed or settings().keeps(one.names):
            kept.add(one.group)
        else:
            chosen.append(one)
    return chosen


def _optimized(attached: Attached, engine: Any) -> set[str]:
    """The frozen parameters that the optimizer has trained: one that was frozen after training began is not base.

    In ZeRO stage 0, an optimizer made of all parameters of a module also holds those that were frozen from the start.
    """
    groups = next(
        (
            getattr(engine.optimizer, name)
            for name in ("bit16_groups", "fp16_groups", "bf16_groups")
            if hasattr(engine.optimizer, name)
        ),
        [group["params"] for group in getattr(engine.optimizer, "param_groups", [])],
    )
    held = {parameter for group in groups for parameter in group if not parameter.requires_grad}
    if not held:
        return set()  # as a rule, and without a walk through the module
    names = {names[0] for parameter, names in names_by_parameter(engine.module).items() if parameter in held}
    return names if attached.trained is None else names & attached.trained


def changed_since_start(attached: Attached, candidates: Iterable[Held]) -> set[str]:
    """The groups that training or a checkpoint has changed, as far as this rank has seen."""
    compared = [one for one in candidates if not settings().leaves_out(one.names)]
    by_training = differing(attached.at_start, sample(compared)) if attached.at_start else set()
    return (by_training | attached.loaded) & {one.group for one in compared}


def on_all_ranks(changed: set[str], candidates: Sequence[Held], device: Any) -> set[str]:
    """The groups that any rank has seen changed; every rank must call it with the same candidates."""
    flags = on_any_rank([one.group in changed for one in candidates], device)
    return {one.group for one, is_changed in zip(candidates, flags, strict=True) if is_changed}


def differing(before: Mapping[str, tuple[str, bytes]], now: Mapping[str, tuple[str, bytes]]) -> set[str]:
    """The groups whose values differ between two samples."""
    return {group for name, (group, content) in now.items() if name in before and before[name][1] != content}


def sample(held: Iterable[Held]) -> dict[str, tuple[str, bytes]]:
    """The group and some values, as bytes, of each tensor by name; with one transfer for each device."""
    import torch

    picked: dict[torch.device, list[tuple[Held, torch.Tensor]]] = {}
    for one in held:
        if is_readable(one.tensor):
            values = own_values(one.tensor)
            some = values[:: max(len(values) // SAMPLE, 1)].contiguous().view(torch.uint8)
            picked.setdefault(some.device, []).append((one, some))
    found: dict[str, tuple[str, bytes]] = {}
    for ones in picked.values():
        content = torch.cat([some for _, some in ones]).cpu().numpy().tobytes()
        begin = 0
        for one, some in ones:
            found[one.name] = one.group, f"{one.shape}{one.dtype}".encode() + content[begin : begin + len(some)]
            begin += len(some)
    return found

"""Which parameters an engine's optimizer has, and in which order."""

from __future__ import annotations

from typing import Any

from ..parameters import shape_of
from ..workarounds.for_deepspeed import has_plain_optimizer


def plain_groups(engine: Any) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group by name, for an optimizer that is not ZeRO's; empty for others.

    DeepSpeed saves the same as `param_shapes` from ZeRO-1 on.
    """
    if engine.optimizer is None or not has_plain_optimizer(engine):
        return []
    names = engine.param_names
    # In 16 bits, the groups of the wrapped optimizer have the masters.
    groups = getattr(engine.optimizer, "fp16_groups", None) or [g["params"] for g in engine.optimizer.param_groups]
    if not all(parameter in names for group in groups for parameter in group):
        return []
    return [{names[parameter]: tuple(parameter.shape) for parameter in group} for group in groups]


def trained_groups(engine: Any) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group by name, in the optimizer's own order; empty where that is unknown."""
    if has_plain_optimizer(engine):
        return plain_groups(engine)
    optimizer, names = engine.optimizer, engine.param_names
    if hasattr(optimizer, "sub_group_to_group_id"):  # in ZeRO-3
        groups: list[list[Any]] = [[] for _ in optimizer.param_groups]
        for index, sub_group in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[index]] += sub_group
    else:
        groups = optimizer.bit16_groups if hasattr(optimizer, "bit16_groups") else optimizer.bf16_groups
    return [{names[parameter]: shape_of(parameter) for parameter in group} for group in groups]

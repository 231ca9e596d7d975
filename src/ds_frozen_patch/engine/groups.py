"""Which parameters an engine's optimizer has, and in which order."""

from __future__ import annotations

from typing import Any

from ..workarounds.for_deepspeed import has_plain_optimizer


def plain_groups(engine: Any) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group by name, for an optimizer that is not ZeRO's; empty for others.

    DeepSpeed saves the same as `param_shapes` from ZeRO-1 on.
    """
    if engine.optimizer is None or not has_plain_optimizer(engine):
        return []
    names = engine.param_names
    groups = [group["params"] for group in engine.optimizer.param_groups]
    if not all(parameter in names for group in groups for parameter in group):
        return []  # in 16 bits they are flat copies
    return [{names[parameter]: tuple(parameter.shape) for parameter in group} for group in groups]

"""Cures of the faults of Fabric, the part of Lightning that Trainer is built on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..common.overrides import Attributes


def unwrapped(item: Any) -> Any:
    """The optimizer in Fabric's own wrapper, in which the strategy gets it; anything else as it is."""
    return item.optimizer if any(cls.__name__ == "_FabricOptimizer" for cls in type(item).__mro__) else item


def moved_in_deepspeed() -> Attributes:
    """The class that Fabric imports from `deepspeed.runtime`, where it no longer is."""
    runtime, moved = (sys.modules.get(f"deepspeed.runtime{inner}") for inner in ("", ".base_optimizer"))
    if moved is None or hasattr(runtime, "DeepSpeedOptimizer"):
        return []
    return [(runtime, "DeepSpeedOptimizer", moved.DeepSpeedOptimizer)]


CLIPS = (
    "DeepSpeed clips gradients to a norm of 1.0, which nothing has asked for: it is the default since DeepSpeed 0.19.3,"
    ' and Fabric does not change it. Put "gradient_clipping": 0.0 into the config of DeepSpeedStrategy to train without'
    " clipping, as before, or 1.0 to train with it."
)


def clips_unasked(engine: Any, config: Mapping[str, Any]) -> bool:
    """True if an engine clips gradients though its configuration says nothing of that.

    Trainer sets `gradient_clipping` to what it was asked for, or to 0. Fabric leaves it to DeepSpeed.
    """
    return "gradient_clipping" not in config and bool(engine.optimizer) and engine.gradient_clipping() > 0

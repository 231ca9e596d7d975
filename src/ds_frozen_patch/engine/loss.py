"""The factor of an engine's loss, for a run that goes on at another world size."""

from __future__ import annotations

from typing import Any
from weakref import ref

from .attached import Attached, override


def scale_loss(attached: Attached, engine: Any, factor: float) -> None:
    """Multiply every loss by `factor` from now on, instead of by an earlier one; `unpatch()` ends it."""
    attached.loss_factor = factor
    if factor == 1 or "backward" in vars(engine):
        return
    reference = ref(engine)

    def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        engine = reference()
        assert engine is not None
        return type(engine).backward(engine, loss * attached.loss_factor, *args, **kwargs)

    override(engine, "backward", backward)

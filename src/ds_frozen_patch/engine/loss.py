"""The factor of an engine's loss, for a run that goes on at another world size."""

from __future__ import annotations

from typing import Any
from weakref import ref

from .served import ServedEngine


def scale_loss(attached: ServedEngine, engine: Any, factor: float) -> None:
    """Multiply every loss by `factor` from now on, instead of by an earlier one; `unpatch()` ends it.

    What a program has put in the place of `engine.backward`, before or after, gets the loss as it would without this.
    """
    attached.loss_factor = factor
    if factor == 1 or attached.scales_loss:
        return
    attached.scales_loss = True
    reference, others = ref(engine), vars(engine).get("backward")

    def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        engine = reference()
        assert engine is not None
        scaled = loss * attached.loss_factor
        return others(scaled, *args, **kwargs) if others else type(engine).backward(engine, scaled, *args, **kwargs)

    def undo(engine: Any) -> None:
        attached.loss_factor, attached.scales_loss = 1.0, False
        if vars(engine).get("backward") is not backward:
            return  # somebody has wrapped it again: ours stays inside, with a factor of 1
        if others:
            engine.backward = others
        else:
            del engine.backward

    engine.backward = backward
    attached.undo.append(undo)

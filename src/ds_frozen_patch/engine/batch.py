"""How many samples an optimizer step takes, before and after a load, and the factor that makes up for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

from ..internals import config_of, optimizer_ranks
from .served import Owner, ServedEngine, warn


@dataclass(frozen=True)
class Batch:
    """An optimizer step: `ranks` x `size` samples on each, `accumulated` times."""

    ranks: int
    size: int
    accumulated: int

    @property
    def samples(self) -> int:
        """The number of samples of one optimizer step."""
        return self.ranks * self.size * self.accumulated


def batches(engine: Any, state: Mapping[str, Any]) -> tuple[Batch, Batch]:
    """The batch of the run that saved a checkpoint, with a size of 0 if unknown, and that of the engine that loads it.

    Both are read from the configurations, since ZenFlow overwrites the engine's gradient accumulation.

    Args:
        engine: that has loaded.
        state: of the checkpoint, see `Owner.after_load`.
    """
    saved_by = state["record"].trained_world_size or state["dp_world_size"]
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = []
    for config, ranks in ((state["ds_config"], saved_by), (config_of(engine), optimizer_ranks(engine))):
        values = config if isinstance(config, Mapping) else {}  # it may be the path of a file
        samples, size, accumulated = (value if isinstance(value := values.get(key), int) else 0 for key in keys)
        if samples and size:  # two of the three are enough for DeepSpeed
            accumulated = accumulated or samples // (ranks * size)
        found.append(Batch(ranks, size or samples // (ranks * (accumulated or 1)), accumulated or 1))
    before, now = found
    if not now.size:
        size, accumulated = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        now = Batch(now.ranks, int(size), int(accumulated))
    return before, now


def warn_of_another_batch(owner: Owner, before: Batch, now: Batch) -> None:
    """Log a warning if a step takes another number of samples."""
    if before.samples in (0, now.samples):
        return
    warn(
        owner,
        f"Each optimizer step of the saved run took {before.samples} samples ({before.ranks} ranks x batch size"
        f" {before.size} x {before.accumulated} steps of gradient accumulation); now it takes {now.samples}. To"
        " continue as before, keep that product.",
    )


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

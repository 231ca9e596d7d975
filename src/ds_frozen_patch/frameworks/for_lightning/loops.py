"""Trainer's loops after a load: their place in the data, and with another batch the scale of the gradients.

Lightning saves and restores the state of dataloaders that have one, such as torchdata's `StatefulDataLoader`, since
2.2. With any other, it starts again at the first batch of the epoch.

Lightning divides the loss by `accumulate_grad_batches`, and DeepSpeed does so again. As long as that number stays the
same, this cancels out in an optimizer such as Adam; if it changes, the scale of the gradients changes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

from ...common.errors import CheckpointMismatchError
from ...engine.batch import batches, scale_loss, warn_of_another_batch
from ...engine.served import Owner, attach, warn
from . import uses

_STARTS_AGAIN = (
    "The checkpoint was saved within an epoch, after {} batches, and Lightning cannot restore the place of the"
    " dataloader: it starts again at the first batch of the epoch, or shuffles anew. To resume at the next batch, use"
    " torchdata's StatefulDataLoader, and to shuffle its StatefulDistributedSampler, in the run that saves as well"
    " (Lightning 2.2 or newer)."
)


@uses("Trainer", "fit_loop")
@uses("_FitLoop", "epoch_loop")
@uses("_TrainingEpochLoop", "on_run_start")
def restore_loaders_in(trainer: Any, owner: Owner, loops: Any) -> None:
    """Let the first epoch after a load begin at the place in the data where the checkpoint was saved.

    Args:
        trainer: that has loaded, to train.
        owner: of its engine.
        loops: their state in the checkpoint.
    """
    loop = trainer.fit_loop.epoch_loop
    on_run_start = loop.on_run_start
    if isinstance(on_run_start, partial) and on_run_start.func is _begin_epoch:  # of a run that did not get so far
        on_run_start = on_run_start.args[0]
    loop.on_run_start = partial(_begin_epoch, on_run_start, trainer, owner, (loops or {}).get("fit_loop") or {})


@uses("Trainer", "fit_loop")
@uses("_FitLoop", "epoch_loop")
@uses("_TrainingEpochLoop", "on_run_start", "restarting")
def _begin_epoch(
    on_run_start: Callable[[Any], None], trainer: Any, owner: Owner, state: Mapping[str, Any], fetcher: Any
) -> None:
    """`_TrainingEpochLoop.on_run_start` of a run that resumes, once."""
    loop = trainer.fit_loop.epoch_loop
    del loop.on_run_start
    if loop.restarting:
        _restore_loaders(trainer, fetcher, owner, state)
    on_run_start(fetcher)


@uses("Trainer", "num_training_batches")
@uses("the fetcher", "combined_loader?")
@uses("CombinedLoader", "_load_state_dicts?", "flattened?")
def _restore_loaders(trainer: Any, fetcher: Any, owner: Owner, state: Mapping[str, Any]) -> None:
    states = (state.get("state_dict") or {}).get("combined_loader") or []
    count = ((state.get("epoch_loop.batch_progress") or {}).get("current") or {}).get("processed", 0)
    combined: Any = getattr(fetcher, "combined_loader", None)
    if states and hasattr(combined, "_load_state_dicts"):
        # Lightning has restored them before the samplers knew the epoch, which workers need, and not at all if the
        # loaders were made before the load, because `configure_optimizers` has asked for the number of steps.
        combined._load_state_dicts(states)
        iter(fetcher)
    loaders = getattr(combined, "flattened", [])
    is_restored = len(states) == len(loaders) and not any(map(_is_shuffled_anew, loaders))
    if 0 < count < trainer.num_training_batches and not is_restored:
        warn(owner, _STARTS_AGAIN.format(count))


@uses("torchdata's wrapper of a sampler", "_sampler?")
def _is_shuffled_anew(loader: Any) -> bool:
    """Whether Lightning has wrapped the sampler of torchdata's `shuffle=True`, whose state it does not restore."""
    wrapper = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return type(getattr(getattr(wrapper, "dataset", None), "_sampler", None)).__name__ == "RandomSampler"


def resume(owner: Owner, engine: Any, state: Mapping[str, Any], client_state: dict[str, Any]) -> None:
    """Let Trainer continue as it would with the batch of the save: ranks, batch size and accumulation.

    Args:
        owner: of the engine.
        engine: that has loaded.
        state: of the checkpoint, see `Owner.after_load`.
        client_state: what Lightning restores its loops from. Their count of batches is changed.

    Raises:
        CheckpointMismatchError: the checkpoint was saved within an epoch, and its position in the data cannot be found.
    """
    saved_factor = state["record"].loss_factor
    before, now = batches(engine, state)
    if not before.size:
        before = replace(now, ranks=before.ranks)
    if before == now and saved_factor == 1:
        return
    factor = saved_factor * now.accumulated / before.accumulated
    if (served := attach(engine, owner)) is not None:
        scale_loss(served, engine, factor)
    _rescale_batch_count(client_state, Fraction(before.ranks * before.size, now.ranks * now.size))
    warn_of_another_batch(owner, before, now)


def _rescale_batch_count(client_state: dict[str, Any], scale: Fraction) -> None:
    """Convert Lightning's count of this epoch's batches into batches of the ranks that load."""
    loop = (client_state.get("loops") or {}).get("fit_loop") or {}
    progress = loop.get("epoch_loop.batch_progress") or {}
    counts = progress.get("current")
    if not counts or scale == 1:
        return
    ready = counts["ready"] * scale
    if not progress.get("is_last_batch") and ready:
        if ready.denominator != 1:
            raise CheckpointMismatchError(
                f"The checkpoint was saved within an epoch, after {counts['ready']} batches on each rank, which are"
                f" {float(ready):g} batches of this run. Resume at a world size or with a batch size that makes this a"
                " whole number, or from a checkpoint of an epoch's end."
            )
        if (loop.get("state_dict") or {}).get("combined_loader"):
            raise CheckpointMismatchError(
                "The checkpoint was saved within an epoch, and the dataloader of each rank has a state of its own."
                " Resume at the same world size and with the same batch size, or from a checkpoint of an epoch's end."
            )
    shift = ceil(ready) - counts["ready"]
    progress["current"] = {name: count + shift for name, count in counts.items()}

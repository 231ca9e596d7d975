"""Faults of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from .fault import Fault

BEST_CHECKPOINT = Fault(
    "best checkpoint",
    "`load_best_model_at_end` fails, or ranks go back to different checkpoints, if a rank looks for the best one before"
    " rank 0 has made its folder",
    "every rank knows it",
    since="4.50.0",
    mended="5.0.0",
)


def saves_the_best(trainer: Any) -> bool:
    """True if the checkpoint that Trainer saves is the best so far, which not every rank may see."""
    state, strategy = trainer.state, trainer.args.save_strategy
    return strategy in ("steps", "epoch") and getattr(state, "best_global_step", None) == state.global_step

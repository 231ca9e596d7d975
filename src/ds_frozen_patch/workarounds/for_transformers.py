"""Cures of the faults of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any


def saves_the_best(trainer: Any) -> bool:
    """True if the checkpoint that Trainer saves is the best so far, which not every rank may see."""
    state, strategy = trainer.state, trainer.args.save_strategy
    return strategy in ("steps", "epoch") and getattr(state, "best_global_step", None) == state.global_step

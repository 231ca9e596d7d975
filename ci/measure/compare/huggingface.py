"""Hugging Face's Trainer with PEFT and a DeepSpeed config: plain, and under `patch()`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import training
from compare import task
from compare.task import EPOCHS, LEARNING_RATE, MIDDLE, SAMPLES, STEPS, Run, Seen
from peft import PeftModel


def train(run: Run) -> Seen:
    """Train, and evaluate what is in memory then."""
    model = task.model(run)
    trainer = _trainer(run, model)
    with task.disturbed(run):
        trainer.train(resume_from_checkpoint=True if run.last else run.resume)
    seen = task.seen(model, 0.0)  # first: it evaluates by another engine, or none
    return replace(seen, evaluated=trainer.evaluate()["eval_loss"])


def evaluate(run: Run, with_deepspeed: bool = True) -> float:
    """Evaluate the adapter that a checkpoint holds, as PEFT loads it."""
    assert run.resume
    model = PeftModel.from_pretrained(task.base(run.seed), run.resume)
    loss: float = _trainer(run, model, with_deepspeed).evaluate()["eval_loss"]
    return loss


def _trainer(run: Run, model: Any, with_deepspeed: bool = True) -> Any:
    task.patch(run)
    return training.hugging_face(
        model,
        task.tokens(),
        run.out,
        task.settings(run) if with_deepspeed else None,
        per_device_train_batch_size=SAMPLES // run.world_size,
        per_device_eval_batch_size=SAMPLES // run.world_size,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        save_strategy="steps",
        save_steps=STEPS if run.halt or run.last else MIDDLE,
        save_only_model=run.weights_only,
    )

"""Hugging Face's Trainer with PEFT and a DeepSpeed config in `ci/compare.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import compare_run
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from compare_run import EPOCHS, LEARNING_RATE, MIDDLE, SAMPLES, STEPS, Run, Seen
from peft import PeftModel
from transformers import Trainer, TrainingArguments


def train(run: Run) -> Seen:
    """Train, and evaluate what is in memory then."""
    model = compare_run.model(run)
    trainer = _trainer(run, model)
    with compare_run.halting(run):
        trainer.train(resume_from_checkpoint=True if run.last else run.resume)
    seen = compare_run.seen(model, 0.0)  # first: it evaluates by another engine, or none
    return replace(seen, evaluated=trainer.evaluate()["eval_loss"])


def evaluate(run: Run, with_deepspeed: bool = True) -> float:
    """Evaluate the adapter that a checkpoint holds, as PEFT loads it."""
    assert run.resume
    model = PeftModel.from_pretrained(compare_run.base(run.seed), run.resume)
    loss: float = _trainer(run, model, with_deepspeed).evaluate()["eval_loss"]
    return loss


def _trainer(run: Run, model: Any, with_deepspeed: bool = True) -> Trainer:
    # accelerate knows several CPU ranks, and DeepSpeed, but not both at once: it would take each rank for the only one.
    PartialState._prepare_backend = lambda state, *_: ("gloo", DistributedType.MULTI_CPU)
    # What one Trainer has set up would stay for the next one of this process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **compare_run.settings(run)}
    arguments = TrainingArguments(
        run.out,
        deepspeed=config if with_deepspeed else None,
        per_device_train_batch_size=SAMPLES // run.world_size,
        per_device_eval_batch_size=SAMPLES // run.world_size,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        optim="adamw_torch",
        save_strategy="steps",
        save_steps=STEPS if run.halt or run.last else MIDDLE,
        save_only_model=run.weights_only,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not with_deepspeed,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in compare_run.tokens()]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)

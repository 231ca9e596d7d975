"""DeepSpeed alone: a training loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from compare import task
from compare.task import EPOCHS, LEARNING_RATE, SAMPLES, STEPS, Run, Seen


def train(run: Run) -> Seen:
    """Train and save each epoch, and evaluate what is in memory then."""
    engine = _engine(run)
    first = 0
    if run.resume or run.last:
        place = Path(run.resume or "")
        # Without a tag it loads the latest.
        folder, tag = (run.out, None) if run.last else (str(place.parent), place.name)
        path, state = engine.load_checkpoint(folder, tag=tag, load_module_strict=run.strict)
        assert path is not None
        first = state["epoch"]
    with task.halting(run):
        for epoch in range(first, EPOCHS):
            engine.train()
            for batch in _batches(run):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
            _save(run, engine, epoch + 1)
    return task.seen(engine.module, _evaluate(run, engine))


def evaluate(run: Run, optimizer: bool = True) -> float:
    """Evaluate from a checkpoint, by an engine with an optimizer or without."""
    engine = _engine(run, optimizer)
    place = Path(run.resume or "")
    engine.load_checkpoint(
        str(place.parent), tag=place.name, load_module_strict=run.strict, load_optimizer_states=optimizer
    )
    return _evaluate(run, engine)


def _engine(run: Run, optimizer: bool = True) -> Any:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = task.model(run)
    parts: dict[str, Any] = {}
    if optimizer:
        adam = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
        parts = {"optimizer": adam, "lr_scheduler": scheduler}
    config = {**task.settings(run), "train_micro_batch_size_per_gpu": SAMPLES // run.world_size}
    return deepspeed.initialize(model=module, config=config, **parts)[0]


def _batches(run: Run) -> Any:
    """Of each step's samples every rank takes its own."""
    rank = torch.distributed.get_rank()
    return [samples[rank :: run.world_size] for samples in task.tokens().split(SAMPLES)]


def _save(run: Run, engine: Any, epoch: int) -> None:
    if run.weights_only:
        engine.save_16bit_model(f"{run.out}/step{epoch * STEPS}", exclude_frozen_parameters=True)
    else:
        engine.save_checkpoint(
            run.out, tag=f"step{epoch * STEPS}", client_state={"epoch": epoch}, exclude_frozen_parameters=True
        )


def _evaluate(run: Run, engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        losses = torch.stack([engine(input_ids=batch, labels=batch).loss for batch in _batches(run)])
    mean = losses.mean()
    torch.distributed.all_reduce(mean)
    return mean.item() / run.world_size

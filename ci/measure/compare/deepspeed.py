"""DeepSpeed alone, plain and by `serve()`: a training loop of the user's own, which others that need one share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from compare import task
from compare.task import EPOCHS, LEARNING_RATE, SAMPLES, STEPS, Run, Seen

import ds_frozen_patch


class Loop:
    """What the loop asks of DeepSpeed."""

    def __init__(self, run: Run, optimizer: bool = True) -> None:
        self.run, self.epoch = run, 0
        module = task.model(run)
        parts: tuple[Any, ...] = ()
        if optimizer:
            parts = adam(module)
        config = {**task.settings(run), "train_micro_batch_size_per_gpu": SAMPLES // run.world_size}
        task.patch(run)
        self.engine = self.prepare(config, module, *parts)

    def prepare(self, config: dict[str, Any], module: Any, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Return the engine."""
        on_cpu()
        engine = deepspeed.initialize(model=module, config=config, optimizer=optimizer, lr_scheduler=scheduler)[0]
        if self.run.kind == task.OURS:
            ds_frozen_patch.serve(engine)
        return engine

    @property
    def trained(self) -> Any:
        """The model."""
        return self.engine.module

    def step(self, loss: Any) -> None:
        """Take a step of the optimizer."""
        self.engine.backward(loss)
        self.engine.step()

    def save(self) -> None:
        """Save what a resumed run needs."""
        state = {"epoch": self.epoch}
        self.engine.save_checkpoint(self.run.out, tag=self._tag, client_state=state, **task.flag(self.run))

    def save_weights(self) -> None:
        """Save the weights alone; what `serve()` does not change has the flag too."""
        self.engine.save_16bit_model(f"{self.run.out}/{self._tag}", exclude_frozen_parameters=bool(self.run.kind))

    @property
    def _tag(self) -> str:
        return f"step{self.epoch * STEPS}"

    def load(self, place: str | None, **options: Any) -> None:
        """Load a checkpoint, or the latest of this run."""
        # Without a tag it loads the latest.
        folder, tag = (str(Path(place).parent), Path(place).name) if place else (self.run.out, None)
        path, state = self.engine.load_checkpoint(folder, tag=tag, **options)
        assert path is not None
        self.epoch = state["epoch"]

    def evaluate(self) -> float:
        """Return the loss on all data."""
        self.engine.eval()
        with torch.no_grad():
            losses = torch.stack([self.engine(input_ids=batch, labels=batch).loss for batch in self.batches()])
        mean = losses.mean()
        torch.distributed.all_reduce(mean)
        return mean.item() / self.run.world_size

    def batches(self) -> Any:
        """Return an epoch's; of each step's samples every rank takes its own."""
        rank = torch.distributed.get_rank()
        return [samples[rank :: self.run.world_size] for samples in task.tokens().split(SAMPLES)]


def on_cpu() -> None:
    """Have a process group of CPU ranks."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def adam(module: Any) -> tuple[Any, Any]:
    """Return an optimizer of what is trained, and its scheduler."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(run: Run, made: type[Loop] = Loop) -> Seen:
    """Train and save each epoch, and evaluate what is in memory then."""
    loop = made(run)
    if run.resume or run.last:
        loop.load(run.resume, load_module_strict=run.strict)
    with task.disturbed(run):
        while loop.epoch < EPOCHS:
            loop.engine.train()
            for batch in loop.batches():
                loop.step(loop.engine(input_ids=batch, labels=batch).loss)
            loop.epoch += 1
            (loop.save_weights if run.weights_only else loop.save)()
    return task.seen(loop.trained, loop.evaluate())


def evaluate(run: Run, optimizer: bool = True, made: type[Loop] = Loop) -> float:
    """Evaluate from a checkpoint, by an engine with an optimizer or without."""
    loop = made(run, optimizer)
    loop.load(run.resume, load_module_strict=run.strict, load_optimizer_states=optimizer)
    return loop.evaluate()

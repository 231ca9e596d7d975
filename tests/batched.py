"""Small runs that say which samples each rank has seen, interrupted at a step and resumed there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import runs
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from under_test import ModelCheckpoint, pl

import ds_frozen_patch

SAMPLES = 48
EPOCHS = 3


class Numbers(Dataset[Any]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Numbers()[index] for index in range(SAMPLES))


class Stateful(DataLoader[Any]):
    """A loader with a state of its own, over a fixed order."""

    done = skipped = 0

    def __iter__(self) -> Any:
        self.done, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.done:
                self.done += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["done"]


class Lazy(DataLoader[Any]):
    """A loader that begins to iterate when the first batch is asked for."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Run(pl.LightningModule):
    """A frozen and a trained layer, and the samples that it has seen."""

    def __init__(self, asks_for_steps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.head = torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.Linear(8, 3)
        self.asks_for_steps = asks_for_steps
        self.samples: list[list[int]] = []
        self.is_last: list[bool] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.samples.append(batch[0].tolist())
        self.is_last.append(self.trainer.is_last_batch)
        loss: torch.Tensor = self.head(self.base(batch[1])).square().mean()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


def loader(order: str, size: int, workers: int = 0, persistent: bool = False) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    if order == "own":
        sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(7))
        return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, size, False), **options)
    if order == "stream":
        return DataLoader(Stream(), batch_size=size, **options)
    if order in ("stateful", "lazy"):
        return {"stateful": Stateful, "lazy": Lazy}[order](Numbers(), batch_size=size, **options)
    return DataLoader(Numbers(), batch_size=size, shuffle=order != "fixed", **options)


def fit(
    out: str,
    step: int,
    world_size: int,
    order: str,
    *,
    resume: str | None = None,
    size: int = 2,
    accumulate: int = 1,
    workers: int = 0,
    persistent: bool = False,
    validate: bool = False,
    asks_for_steps: bool = False,
    option: bool = True,
    stage: int = 2,
) -> dict[str, Any]:
    """What a run saw, said and trained; it saves a checkpoint at each multiple of `step`."""
    ds_frozen_patch.patch(resume_batches=option, elastic=True)
    saves = ModelCheckpoint(out, filename="{step}", save_top_k=-1, every_n_train_steps=step)
    # Lightning gives each loader a DistributedSampler, unless it is told not to.
    own_samplers = {"use_distributed_sampler": False} if order in ("global", "own") else {}
    trainer = runs.trainer(
        out,
        world_size,
        stage,
        epochs=EPOCHS,
        precision="32-true",
        callbacks=[saves],
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        **({"val_check_interval": 3} if validate else {"limit_val_batches": 0}),
        **own_samplers,
    )
    module = Run(asks_for_steps)
    torch.manual_seed(3 if resume else 2)
    with runs.heard() as said:
        trainer.fit(module, loader(order, size, workers, persistent), loader("fixed", 8), ckpt_path=resume)
    return {
        "samples": module.samples,
        "is_last": module.is_last,
        "state": runs.trained_state(module),
        "ended": [trainer.global_step, trainer.current_epoch],
        "said": [message for message in said if "within an epoch" in message and "ds_frozen" not in message],
    }


def whole_and_resumed(out: str, steps: list[int], world_size: int, order: str, **options: Any) -> list[dict[str, Any]]:
    """The results of an uninterrupted run, and of runs that go on from its checkpoints of these steps."""
    found = [fit(f"{out}/whole", math.gcd(*steps), world_size, order, **options)]
    for step in steps:
        checkpoint = f"{out}/whole/step={step}.ckpt"
        found.append(fit(f"{out}/more", 10**6, world_size, order, resume=checkpoint, **options))
    return found


def in_processes(world_size: int, out: Path, **options: Any) -> list[list[dict[str, Any]]]:
    """`whole_and_resumed` in processes that may have children, which those of the fixture `ranks` may not."""
    port = forked.free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    common |= {"NODE_RANK": 0, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = json.dumps({"out": str(out), "world_size": world_size, **options})
    processes = []
    for rank in range(world_size):
        environment = common | {"RANK": rank, "LOCAL_RANK": rank}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", "import sys, warm, batched; batched.main(sys.argv[1])", arguments],
                env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            )
        )
    assert [process.wait() for process in processes] == [0] * world_size
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)]


def assert_goes_on(whole: dict[str, Any], resumed: dict[str, Any], batches: int) -> None:
    for kind in ("samples", "is_last"):
        assert resumed[kind] == whole[kind][batches:]
    assert (resumed["state"], resumed["ended"]) == (whole["state"], whole["ended"])


def main(arguments: str) -> None:
    """What each of the processes runs."""
    given = json.loads(arguments)
    Path(given["out"], f"{os.environ['RANK']}.json").write_text(json.dumps(whole_and_resumed(**given)))

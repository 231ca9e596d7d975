"""Promise 28: with a dataloader that has state, a run that was saved within an epoch resumes at the next batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import ModelCheckpoint, pl
from kit.processes import free_port
from torch.utils.data import DataLoader, Dataset

import ds_frozen_patch

pytestmark = [pytest.mark.promise(28), pytest.mark.everyday]

SAMPLES = 48
EPOCHS = 3


class Numbers(Dataset[Any]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


class Run(pl.LightningModule):
    """A frozen and a trained layer, and the samples that it has seen."""

    def __init__(self, kind: str, asks_for_steps: bool, workers: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.head = torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.Linear(8, 3)
        self.kind, self.asks_for_steps, self.workers = kind, asks_for_steps, workers
        self.samples: list[list[int]] = []

    def train_dataloader(self) -> Any:
        if self.kind == "plain":
            return DataLoader(Numbers(), batch_size=2, shuffle=True, **self.workers)
        # Not at the top: every cell imports this module to collect its tests, and few have torchdata.
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        if self.kind == "stateful":
            replicas, rank = self.trainer.world_size, self.trainer.global_rank
            sampler = StatefulDistributedSampler(Numbers(), num_replicas=replicas, rank=rank)
            return StatefulDataLoader(Numbers(), batch_size=2, sampler=sampler, **self.workers)
        return StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, **self.workers)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.samples.append(batch[0].tolist())
        loss: torch.Tensor = self.head(self.base(batch[1])).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        if self.asks_for_steps:  # as for a learning rate that decays to its end
            assert self.trainer.estimated_stepping_batches == EPOCHS * SAMPLES // 2 // self.trainer.world_size
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


def fit(
    out: str,
    world_size: int,
    *,
    step: int | None = None,
    resume: int | None = None,
    stage: int = 2,
    kind: str = "stateful",
    workers: dict[str, Any] | None = None,
    asks_for_steps: bool = False,
) -> dict[str, Any]:
    """What a run saw, trained and logged. It saves after `step` steps, or resumes from the checkpoint of that step."""
    ds_frozen_patch.patch()
    saves = ModelCheckpoint(out, filename="{step}", save_top_k=-1, every_n_train_steps=step or 10**6)
    options: dict[str, Any] = {"use_distributed_sampler": False} if kind == "own shuffle" else {}
    trainer = runs.trainer(out, world_size, stage, epochs=EPOCHS, precision="32-true", callbacks=[saves], **options)
    module = Run(kind, asks_for_steps, workers or {})
    torch.manual_seed(3 if resume else 2)
    with runs.heard() as said:
        trainer.fit(module, ckpt_path=f"{out}/step={resume}.ckpt" if resume else None)
    return {
        "samples": module.samples,
        "state": runs.trained_state(module),
        "ended": [trainer.global_step, trainer.current_epoch],
        "said": [message for message in said if "StatefulDataLoader" in message],
    }


def whole_and_resumed(step: int, **options: Any) -> list[dict[str, Any]]:
    """The results of an uninterrupted run, and of a run that resumes from its checkpoint of this step."""
    return [fit(step=step, **options), fit(resume=step, **options)]


def assert_resumed(whole: dict[str, Any], resumed: dict[str, Any], step: int) -> None:
    assert whole["said"] == resumed["said"] == []
    assert resumed["samples"] == whole["samples"][step:]
    assert (resumed["state"], resumed["ended"]) == (whole["state"], whole["ended"])


@pytest.mark.parametrize(
    ("world_size", "step", "options"),
    [
        (1, 5, {}),
        (1, 29, {"kind": "own shuffle", "asks_for_steps": True}),
        (2, 7, {"stage": 3}),
        (2, 19, {"asks_for_steps": True}),
    ],
)
def test_resumes_at_the_next_batch(
    ranks: Any, tmp_path: Path, world_size: int, step: int, options: dict[str, Any]
) -> None:
    arguments = {"out": str(tmp_path), "world_size": world_size, "step": step, **options}
    for whole, resumed in ranks(world_size, whole_and_resumed, **arguments):
        assert_resumed(whole, resumed, step)


@pytest.mark.parametrize(("world_size", "step", "persistent"), [(1, 29, True), (2, 19, False)])
def test_resumes_with_workers(tmp_path: Path, world_size: int, step: int, persistent: bool) -> None:
    workers = {"num_workers": 2, "persistent_workers": persistent}
    for whole, resumed in in_processes(world_size, tmp_path, step=step, workers=workers):
        assert_resumed(whole, resumed, step)


def in_processes(world_size: int, out: Path, **options: Any) -> list[list[dict[str, Any]]]:
    """`whole_and_resumed` in processes that may have children, which those of the fixture `ranks` may not."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": world_size}
    common |= {"LOCAL_SIZE": world_size, "NODE_RANK": 0, "DS_ACCELERATOR": "cpu"}
    program = "import sys, kit.warm, test_batches; test_batches.main(sys.argv[1])"
    arguments = json.dumps({"out": str(out), "world_size": world_size, **options})
    processes = []
    for rank in range(world_size):
        environment = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        processes.append(
            subprocess.Popen([sys.executable, "-c", program, arguments], env={**os.environ, **environment})
        )
    assert [process.wait() for process in processes] == [0] * world_size
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world_size)]


def main(arguments: str) -> None:
    """What each of the processes runs."""
    options = json.loads(arguments)
    Path(options["out"], f"{os.environ['RANK']}.json").write_text(json.dumps(whole_and_resumed(**options)))


def resumed_without_state(out: str) -> list[list[str]]:
    """What is logged by resumes that Lightning cannot begin at the next batch, and by one from an epoch's end."""
    said = []
    for saved, resumed in (("plain", "plain"), ("plain", "stateful"), ("shuffled", "shuffled")):
        fit(f"{out}/{saved}", 1, step=12, kind=saved)
        said.append(fit(f"{out}/{saved}", 1, resume=12, kind=resumed)["said"])
    return [*said, fit(f"{out}/shuffled", 1, resume=24, kind="shuffled")["said"]]


def test_warns_that_an_epoch_starts_again(ranks: Any, tmp_path: Path) -> None:
    ((*within, at_its_end),) = ranks(1, resumed_without_state, out=str(tmp_path))
    assert len(within) == 3
    for said in within:
        (message,) = said
        assert "saved within an epoch, after 12 batches" in message
        assert "use torchdata's StatefulDataLoader" in message
    assert at_its_end == []

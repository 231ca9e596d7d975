"""torch's FSDP2 and its distributed checkpoints (DCP), in the training loop of `compare.deepspeed`."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import sharded
import torch
from compare import deepspeed, task
from compare.task import EPOCHS, Run
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save


class Writer(FileSystemWriter):
    """Writes slowly, or keeps what a kill half-way through the second save would leave, if the run asks for that."""

    def __init__(self, path: str, run: Run, epoch: int) -> None:
        super().__init__(path)
        self.run, self.epoch = run, epoch

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's file."""
        results = super().write_data(*args, **kwargs)
        if self.run.slow:
            files = Path(self.path).glob(f"__{torch.distributed.get_rank()}_*")
            task.wait_for_disk(sum(file.stat().st_size for file in files))
        return results

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Write the metadata, on rank 0."""
        if self.run.halt and self.epoch == EPOCHS:
            shutil.copytree(self.run.out, task.left(self.run))
            (file,) = Path(task.left(self.run), Path(self.path).name).glob("__0_*")
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        super().finish(*args, **kwargs)


class Loop(deepspeed.Loop):
    """What the loop asks of FSDP2; each checkpoint has a folder, and the last is the newest one with metadata."""

    def __init__(self, run: Run, optimizer: bool = True) -> None:
        deepspeed.on_cpu()
        self.run, self.epoch = run, 0
        self.writing: Any = None
        self.engine = sharded.shard(task.model(run), run.stage)  # first: it replaces the parameters
        self.adam: Any = None
        self.scheduler: Any = None
        if optimizer:
            self.adam, self.scheduler = deepspeed.adam(self.engine)
        self.group = torch.distributed.new_group(backend="gloo")  # for what happens beside the training

    @property
    def trained(self) -> Any:
        return self.engine

    def step(self, loss: Any) -> None:
        loss.backward()
        self.adam.step()
        self.scheduler.step()
        self.adam.zero_grad()

    def _state(self, adam: Any) -> dict[str, Any]:
        return sharded.state(self.engine, adam, without_frozen=self.run.kind == task.FLAG)

    def save(self) -> None:
        state = {**self._state(self.adam), "scheduler": self.scheduler.state_dict(), "epoch": self.epoch}
        writer = Writer(f"{self.run.out}/{self._tag}", self.run, self.epoch)
        if not self.run.slow:
            save(state, storage_writer=writer)
            return
        self._wait()
        self.writing = async_save(state, storage_writer=writer, process_group=self.group)

    def _wait(self) -> None:
        if self.writing is not None:
            self.writing.result()

    def save_weights(self) -> None:
        """Save the weights alone."""
        save(self._state(None), checkpoint_id=f"{self.run.out}/{self._tag}")

    def load(self, place: str | None, **options: Any) -> None:
        folder = place or max(str(file.parent) for file in Path(self.run.out).glob(f"*/{sharded.METADATA}"))
        state = self._state(self.adam)
        if self.adam is not None:
            state |= {"scheduler": self.scheduler.state_dict(), "epoch": 0}
        load(state, checkpoint_id=folder)
        sharded.take(self.engine, self.adam, state, self.run.kind == task.FLAG, self.run.strict)
        if self.adam is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self.epoch = state["epoch"]

    def evaluate(self) -> float:
        self._wait()
        return super().evaluate()


def consolidate(run: Run, folder: str, target: str) -> dict[str, str]:
    """Run DCP's converter; returns a digest of each tensor in its file."""
    dcp_to_torch_save(folder, target)
    weights = torch.load(target, weights_only=False)["model"]
    return {name: task.digest(value) for name, value in weights.items()}


train = partial(deepspeed.train, made=Loop)
evaluate = partial(deepspeed.evaluate, optimizer=False, made=Loop)

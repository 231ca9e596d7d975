"""How each system makes the run, inside a rank: Lightning, FSDP2, and the owners of `tests/kit/owners.py`."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
import training
from accelerate.utils import ProjectConfiguration
from compare.task import EPOCHS, FLAG, MIDDLE, OURS, STEPS, Run, Seen, digest
from kit import owners
from kit.owners import SAMPLES
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import ds_frozen_patch
from ds_frozen_patch.publish.notes import notes

METADATA = ".metadata"  # which DCP writes last


class Base(owners.Counting):  # type: ignore[no-untyped-call]
    """A Llama with tied embeddings that counts its steps in a persistent buffer, and records when they begin."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 256, 512, 8192)
        self.times: list[float] = []

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        if self.training:
            self.times.append(time.monotonic())
        return super().forward(input_ids=input_ids, labels=labels)


def model(run: Run) -> Any:
    """Return the base with LoRA adapters."""
    config = LoraConfig(r=64, lora_alpha=16, target_modules=list(run.targets), init_lora_weights=False)
    return get_peft_model(Base(run.seed), config)


def flag(run: Run) -> dict[str, Any]:
    """Return the argument that is DeepSpeed's own flag, if this system sets it."""
    return {"exclude_frozen_parameters": True} if run.kind == FLAG else {}


class Owned(owners.Run):
    """Trainer, Accelerate, or DeepSpeed alone."""

    def __init__(self, run: Run, module: Any = None) -> None:
        self.of, by = run, "deepspeed" if run.owner.startswith("FSDP2") else run.owner.lower()
        options: dict[str, Any] = {} if run.owner.startswith("FSDP2") else flag(run)
        if by == "trainer":
            steps = STEPS if run.halt or run.last or run.asynchronous else MIDDLE
            options = {"save_strategy": "steps", "save_steps": steps, "save_only_model": run.weights_only}
        if by == "accelerate":
            options["accelerator"] = {"project_config": ProjectConfiguration(run.out, automatic_checkpoint_naming=True)}
        config = {"checkpoint": {"load_universal": True}} if run.universal else {}
        given = {"module": module or model(run), "config": config}
        super().__init__(by, run.out, run.world_size, run.stage, **given, **options)

    def fit(self) -> None:
        """Train from the start, or from a checkpoint."""
        if self.by == "trainer":
            self.trainer.train(resume_from_checkpoint=True if self.of.last else self.of.resume)
            return
        if self.of.resume or self.of.last:
            self.load(Path(self.of.resume) if self.of.resume else None, load_module_strict=self.of.strict)
        for epoch in range(self.first, EPOCHS):
            self.train_epoch()
            (self.save_weights if self.of.weights_only else self.save)(self.at(epoch), epoch)

    def at(self, epoch: int, out: str | None = None) -> Path:
        """Return where an epoch is saved, which Accelerate names itself."""
        return Path(self.out, f"checkpoints/checkpoint_{epoch}" if self.by == "accelerate" else f"epoch{epoch}")

    def save(self, place: Path, epoch: int = 0) -> None:
        """Save what a resumed run needs."""
        if self.by == "accelerate":
            self.accelerator.save_state(**self.options)
        else:
            super().save(place, epoch)

    def load(self, place: Path | None, **options: Any) -> None:
        """Load a checkpoint, or what the owner finds to be the last one."""
        if self.by == "accelerate":
            self.accelerator.load_state(place and str(place), **options)
            self.first = self.scheduler.scheduler.last_epoch // STEPS
            self.accelerator.project_configuration.iteration = self.first
        else:
            super().load(place or Path(self.out, Path(self.out, "latest").read_text()), **options)

    def save_weights(self, place: Path, epoch: int = 0) -> None:
        """Save the weights alone, as the owner's documentation says."""
        if self.by == "deepspeed":
            # What `serve()` does not change has the flag too.
            self.engine.save_16bit_model(str(place), exclude_frozen_parameters=bool(self.of.kind))
            return
        weights, main = self.accelerator.get_state_dict(self.engine), self.accelerator.is_main_process
        self.accelerator.unwrap_model(self.engine).save_pretrained(place, state_dict=weights, is_main_process=main)

    def evaluate(self) -> float:
        """Return the loss on all data."""
        if self.by == "trainer":
            loss: float = self.trainer.evaluate()["eval_loss"]
            return loss
        self.engine.eval()
        with torch.no_grad():
            mean = torch.stack([self.engine(input_ids=rows, labels=rows).loss for rows in self._batches()]).mean()
        torch.distributed.all_reduce(mean)
        return mean.item() / self.world_size

    def evaluate_from(self, place: str) -> float:
        """Return the loss from a checkpoint; Trainer's has an adapter, which PEFT loads."""
        if self.by == "trainer":
            adapted = PeftModel.from_pretrained(Base(self.of.seed), place)
            return Owned(self.of, adapted).evaluate()
        self.load(Path(place), load_module_strict=self.of.strict)
        return self.evaluate()


class Sharded(Owned):
    """torch's FSDP2 and its distributed checkpoints (DCP)."""

    def _alone(self) -> None:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        self.engine = training.shard(self.module, self.stage)  # before the optimizer: it replaces the parameters
        self.adam, self.scheduler = self._optimizer()
        self.group = torch.distributed.new_group(backend="gloo")  # for what happens beside the training
        self.writing: Any = None

    def train_epoch(self) -> None:
        self.engine.train()
        for batch in self._batches():
            self.engine(input_ids=batch, labels=batch).loss.backward()
            self.adam.step()
            self.scheduler.step()
            self.adam.zero_grad()

    def _state(self, epoch: int) -> dict[str, Any]:
        state = training.sharded_state(self.engine, self.adam, without_frozen=self.of.kind == FLAG)
        return {**state, "scheduler": self.scheduler.state_dict(), "epoch": epoch}

    def save(self, place: Path, epoch: int = 0) -> None:
        if not self.of.asynchronous:
            save(self._state(epoch + 1), checkpoint_id=place)
            if self.of.halt and epoch and torch.distributed.get_rank() == 0:  # as `halting` does with torch.save
                shutil.copytree(self.out, self.of.left)
                left = Path(self.of.left, place.name)
                (left / METADATA).unlink()  # it is written last
                os.truncate(left / "__0_0.distcp", (left / "__0_0.distcp").stat().st_size // 2)
            return
        if self.writing is not None:
            self.writing.result()
        self.writing = async_save(self._state(epoch + 1), checkpoint_id=place, process_group=self.group)

    def save_weights(self, place: Path, epoch: int = 0) -> None:
        save(training.sharded_state(self.engine, None, self.of.kind == FLAG), checkpoint_id=place)

    def load(self, place: Path | None, **options: Any) -> None:
        state = self._state(0)
        load(state, checkpoint_id=place or max(file.parent for file in Path(self.out).glob(f"*/{METADATA}")))
        training.take(self.engine, self.adam, state, self.of.kind == FLAG, self.of.strict)
        self.scheduler.load_state_dict(state["scheduler"])
        self.first = state["epoch"]

    def evaluate(self) -> float:
        if self.writing is not None:
            self.writing.result()
        return super().evaluate()


class ByLightning(pl.LightningModule):
    """Lightning's Trainer, and the module that it trains."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.of, self.module = run, model(run)
        self.strict_loading = run.strict
        if run.halt or run.last:
            saving: list[Any] = [ModelCheckpoint(run.out, filename="last", enable_version_counter=False)]
        else:
            ends = ModelCheckpoint(run.out, filename="{epoch}", save_top_k=-1, save_weights_only=run.weights_only)
            middle = ModelCheckpoint(run.out, filename="{step}", every_n_train_steps=MIDDLE, save_top_k=-1)
            saving = [ends] if run.asynchronous else [ends, middle]
        universal = {"checkpoint": {"load_universal": True}} if run.universal else {}
        config = {**training.settings(run.stage), **universal}
        self.by = pl.Trainer(
            accelerator="cpu", devices=run.world_size, strategy=DeepSpeedStrategy(config=config, **flag(run)),
            precision="32-true", max_epochs=EPOCHS, default_root_dir=run.out, callbacks=saving, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        self.data = torch.utils.data.DataLoader(owners.tokens(), batch_size=SAMPLES // run.world_size)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.module(input_ids=batch, labels=batch).loss

    def test_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.module(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
        return {"optimizer": adam, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def fit(self) -> None:
        """Train from the start, or from a checkpoint."""
        self.by.fit(self, self.data, ckpt_path=f"{self.of.out}/last.ckpt" if self.of.last else self.of.resume)

    def evaluate(self) -> float:
        """Return the loss on all data."""
        return self.by.test(self, self.data, verbose=False)[0]["loss"]

    def evaluate_from(self, place: str) -> float:
        """Return the loss from a checkpoint."""
        return self.by.test(self, self.data, ckpt_path=place, verbose=False)[0]["loss"]


def begin(run: Run) -> Any:
    """Return a run that can train or evaluate."""
    if run.kind == OURS:
        # elastic only matters where the number of ranks has changed.
        ds_frozen_patch.patch(elastic=True, export="peft" if run.export else None, async_save=run.asynchronous)
    kinds = {"Lightning": ByLightning, "FSDP2 and DCP": Sharded}
    return kinds.get(run.owner, Owned)(run)


def train(run: Run) -> Seen:
    """Train and save each epoch, and evaluate what is in memory then."""
    made = begin(run)
    trained = made.module
    base = trained.base_model.model
    with halting(run, base.losses), ds_frozen_patch.no_wait():  # it reads what it has saved only once it has ended
        made.fit()
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        values = {name: digest(value) for name, value in trained.named_parameters() if value.requires_grad}
        trainable, frozen = (
            sum(value.numel() for value in trained.parameters() if value.requires_grad == wanted)
            for wanted in (True, False)
        )
    # The evaluation comes last: Trainer does it by another engine, or none.
    return Seen([*base.losses], [*base.times], values, int(base.count), trainable, frozen, made.evaluate())


def evaluate(run: Run) -> float:
    """Evaluate from a checkpoint."""
    assert run.resume
    result: float = begin(run).evaluate_from(run.resume)
    return result


@contextmanager
def halting(run: Run, losses: Sequence[float]) -> Iterator[None]:
    """Half-way through the model's file of the last save, copy what is on disk, if the run asks for it.

    That is what a kill at this moment would leave, of this rank's files and the others'.
    """
    write = torch.save

    def halt(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        name = str(file)
        is_second = len(losses) == EPOCHS * STEPS and "mp_rank_00_model_states.pt" in name  # ours has a hidden name
        if run.halt and is_second and not Path(run.left).exists():
            whole = io.BytesIO()
            write(value, whole, *args, **kwargs)
            Path(name).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
            shutil.copytree(run.out, run.left)
            for folder, _, _ in os.walk(run.left):
                for path, note in notes(Path(folder)).items():
                    replace(note, started="").write(path)  # this process goes on, and a killed one would not
        write(value, file, *args, **kwargs)

    torch.save = halt  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = write

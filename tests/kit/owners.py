"""The same run by everyone who may own an engine but Lightning: DeepSpeed alone, Accelerate, and Trainer; and writes
that fail, or take long. Everything here runs inside a rank.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import training
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, TrainingArguments

import ds_frozen_patch
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.save.writer import Recorder
from ds_frozen_patch.testing import adapt_deepspeed
from kit import runs

OWNERS = ("deepspeed", "accelerate", "trainer")
SAMPLES = 8  # of an optimizer step, of all ranks
STEPS = 4  # in an epoch
PEFT, BY_HAND, ONE_MORE = "peft", "by hand", "peft, and a buffer more"
LARGE = "by hand, with an embedding of 14 million parameters"


class Counting(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A small Llama that counts its steps in a persistent buffer and records their losses."""

    count: Any

    def __init__(self, seed: int, *sizes: int) -> None:
        torch.manual_seed(seed)
        hidden, intermediate, vocabulary = sizes or (64, 64, runs.VOCABULARY)
        super().__init__(training.llama_config(hidden, intermediate, layers=2, vocabulary=vocabulary, tied=True))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        given = super().forward(input_ids=input_ids, labels=labels)
        if self.training:
            self.count += 1
            self.losses.append(given.loss.item())
        return given


def model(kind: str, seed: int) -> Any:
    base: Any = Counting(seed, *((256, 1024, 55_000) if kind == LARGE else ()))
    if kind == ONE_MORE:
        base.register_buffer("extra", torch.zeros(3))
    if kind not in (BY_HAND, LARGE):
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(base, lora)
    for name, parameter in base.named_parameters():
        parameter.requires_grad = "layers.1.mlp" in name
    return base


def trained(module: Any) -> list[str]:
    """The names that a checkpoint must have: what is trained, and the buffer."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return sorted([*names, *(name for name, _ in module.named_buffers() if name.endswith("count"))])


def tokens() -> Any:
    return torch.randint(runs.VOCABULARY, (STEPS * SAMPLES, 8), generator=torch.Generator().manual_seed(0))


class Run:
    """A run that saves each epoch; `at(epoch)` is where.

    Args:
        by: one of `OWNERS`.
        config: more of DeepSpeed's configuration.
        module: by default a new one.
        options: of the owner's save, or of `TrainingArguments`.
    """

    def __init__(
        self,
        by: str,
        out: str,
        world_size: int,
        stage: int,
        kind: str = PEFT,
        seed: int = 1,
        config: dict[str, Any] | None = None,
        module: Any = None,
        **options: Any,
    ) -> None:
        self.by, self.out, self.world_size, self.stage, self.options = by, out, world_size, stage, options
        self.config = config or {}
        self.module = module or model(kind, seed)
        self.engine: Any = None
        self.first = 0
        {"deepspeed": self._alone, "accelerate": self._accelerate, "trainer": self._trainer}[by]()

    # What each owner does

    def _alone(self) -> None:
        adapt_deepspeed()  # else a program killed while DeepSpeed builds an op leaves a lock
        deepspeed.init_distributed("gloo" if training.is_cpu_rank() else "nccl", auto_mpi_discovery=False)
        config = {**self._config(), "train_micro_batch_size_per_gpu": SAMPLES // self.world_size}
        adam, scheduler = self._optimizer()
        if self.options.pop("as_file", False):
            file = Path(self.out, f"ds_config-{torch.distributed.get_rank()}.json")  # a rank must not read half a file
            file.write_text(json.dumps(config))
            config = str(file)  # type: ignore[assignment]
        self.engine = deepspeed.initialize(model=self.module, config=config, optimizer=adam, lr_scheduler=scheduler)[0]

    def _accelerate(self) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin

        training.on_cpu_ranks()
        config = {**self._config(), "train_micro_batch_size_per_gpu": SAMPLES // self.world_size}
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        # Else the scheduler makes as many steps as there are ranks.
        options = {"step_scheduler_with_optimizer": False, **self.options.pop("accelerator", {})}
        self.accelerator = Accelerator(deepspeed_plugin=plugin, **options)
        self.engine, self.adam, self.scheduler = self.accelerator.prepare(self.module, *self._optimizer())

    def _trainer(self) -> None:
        # transformers 4 resumes with the batch size of the checkpoint: the accumulation has to follow the ranks.
        each = SAMPLES // (2 if transformers.__version__.startswith("4.") else self.world_size)
        config = {**self._config(), "gradient_accumulation_steps": "auto"}
        options = {"save_strategy": "epoch", "num_train_epochs": 2, "learning_rate": 1e-2, **self.options}
        options["gradient_accumulation_steps"] = SAMPLES // (each * self.world_size)
        options["label_names"] = ["labels"]  # older releases do not see them in a PeftModel
        if "eval_strategy" in options and not hasattr(TrainingArguments, "eval_strategy"):
            options["evaluation_strategy"] = options.pop("eval_strategy")
        self.trainer = training.hugging_face(
            self.module, tokens(), self.out, config, per_device_train_batch_size=each,
            per_device_eval_batch_size=each, **options,
        )  # fmt: skip

    def _config(self) -> dict[str, Any]:
        more = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        zero = {"zero_optimization": {"stage": 0}}  # Accelerate wants that section
        made = {**zero, **runs.config(self.stage, **(more if self.stage == 3 else {}))}
        made["zero_optimization"].update(self.config.get("zero_optimization", {}))
        return {**made, **{name: value for name, value in self.config.items() if name != "zero_optimization"}}

    def _optimizer(self) -> Any:
        adam = torch.optim.AdamW([p for p in self.module.parameters() if p.requires_grad], lr=1e-2)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))

    # What a test asks for

    def at(self, epoch: int, out: str | None = None) -> Path:
        """The folder of the checkpoint of an epoch, counted from 0."""
        by_trainer = self.by == "trainer"
        return Path(out or self.out, f"checkpoint-{STEPS * (epoch + 1)}" if by_trainer else f"epoch{epoch}")

    def load(self, place: Path, **options: Any) -> None:
        """For the owners that load by a call of their own."""
        if self.by == "deepspeed":
            _, state = self.engine.load_checkpoint(str(place.parent), tag=place.name, **options)
            self.first = state["epoch"]
        else:
            self.accelerator.load_state(str(place), **options)
            self.first = int(place.name.removeprefix("epoch")) + 1

    def train(self, resume: Any = None, epochs: int = 2) -> Any:
        """The losses, and digests of all parameters and buffers at the end."""
        if self.by == "trainer":
            self.trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
            return self.seen()
        if resume:
            self.load(resume)
        for epoch in range(self.first, epochs):
            self.train_epoch()
            self.save(self.at(epoch), epoch)
        return self.seen()

    def train_epoch(self) -> None:
        self.engine.train()
        for batch in self._batches():
            loss = self.engine(input_ids=batch, labels=batch).loss
            if self.by == "deepspeed":
                self.engine.backward(loss)
                self.engine.step()
            else:
                self.accelerator.backward(loss)
                self.adam.step()
                self.scheduler.step()

    def save(self, place: Path, epoch: int = 0) -> None:
        if self.by == "deepspeed":
            state = {"epoch": epoch + 1}
            self.engine.save_checkpoint(str(place.parent), tag=place.name, client_state=state, **self.options)
        elif self.by == "accelerate":
            self.accelerator.save_state(str(place), **self.options)
        else:
            self.trainer._save_checkpoint(self.trainer.model, None)

    def seen(self) -> Any:
        return self.counting.losses, runs.trained_state(self.module)

    @property
    def counting(self) -> Counting:
        return next(module for module in self.module.modules() if isinstance(module, Counting))

    def _batches(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        return (rows[rank :: self.world_size].to(self.engine.device) for rows in tokens().split(SAMPLES))


class Counter:
    """An object that a program registers for checkpointing."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def counted(stage: int = 2, **options: Any) -> tuple[Run, Counter]:
    """A run by Accelerate with such an object; with options, its checkpoints are numbered, and two of them stay."""
    from accelerate.utils import ProjectConfiguration

    if options:
        options["project_config"] = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    run, counter = Run("accelerate", "", 2, stage, accelerator=options), Counter()
    run.accelerator.register_for_checkpointing(counter)
    return run, counter


@contextlib.contextmanager
def served(waits: bool = False, **settings: Any) -> Iterator[None]:
    """While this lasts, runs are made under `patch()`; asynchronous saves do not wait for who asks, unless `waits`."""
    ds_frozen_patch.patch(**settings)
    try:
        with contextlib.nullcontext() if waits else ds_frozen_patch.no_wait():
            yield
    finally:
        ds_frozen_patch.unpatch()


def model_files(place: Path) -> list[Path]:
    """The files with the module's state, of a checkpoint of any owner."""
    return sorted(place.rglob("*model_states.pt"))


def on_write(at: str, happen: Callable[[], None], which: int) -> contextlib.AbstractContextManager[None]:
    """While this lasts, something happens on rank 0 when it has opened a file whose name ends so for the n-th time."""
    seen: list[str] = []
    opening = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        made = opening(file, mode, *args, **kwargs)
        final = re.sub(r"/\.(.+)\.[0-9a-f]{12}$", r"/\1", str(file))  # what is written under a hidden name
        if "w" in mode and torch.distributed.get_rank() == 0 and final.endswith(at):
            seen.append(str(file))
            if len(seen) >= which:
                happen()
        return made

    writer = torch.serialization._open_zipfile_writer_file

    class Writer(writer):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any) -> None:
            opened(name, "wb").close()
            super().__init__(name)

    def of_path(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return opened(path, mode, *args, **kwargs)  # in Python 3.10 it keeps the function that io.open was

    return overridden(
        [
            (builtins, "open", opened),
            (io, "open", opened),
            (Path, "open", of_path),
            (torch.serialization, "_open_zipfile_writer_file", Writer),
        ]
    )


def dying(at: str) -> contextlib.AbstractContextManager[None]:
    return on_write(at, lambda: os._exit(9), 2)


def failing(at: str) -> contextlib.AbstractContextManager[None]:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return on_write(at, fail, 1)


WRITE = Recorder.write


def writing(seconds: float = 0, fails: bool = False, rank: int | None = None) -> AbstractContextManager[None]:
    """While this lasts, a rank's files, or all, take so many seconds to be written, or cannot be."""

    def write(*args: Any) -> None:
        if rank is None or rank == torch.distributed.get_rank():
            time.sleep(seconds)
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        WRITE(*args)

    return overridden([(Recorder, "write", write)])


def writing_when(told: threading.Event) -> AbstractContextManager[None]:
    """While this lasts, files are written once that is set; those of rank 1 after those of rank 0."""

    def write(*args: Any) -> None:
        told.wait(60)
        time.sleep(0.5 * torch.distributed.get_rank())
        WRITE(*args)

    return overridden([(Recorder, "write", write)])

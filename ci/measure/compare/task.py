"""The run that every system makes: a LoRA fine-tune of one Llama, on the same data.

All here but `Run` and `Seen` is used inside a rank.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import training

EPOCHS = 2
STEPS = 4  # of the optimizer, in an epoch
MIDDLE = 2  # the step of the first epoch after which a checkpoint is saved too
SAMPLES = 4  # for each step, of all ranks together
VOCABULARY = 8192
LEARNING_RATE = 1e-2

# Which of an owner's ways, if not the plain one: with this package, or with DeepSpeed's own flag.
OURS, FLAG = "ours", "flag"


@dataclass(frozen=True)
class Run:
    """What one run of a system is to do: it trains all epochs, from the start or from a checkpoint."""

    kind: str  # which of the systems that one module runs
    stage: int
    world_size: int
    out: str
    resume: str | None = None
    seed: int = 1  # of the base
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    strict: bool = True
    universal: bool = False  # `resume` is a universal checkpoint of DeepSpeed's
    weights_only: bool = False
    export: bool = False
    halt: bool = False  # copy what is on disk half-way through the second save
    last: bool = False  # go on from what the system finds to be the last checkpoint
    slow: bool = False  # what torch writes goes to a disk of 2 MB/s


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a run."""

    losses: list[float]  # one for each step
    batches: list[int]  # their first tokens
    trained: dict[str, str]  # a digest of each trained parameter at the end, whole
    count: int  # the buffer that training changes
    trainable: int  # elements
    frozen: int
    evaluated: float  # the loss on all data at the end
    beside: int  # steps begun while torch wrote a file, if `slow`


_counts = {"steps": 0, "beside": 0}  # of this rank


def attempt(module: str, verb: str, run: Run, **options: Any) -> tuple[str, Any]:
    """Return ("done", the result of a system's verb) or ("failed", its error); our own errors are raised."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    torch.manual_seed(0)
    try:
        return "done", getattr(importlib.import_module(module), verb)(run, **options)
    except Exception as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
            raise
        return "failed", f"{type(error).__name__}: {error}"
    except CheckpointException as error:  # of each rank's exception
        (first, _), *_ = error.failures.values()
        return "failed", f"{type(first).__name__}: {first}"


def base(seed: int) -> Any:
    """Return a Llama with tied embeddings that counts its steps in a persistent buffer and records their losses."""
    import torch
    from transformers import LlamaForCausalLM

    class Counting(LlamaForCausalLM):  # type: ignore[no-untyped-call]
        count: Any
        losses: list[float]
        batches: list[int]

        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            given = super().forward(input_ids=input_ids, labels=labels)
            if self.training:
                _counts["steps"] += 1
                self.count += 1
                self.losses.append(given.loss.item())
                self.batches.append(int(input_ids[0, 0]))
            return given

    torch.manual_seed(seed)
    made = Counting(training.llama_config(256, 512, layers=2, vocabulary=VOCABULARY, tied=True))
    made.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    made.losses, made.batches = [], []
    return made


def model(run: Run) -> Any:
    """Return the base with LoRA adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=64, lora_alpha=16, target_modules=list(run.targets), init_lora_weights=False)
    return get_peft_model(base(run.seed), config)


def patch(run: Run) -> None:
    """Call `patch()`, if this system is ours."""
    import ds_frozen_patch

    if run.kind == OURS:
        # elastic only matters where the number of ranks has changed.
        ds_frozen_patch.patch(elastic=True, export="peft" if run.export else None, async_save=run.slow)


def flag(run: Run) -> dict[str, Any]:
    """Return the argument that is DeepSpeed's own flag, if this system sets it."""
    return {"exclude_frozen_parameters": True} if run.kind == FLAG else {}


def tokens() -> Any:
    """Return the data of an epoch."""
    import torch

    return torch.randint(VOCABULARY, (STEPS * SAMPLES, 8), generator=torch.Generator().manual_seed(0))


def settings(run: Run) -> dict[str, Any]:
    """Return the DeepSpeed config that all share."""
    return training.settings(run.stage) | ({"checkpoint": {"load_universal": True}} if run.universal else {})


def seen(trained: Any, evaluated: float) -> Seen:
    """Return what a rank saw, for a model that `model` returned."""
    import deepspeed

    counting = trained.base_model.model
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        values = {name: digest(value) for name, value in trained.named_parameters() if value.requires_grad}
        trainable, frozen = (
            sum(value.numel() for value in trained.parameters() if value.requires_grad == wanted)
            for wanted in (True, False)
        )
    return Seen(
        counting.losses, counting.batches, values, int(counting.count), trainable, frozen, evaluated, _counts["beside"]
    )


def digest(tensor: Any) -> str:
    """Return a digest of a tensor's fp32 values; of a sharded one, all ranks must ask for it."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def disturbed(run: Run) -> AbstractContextManager[None]:
    """Disturb what is saved while this lasts, if the run asks for that."""
    return _halting(run) if run.halt else _slow() if run.slow else nullcontext()


def wait_for_disk(written: int) -> None:
    """Take as long as a disk of 2 MB/s for so many bytes, and count the steps that begin meanwhile."""
    before = _counts["steps"]
    time.sleep(written / 2e6)
    _counts["beside"] += _counts["steps"] - before


@contextmanager
def _slow() -> Iterator[None]:
    """torch writes slowly, and the steps that begin meanwhile are counted."""
    import torch

    module: Any = torch.serialization
    writer = module._open_zipfile_writer_file

    class Slow(writer):  # type: ignore[misc, valid-type]
        def __exit__(self, *args: Any) -> None:
            super().__exit__(*args)
            wait_for_disk(Path(self.name).stat().st_size)

    _counts["beside"] = 0
    module._open_zipfile_writer_file = Slow
    try:
        yield
    finally:
        module._open_zipfile_writer_file = writer


@contextmanager
def _halting(run: Run) -> Iterator[None]:
    """Half-way through the first file that is saved for the second time, what is on disk is copied.

    That is what a kill at this moment would leave, of this rank's files and the others'.
    """
    import torch

    saved: set[str] = set()
    save = torch.save

    def halt(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        name = str(getattr(file, "name", file)).rpartition("/")[2]
        if name == "mp_rank_00_model_states.pt" and name in saved and not Path(left(run)).exists():
            whole = io.BytesIO()
            save(value, whole, *args, **kwargs)
            Path(file).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
            shutil.copytree(run.out, left(run))
        saved.add(name)
        save(value, file, *args, **kwargs)

    torch.save = halt  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = save


def left(run: Run) -> str:
    """Return where that copy is."""
    return f"{run.out}-left"

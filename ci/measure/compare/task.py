"""One run of one system: what it is to do, what its ranks saw, and how it is attempted inside them."""

from __future__ import annotations

import hashlib
import importlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EPOCHS = 2
STEPS = 4  # of the optimizer, in an epoch
MIDDLE = 2  # the step of the first epoch after which a checkpoint is saved too

# Which of an owner's ways, if not the plain one: with this package, or with DeepSpeed's own flag.
OURS, FLAG = "ours", "flag"


@dataclass(frozen=True)
class Run:
    """What one run is to do: train all epochs, from the start or from a checkpoint, and save each."""

    owner: str  # of the engine
    kind: str
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
    halt: bool = False  # copy what is on disk half-way through a file of the second save
    last: bool = False  # go on from what the system finds to be the last checkpoint
    asynchronous: bool = False

    @property
    def left(self) -> str:
        """Where what is on disk is copied to."""
        return f"{self.out}-left"


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a run."""

    losses: list[float]  # one for each step
    times: list[float]  # when each step began
    trained: dict[str, str]  # a digest of each trained parameter at the end, whole
    count: int  # the buffer that training changes
    trainable: int  # elements
    frozen: int
    evaluated: float  # the loss on all data at the end


def attempt(module: str, verb: str, run: Run, **options: Any) -> tuple[str, Any]:
    """Return ("done", the result of a verb) or ("failed", the system's error); our own errors are raised."""
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


def digest(tensor: Any) -> str:
    """Return a digest of a tensor's fp32 values; of a sharded one, all ranks must ask for it."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()

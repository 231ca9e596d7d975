"""The run whose saves `ci/bench_saves.py` and `ci/bench_growth.py` measure: one step of a LoRA fine-tune of a Llama.

Lightning, with and without us, and DeepSpeed's own call save one and the same engine in turn, so that nothing else
differs. Hugging Face's Trainer has one of its own beside it. All here but the dataclasses is used inside a rank.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory import memory, reset_peak_memory

OURS = "Lightning, `patch()`"
NATIVE = "Lightning, `exclude_frozen_parameters=True`"
OURS_UNSYNCED = "Lightning, `patch(sync=False)`"
NATIVE_SYNCED = "Lightning, `exclude_frozen_parameters=True`, and then fsync"
FULL = "Lightning"
DEEPSPEED = "DeepSpeed's `save_checkpoint`, with the flag"
HUGGING_FACE = "Hugging Face's Trainer, PEFT"
MENDED = "Lightning, with the method that DeepSpeed lacks"
NOTHING = "without a checkpoint"
FLOOR = "floor: one `write` and fsync"
UNSYNCED = "floor without fsync"

OPTIMIZER_BYTES = 12  # of each trained parameter: its fp32 value and Adam's two moments
RANKS = 2
LORA = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Shape:
    """A Llama, and the rank of its adapters."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    lora: int
    tied: bool
    targets: list[str] = field(default_factory=lambda: LORA)


@dataclass(frozen=True)
class Model:
    """What a rank says of the model that it trains; the bytes are those of its parameters in memory."""

    trainable: int
    trainable_bytes: int
    frozen_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Save:
    """What a save cost on one rank: seconds between two barriers, and what memory it took at its peak."""

    seconds: float
    memory: int


@dataclass(frozen=True)
class Start:
    """What the way to the first batch cost on one rank: seconds, and memory at its peak, the model's own included."""

    seconds: float
    memory: int


_now: dict[str, Any] = {}  # what this rank has in memory between two calls


def start(shape: Shape, stage: int, precision: str, hugging_face: bool = False) -> Model:
    """Train a step under `patch()`, which leaves no trace once it is undone, and keep the Trainer."""
    import deepspeed

    import ds_frozen_patch

    _now["stage"], _now["precision"] = stage, precision
    with ds_frozen_patch.patched():
        _now["lightning"] = trainer(stage, precision)
        _now["lightning"].fit(module(shape, precision), data())
    if hugging_face:
        _now["hugging face"] = _hugging_face(shape, stage)
    model = _now["lightning"].lightning_module
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        sizes = {True: 0, False: 0}
        for value in model.parameters():
            sizes[value.requires_grad] += value.nbytes
        _now["trainable"] = sum(value.numel() for value in model.parameters() if value.requires_grad)
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(value.nbytes for name, value in model.state_dict().items() if name not in kept)
    return Model(_now["trainable"], sizes[True], sizes[False], buffers)


def end() -> None:
    """Forget them, and the weights at once: DeepSpeed keeps hold of the engine for as long as the process lives."""
    import torch

    for parameter in _now["lightning"].lightning_module.parameters():
        for held in (parameter, getattr(parameter, "ds_tensor", parameter)):
            held.data = torch.empty(0)
    _now.clear()
    gc.unfreeze()  # the pool froze them between two calls
    gc.collect()
    _give_back_memory()
    torch.distributed.barrier()


def save(way: str, path: str) -> Save:
    """Save in a way, to a path that is not there yet."""
    import torch

    import ds_frozen_patch

    work = _ways()[way]
    gc.collect()
    _give_back_memory()
    # patch() and unpatch() are outside of what is measured: a run calls the one once, and the other never.
    options: dict[str, Any] = {"sync": False} if way == OURS_UNSYNCED else {}
    with ds_frozen_patch.patched(**options) if way in (OURS, OURS_UNSYNCED) else nullcontext():
        torch.distributed.barrier()
        reset_peak_memory()
        before = memory("VmRSS")
        begun = time.perf_counter()
        work(path)
        torch.distributed.barrier()
        return Save(time.perf_counter() - begun, memory("VmHWM") - before)


def _ways() -> dict[str, Callable[[str], object]]:
    trainer = _now["lightning"]

    def by_lightning(path: str, exclude: bool) -> None:
        trainer.strategy.exclude_frozen_parameters = exclude
        trainer.save_checkpoint(path)

    def by_lightning_synced(path: str) -> None:
        by_lightning(path, True)
        _sync(Path(path))

    def by_deepspeed(path: str) -> None:
        trainer.strategy.model.save_checkpoint(path, tag="checkpoint", exclude_frozen_parameters=True)

    def by_hugging_face(path: str) -> None:
        other = _now["hugging face"]
        other.args.output_dir = path
        other._save_checkpoint(other.model, trial=None)

    return {
        OURS: lambda path: by_lightning(path, True),
        OURS_UNSYNCED: lambda path: by_lightning(path, True),
        NATIVE_SYNCED: by_lightning_synced,
        NATIVE: lambda path: by_lightning(path, True),
        FULL: lambda path: by_lightning(path, False),
        DEEPSPEED: by_deepspeed,
        HUGGING_FACE: by_hugging_face,
        FLOOR: lambda path: _write(path, sync=True),
        UNSYNCED: lambda path: _write(path, sync=False),
    }


def _write(path: str, sync: bool) -> None:
    """What this rank has of the trainable bytes, from memory to a file, once."""
    import torch

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "bytes" not in _now:
        size = OPTIMIZER_BYTES * _now["trainable"] // world_size
        if rank == 0:
            size += weight_bytes(_now["stage"], _now["precision"]) * _now["trainable"]
        _now["bytes"] = memoryview(b"1" * size)
        torch.distributed.barrier()
    Path(path).mkdir(parents=True, exist_ok=True)
    file = os.open(f"{path}/{rank}", os.O_WRONLY | os.O_CREAT)
    left = _now["bytes"]
    while left:  # the kernel takes 2 GiB at once
        left = left[os.write(file, left) :]
    if sync:
        os.fsync(file)
    os.close(file)


def _sync(folder: Path) -> None:
    """Have all ranks sync what they have saved: each its share of the files, and then rank 0 the folders."""
    import torch

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()
    inside = sorted(folder.rglob("*"))
    _fsync([path for path in inside if path.is_file()][rank::world_size])
    torch.distributed.barrier()
    if rank == 0:
        _fsync([*(path for path in inside if path.is_dir()), folder, folder.parent])


def _fsync(paths: list[Path]) -> None:
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def weight_bytes(stage: int, precision: str) -> int:
    """Bytes that a trained parameter takes beside the optimizer's; in ZeRO-3 the optimizer's are all there is."""
    return 0 if stage == 3 else 2 if precision == "bf16-true" else 4


def trainer(stage: int, precision: str, steps: int = 1) -> Any:
    """Lightning's."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    strategy: Any = DeepSpeedStrategy(config=settings(stage))
    kind: Any = precision
    return pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, precision=kind, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def data() -> Any:
    """One batch for each rank."""
    import torch

    samples: Any = torch.arange(32).reshape(4, 8)
    return torch.utils.data.DataLoader(samples, batch_size=2)


def settings(stage: int) -> dict[str, Any]:
    """The DeepSpeed config of all."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 5_000_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def module(shape: Shape, precision: str) -> Any:
    """The LightningModule."""
    import lightning.pytorch as pl
    import torch

    class FineTune(pl.LightningModule):
        begun: tuple[float, int] | None = None  # when the first batch came, and the peak of memory until then

        def __init__(self) -> None:
            super().__init__()
            self.model = lora(shape, torch.bfloat16 if precision == "bf16-true" else torch.float32)

        def training_step(self, batch: Any, index: int) -> Any:
            self.begun = self.begun or (time.perf_counter(), memory("VmHWM"))
            return self.model(input_ids=batch, labels=batch).loss

        def test_step(self, batch: Any, index: int) -> None:
            self.begun = self.begun or (time.perf_counter(), memory("VmHWM"))
            self.model(input_ids=batch, labels=batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad])

    return FineTune()


def lora(shape: Shape, kind: Any) -> Any:
    """A Llama with adapters. Its base repeats a million values: to draw a thousand times as many takes a minute."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        config = LlamaConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 64,
            num_key_value_heads=shape.hidden // 64, max_position_embeddings=64, tie_word_embeddings=shape.tied,
        )  # fmt: skip
        adapters = LoraConfig(r=shape.lora, target_modules=shape.targets)
        with no_init_weights():
            base = LlamaForCausalLM(config)
        base.tie_weights()
        values = torch.randn(1_000_003) / 50
        for parameter in base.parameters():
            flat: Any = parameter.data.view(-1)
            for piece in flat.split(len(values)):
                piece.copy_(values[: len(piece)])
        return get_peft_model(base, adapters, autocast_adapter_dtype=False)
    finally:
        torch.set_default_dtype(default)


def _hugging_face(shape: Shape, stage: int) -> Any:
    """Hugging Face's Trainer after a step, in fp32: it has no bf16 on CPU ranks with DeepSpeed."""
    import torch
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
    from transformers import Trainer, TrainingArguments

    # accelerate knows several CPU ranks, and DeepSpeed, but not both at once: it would take each rank for the only one.
    PartialState._prepare_backend = lambda state, *_: ("gloo", DistributedType.MULTI_CPU)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    arguments = TrainingArguments(
        "unused",
        deepspeed={"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **settings(stage)},
        per_device_train_batch_size=2, max_steps=1, optim="adamw_torch", save_strategy="no", logging_strategy="no",
        report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    samples: Any = [{"input_ids": row, "labels": row} for row in torch.arange(32).reshape(4, 8)]
    trained = Trainer(lora(shape, torch.float32), arguments, train_dataset=samples)
    trained.train()
    return trained


def begin(verb: str, way: str, shape: Shape, stage: int, path: str | None) -> Start:
    """Let a new Trainer `fit` or `test`, from a checkpoint or from nothing, in a process that has done nothing else."""
    import ds_frozen_patch

    model = module(shape, "bf16-true")
    if way == OURS:
        ds_frozen_patch.patch()
    elif way == MENDED:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

        DeepSpeedZeRoOffload._restore_from_bit16_weights = lambda self: None
    reset_peak_memory()
    begun = time.perf_counter()
    getattr(trainer(stage, "bf16-true", steps=2), verb)(model, data(), ckpt_path=path)
    first, peak = model.begun
    return Start(first - begun, peak)


def _give_back_memory() -> None:
    """What was freed goes back to the kernel, else the next one works in it and seems to need none."""
    ctypes.CDLL(None).malloc_trim(0)

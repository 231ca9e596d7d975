"""The run whose saves are measured: one step of a LoRA fine-tune of a Llama.

Lightning, with and without us, and DeepSpeed's own call save one and the same engine in turn, so that nothing else
differs. Hugging Face's Trainer has one of its own beside it. All here but the dataclasses is used inside a rank.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sharded
import training
from memory import give_back_memory, memory, release, reset_peak_memory

OURS = "Lightning, `patch()`"
NATIVE = "Lightning, `exclude_frozen_parameters=True`"
OURS_UNSYNCED = "Lightning, `patch(sync=False)`"
OURS_ASYNC = "Lightning, `patch(async_save=True)`"
NATIVE_SYNCED = "Lightning, `exclude_frozen_parameters=True`, and then fsync"
FULL = "Lightning"
FULL_SYNCED = "Lightning, and then fsync"
DEEPSPEED = "DeepSpeed's `save_checkpoint`, with the flag"
HUGGING_FACE = "Hugging Face's Trainer, PEFT"
FSDP = f"FSDP2, `dcp.save`, {sharded.WITHOUT_FROZEN}"
FSDP_ASYNC = f"FSDP2, `dcp.async_save`, {sharded.WITHOUT_FROZEN}"
MENDED = "Lightning, with the method that DeepSpeed lacks"
NOTHING = "without a checkpoint"
FLOOR = "floor: one `write` and fsync"
UNSYNCED = "floor without fsync"
PASS = "fingerprints of the whole base"
READ = "a plain read of the whole base"
MULTIPLY = "its two multiplications alone, in the cache"
COPY = "a copy of the trained bytes in memory"

OPTIMIZER_BYTES = 12  # of each trained parameter: its fp32 value and Adam's two moments
RANKS = 2
LORA = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Shape:
    """A Llama, and the rank of its adapters."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    lora: int
    tied: bool
    targets: tuple[str, ...] = LORA
    kv_heads: int = 0  # as many as attention heads


@dataclass(frozen=True)
class Cost:
    """What a save, or the way to the first batch, cost on one rank: seconds, and memory at its peak.

    Attributes:
        beside: seconds of each training step while files were still written, after the save had returned.
        until: seconds until they were written.
    """

    seconds: float
    memory: int
    beside: tuple[float, ...] = ()
    until: float = 0.0


SETTINGS: dict[str, dict[str, Any]] = {OURS: {}, OURS_UNSYNCED: {"sync": False}, OURS_ASYNC: {"async_save": True}}

_now: dict[str, Any] = {}  # what this rank has in memory between two calls


def start(shape: Shape, stage: int, precision: str, ways: Iterable[str] = ()) -> dict[str, int]:
    """Train a step under `patch()`, which leaves no trace once it is undone, and keep the Trainer; returns sizes.

    What other systems need that are among the ways is kept too.
    """
    import deepspeed

    import ds_frozen_patch

    _now["stage"], _now["precision"] = stage, precision
    with ds_frozen_patch.patched():
        _now["lightning"] = trainer(stage, precision)
        _now["lightning"].fit(module(shape, precision), data())
    if HUGGING_FACE in ways:
        _now["hugging face"] = _hugging_face(shape, stage)
    if FSDP in ways:
        _now["fsdp"] = _fsdp(shape, stage)
    model = _now["lightning"].lightning_module
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
        _now["trainable"] = sum(value.numel() for value in model.parameters() if value.requires_grad)
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(value.nbytes for name, value in model.state_dict().items() if name not in kept)
    return {"trainable": _now["trainable"], "frozen_bytes": frozen, "buffer_bytes": buffers}


def use(trainer: Any, stage: int, trainable: int) -> None:
    """Keep a Trainer whose fit goes on, with so many trained parameters, in bf16."""
    _now.update(lightning=trainer, stage=stage, precision="bf16-true", trainable=trainable)


def end() -> None:
    """Forget them."""
    import torch

    release(_now["lightning"].strategy.model)
    _now.clear()
    gc.unfreeze()  # the pool froze them between two calls
    gc.collect()
    give_back_memory()
    torch.distributed.barrier()


def save(way: str, path: str) -> Cost:
    """Save in a way, to a path that is not there yet."""
    import torch

    import ds_frozen_patch

    work = _ways()[way]
    gc.collect()
    give_back_memory()
    # patch() and unpatch() are outside of what is measured: a run calls the one once, and the other never.
    with ds_frozen_patch.patched(**SETTINGS[way]) if way in SETTINGS else nullcontext():
        torch.distributed.barrier()
        reset_peak_memory()
        before = memory("VmRSS")
        begun = time.perf_counter()
        writing = work(path)
        torch.distributed.barrier()
        taken = time.perf_counter() - begun
        peak = memory("VmHWM") - before
        if way == FSDP_ASYNC:
            writing.result()
        beside = _steps_beside() if way == OURS_ASYNC else ()
        return Cost(taken, peak, beside, time.perf_counter() - begun)


def steps(count: int) -> tuple[float, ...]:
    """Return the seconds of so many training steps, with nothing beside them."""
    return tuple(_step() for _ in range(count))


def walk() -> float:
    """Return the seconds of torch's own walks through the module: the least that finding its contents takes."""
    import torch

    module = _now["lightning"].strategy.model.module
    torch.distributed.barrier()
    begun = time.perf_counter()
    module.state_dict(keep_vars=True)
    for named in (module.named_parameters, module.named_buffers, module.named_modules):
        list(named(remove_duplicate=False))
    return time.perf_counter() - begun


def _steps_beside() -> tuple[float, ...]:
    """Train until every rank has written its files."""
    import torch

    found: list[float] = []
    while True:
        is_writing = any(thread.name == "ds_frozen_patch: save" for thread in threading.enumerate())
        flag = torch.tensor(int(is_writing), device=_device())
        torch.distributed.all_reduce(flag)
        if not flag:
            return tuple(found[:-1])  # the last one may have been beside it only in part
        found.append(_step())


def _step() -> float:
    import torch

    engine = _now["lightning"].strategy.model
    torch.distributed.barrier()
    begun = time.perf_counter()
    engine.backward(engine(torch.arange(16, device=_device()).reshape(2, 8)))
    engine.step()
    _finish()
    return time.perf_counter() - begun


def _device() -> Any:
    """Where this rank trains."""
    return _now["lightning"].strategy.root_device


def _finish() -> None:
    """Wait for what runs on a GPU."""
    import torch

    if _device().type == "cuda":
        torch.cuda.synchronize()


def _ways() -> dict[str, Callable[[str], Any]]:
    import torch
    from torch.distributed.checkpoint import state_dict_saver as dcp

    trainer = _now["lightning"]

    def by_lightning(path: str, exclude: bool = True, sync: bool = False) -> None:
        trainer.strategy.exclude_frozen_parameters = exclude
        trainer.save_checkpoint(path)
        if sync:
            _sync(Path(path))

    def by_deepspeed(path: str) -> None:
        trainer.strategy.model.save_checkpoint(path, tag="checkpoint", exclude_frozen_parameters=True)

    def by_hugging_face(path: str) -> None:
        other = _now["hugging face"]
        other.args.output_dir = path
        other._save_checkpoint(other.model, trial=None)

    def by_fsdp(path: str, is_async: bool) -> Any:
        model, adam, group = _now["fsdp"]
        state = sharded.state(model, adam, without_frozen=True)
        if is_async:
            return dcp.async_save(state, checkpoint_id=path, process_group=group)
        return dcp.save(state, checkpoint_id=path)

    def fingerprints_of_base(_: str) -> None:
        from ds_frozen_patch.fingerprint import Memory, fingerprints

        with _two_threads():
            fingerprints(frozen(), trainer.strategy.root_device, Memory())

    def read_base(_: str) -> None:
        with _two_threads():
            for value in frozen():
                value.view(-1).view(torch.int64).sum()
            _finish()

    def multiply(_: str) -> None:
        words = torch.arange(1 << 18)  # 2 MiB, as many as a pass takes at once
        product = torch.empty_like(words)
        with _two_threads():
            for _again in range(sum(value.nbytes for value in frozen()) // words.nbytes):
                torch.mul(words, words, out=product)
                torch.mul(words, words, out=product)

    def frozen() -> list[Any]:
        return [value.detach() for value in trainer.lightning_module.parameters() if not value.requires_grad]

    return {
        **dict.fromkeys((*SETTINGS, NATIVE), by_lightning),
        NATIVE_SYNCED: partial(by_lightning, sync=True),
        FULL: partial(by_lightning, exclude=False),
        FULL_SYNCED: partial(by_lightning, exclude=False, sync=True),
        DEEPSPEED: by_deepspeed,
        HUGGING_FACE: by_hugging_face,
        FSDP: partial(by_fsdp, is_async=False),
        FSDP_ASYNC: partial(by_fsdp, is_async=True),
        FLOOR: partial(_write, sync=True),
        UNSYNCED: partial(_write, sync=False),
        PASS: fingerprints_of_base,
        READ: read_base,
        MULTIPLY: multiply,
        COPY: lambda _: _copy(),
    }


@contextmanager
def _two_threads() -> Iterator[None]:
    """Let torch compute with both cores; the ranks have one thread each."""
    import torch

    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _trained_bytes() -> int:
    """What this rank saves of the trained bytes."""
    import torch

    size: int = OPTIMIZER_BYTES * _now["trainable"] // torch.distributed.get_world_size()
    if torch.distributed.get_rank() == 0:
        size += weight_bytes(_now["stage"], _now["precision"]) * _now["trainable"]
    return size


def _copy() -> None:
    """Copy as much as this rank saves, from where it trains, into memory of the CPU that was used before."""
    import torch

    if "copied" not in _now:
        source, target = (torch.full((_trained_bytes(),), number, dtype=torch.uint8) for number in (1, 2))
        is_gpu = _device().type == "cuda"
        _now["copied"] = source.to(_device()), target.pin_memory() if is_gpu else target
        torch.distributed.barrier()
    source, target = _now["copied"]
    target.copy_(source)


def _write(path: str, sync: bool) -> None:
    """What this rank has of the trainable bytes, from memory to a file, once."""
    import torch

    if "bytes" not in _now:
        _now["bytes"] = memoryview(b"1" * _trained_bytes())
        torch.distributed.barrier()
    Path(path).mkdir(parents=True, exist_ok=True)
    file = os.open(f"{path}/{torch.distributed.get_rank()}", os.O_WRONLY | os.O_CREAT)
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
    """Return the bytes of a trained parameter beside the optimizer's; ZeRO-3 has the optimizer's only."""
    return 0 if stage == 3 else 2 if precision == "bf16-true" else 4


def trainer(
    stage: int, precision: Any, steps: int = 1, strategy: Any = None, callbacks: list[Any] | None = None
) -> Any:
    """Return Lightning's, of all ranks of the pool, or with a strategy of its own of one rank."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return pl.Trainer(
        accelerator="cpu" if training.is_cpu_rank() else "gpu", callbacks=callbacks,
        devices=1 if strategy else int(os.environ["WORLD_SIZE"]),
        strategy=strategy or DeepSpeedStrategy(config=training.settings(stage)), precision=precision, max_steps=steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def fitted(shape: Shape) -> Any:
    """Return a Trainer after a step in bf16 and ZeRO-2, in a process that is the only rank."""
    from ds_frozen_patch.testing import cpu_strategy

    fitted = trainer(2, "bf16-true", strategy=cpu_strategy("lightning.pytorch")(stage=2))
    fitted.fit(module(shape, "bf16-true"), data())
    return fitted


def data() -> Any:
    """Return one batch for each rank."""
    import torch

    samples: Any = torch.arange(32).reshape(4, 8)
    return torch.utils.data.DataLoader(samples, batch_size=2)


def module(shape: Shape, precision: str) -> Any:
    """Return the LightningModule."""
    import lightning.pytorch as pl
    import torch

    class FineTune(pl.LightningModule):
        begun: tuple[float, int] | None = None  # when the first batch came, and the peak of memory until then

        def __init__(self) -> None:
            super().__init__()
            self.model = lora(shape, torch.bfloat16 if precision == "bf16-true" else torch.float32)

        def forward(self, batch: Any) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def training_step(self, batch: Any, index: int) -> Any:
            self.begun = self.begun or (time.perf_counter(), memory("VmHWM"))
            return self(batch)

        def test_step(self, batch: Any, index: int) -> None:
            self.training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([value for value in self.parameters() if value.requires_grad])

    return FineTune()


def lora(shape: Shape, kind: Any) -> Any:
    """Return a Llama with adapters. Its base repeats a million values, since drawing them all takes a minute."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        sizes = (shape.hidden, shape.intermediate, shape.layers, shape.vocabulary)
        config = training.llama_config(*sizes, tied=shape.tied, kv_heads=shape.kv_heads)
        adapters = LoraConfig(r=shape.lora, target_modules=list(shape.targets))
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
    """Return Hugging Face's Trainer after a step, in fp32: it has no bf16 on CPU ranks with DeepSpeed."""
    import torch

    options = {"per_device_train_batch_size": 2, "max_steps": 1, "save_strategy": "no"}
    rows = torch.arange(32).reshape(4, 8)
    trained = training.hugging_face(lora(shape, torch.float32), rows, "unused", training.settings(stage), **options)
    trained.train()
    return trained


def _fsdp(shape: Shape, stage: int) -> tuple[Any, Any, Any]:
    """Return a model of FSDP2 after a step in fp32, its optimizer, and a group for what is beside the training."""
    import torch

    model = sharded.shard(lora(shape, torch.float32), stage)
    adam = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    batch = torch.arange(16).reshape(2, 8)
    model(input_ids=batch, labels=batch).loss.backward()
    adam.step()
    return model, adam, torch.distributed.new_group(backend="gloo")


def begin(verb: str, way: str, shape: Shape, stage: int, path: str | None) -> Cost:
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
    return Cost(first - begun, peak)

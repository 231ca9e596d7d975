"""The run whose saves are measured: one step of a LoRA fine-tune of a Llama, and the ways to save it.

Lightning, with and without us, and DeepSpeed's own call save one and the same engine by turns, so that nothing else
differs. Hugging Face's Trainer and FSDP2 have models of their own beside it. The functions run inside a rank.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import training
from memory import give_back_memory, memory, release, reset_peak_memory
from training import WITHOUT_FROZEN

OURS = "Lightning, `patch()`"
NATIVE = "Lightning, `exclude_frozen_parameters=True`"
OURS_UNSYNCED = "Lightning, `patch(fsync=False)`"
OURS_ASYNC = "Lightning, `patch(async_save=True)`"
NATIVE_SYNCED = "Lightning, `exclude_frozen_parameters=True`, and then fsync"
FULL = "Lightning"
FULL_SYNCED = "Lightning, and then fsync"
DEEPSPEED = "DeepSpeed's `save_checkpoint`, with the flag"
HUGGING_FACE = "Hugging Face's Trainer, PEFT"
FSDP = f"FSDP2, `dcp.save`, {WITHOUT_FROZEN}"
FSDP_ASYNC = f"FSDP2, `dcp.async_save`, {WITHOUT_FROZEN}"
MENDED = "Lightning, with the method that DeepSpeed lacks"
NOTHING = "without a checkpoint"
FLOOR = "floor: one `write` and fsync"
UNSYNCED = "floor without fsync"
PASS = "fingerprints of the whole base"
READ = "a plain read of the whole base"
MULTIPLY = "its two multiplications alone, in the cache"
COPY = "a copy of the trained bytes in memory"
STEP = "a training step with nothing beside it"
WALK = "floor of the first step: torch's own walks for state dict, parameters, buffers, modules"

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


TWO_THREADS = (PASS, READ, MULTIPLY)  # both cores compute; the ranks have one thread each otherwise
SETTINGS: dict[str, dict[str, Any]] = {OURS: {}, OURS_UNSYNCED: {"fsync": False}, OURS_ASYNC: {"async_save": True}}

_now: dict[str, Any] = {}  # what this rank has in memory between two calls


def start(shape: Shape, stage: int, precision: str, ways: Sequence[str]) -> dict[str, Any]:
    """Train a step under `patch()`, and keep the Trainer, and what other systems need of these ways; returns sizes."""
    import deepspeed
    import torch

    import ds_frozen_patch

    with ds_frozen_patch.patched():
        lightning = trainer(stage, precision)
        lightning.strategy.teardown = lambda: None  # which would move the model to the CPU
        lightning.fit(module(shape, precision), data())
    model = lightning.lightning_module
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
        trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    kept = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(value.nbytes for name, value in model.state_dict().items() if name not in kept)
    device = lightning.strategy.root_device
    _now.update(lightning=lightning, stage=stage, precision=precision, trainable=trainable, device=device)
    if HUGGING_FACE in ways:
        _now["hugging face"] = _hugging_face(shape, stage)
    if FSDP in ways:
        _now["fsdp"] = _fsdp(shape, stage)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"trainable": trainable, "frozen_bytes": frozen, "buffer_bytes": buffers, "device": name}


def end() -> None:
    """Forget them."""
    import torch

    release(_now["lightning"].strategy.model)
    _now.clear()
    gc.unfreeze()  # the pool froze them between two calls
    gc.collect()
    give_back_memory()
    torch.distributed.barrier()


def save(way: str, path: str) -> dict[str, Any]:
    """Save in a way, to a path that is not there yet; returns seconds, and memory at its peak.

    Of an asynchronous save also the seconds until all is written, and those of each training step meanwhile.
    """
    import torch

    import ds_frozen_patch
    from ds_frozen_patch import process

    work = _ways()[way]
    gc.collect()
    give_back_memory()
    # patch() and unpatch() are outside of what is measured: a run calls the one once, and the other never. So what is
    # known of the engine is kept: without it, each save would be a first one, and compare the whole base.
    with ds_frozen_patch.patched(**SETTINGS[way]) if way in SETTINGS else nullcontext(), ds_frozen_patch.no_wait():
        if way in SETTINGS:
            process.state.engines = _now.setdefault("engines", process.state.engines)
        torch.set_num_threads(2 if way in TWO_THREADS else 1)
        _barrier()
        reset_peak_memory()
        if is_gpu := _now["device"].type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, on_gpu = memory("VmRSS"), torch.cuda.memory_allocated()
        begun = time.perf_counter()
        writing = work(path)
        _barrier()
        cost: dict[str, Any] = {"seconds": time.perf_counter() - begun, "memory": memory("VmHWM") - before}
        if is_gpu:
            cost["gpu"] = torch.cuda.max_memory_allocated() - on_gpu
        if way == FSDP_ASYNC:
            writing.result()
        if way == OURS_ASYNC:
            cost |= {"beside": _steps_beside(), "until": time.perf_counter() - begun}
        return cost


def _barrier() -> None:
    """Wait for all ranks, and for what runs on a GPU."""
    import torch

    if _now["device"].type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def _steps_beside() -> list[float]:
    """Train until every rank has written its files; returns the seconds of each step."""
    import torch

    found: list[float] = []
    while True:
        is_writing = any(thread.name == "ds_frozen_patch: save" for thread in threading.enumerate())
        flag = torch.tensor(int(is_writing), device=_now["device"])
        torch.distributed.all_reduce(flag)
        if not flag:
            return found[:-1]  # the last one may have been beside it only in part
        _barrier()
        begun = time.perf_counter()
        _step()
        _barrier()
        found.append(time.perf_counter() - begun)


def _step() -> None:
    import torch

    engine = _now["lightning"].strategy.model
    engine.backward(engine(torch.arange(16, device=_now["device"]).reshape(2, 8)))
    engine.step()


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
        state = training.sharded_state(model, adam, without_frozen=True)
        if is_async:
            return dcp.async_save(state, checkpoint_id=path, process_group=group)
        return dcp.save(state, checkpoint_id=path)

    def fingerprints_of_base(_: str) -> None:
        from ds_frozen_patch.fingerprint import fingerprints, read

        fingerprints([read(value) for value in frozen()], trainer.strategy.root_device)

    def read_base(_: str) -> None:
        for value in frozen():
            value.view(-1).view(torch.int64).sum()

    def multiply(_: str) -> None:
        words = torch.arange(1 << 18)  # 2 MiB, as many as a pass takes at once
        product = torch.empty_like(words)
        for _again in range(2 * (sum(value.nbytes for value in frozen()) // words.nbytes)):
            torch.mul(words, words, out=product)

    def frozen() -> list[Any]:
        return [value.detach() for value in trainer.lightning_module.parameters() if not value.requires_grad]

    def walk(_: str) -> None:
        module = trainer.strategy.model.module
        module.state_dict(keep_vars=True)
        for named in (module.named_parameters, module.named_buffers, module.named_modules):
            list(named(remove_duplicate=False))

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
        STEP: lambda _: _step(),
        WALK: walk,
    }


def _own_bytes() -> int:
    """What this rank saves of the trained bytes."""
    import torch

    trainable = int(_now["trainable"])
    weights = trained_bytes(_now["stage"], _now["precision"], trainable) - OPTIMIZER_BYTES * trainable
    share = OPTIMIZER_BYTES * trainable // torch.distributed.get_world_size()
    return share + (weights if torch.distributed.get_rank() == 0 else 0)


def _copy() -> None:
    """Copy as much as this rank saves, from where it trains, into memory of the CPU that was used before."""
    import torch

    if "copied" not in _now:
        source, target = (torch.full((_own_bytes(),), number, dtype=torch.uint8) for number in (1, 2))
        is_gpu = _now["device"].type == "cuda"
        _now["copied"] = source.to(_now["device"]), target.pin_memory() if is_gpu else target
        torch.distributed.barrier()
    source, target = _now["copied"]
    target.copy_(source)


def _write(path: str, sync: bool) -> None:
    """What this rank has of the trainable bytes, from memory to a file, once."""
    import torch

    if "bytes" not in _now:
        _now["bytes"] = memoryview(b"1" * _own_bytes())
        torch.distributed.barrier()
    Path(path).mkdir(parents=True, exist_ok=True)
    with Path(path, str(torch.distributed.get_rank())).open("wb", buffering=0) as file:
        left = _now["bytes"]
        while left:  # the kernel takes 2 GiB at once
            left = left[file.write(left) :]
        if sync:
            os.fsync(file)


def _sync(folder: Path) -> None:
    """Have all ranks sync what they have saved: each its share of the files and folders."""
    import torch

    torch.distributed.barrier()
    places = [*sorted(folder.rglob("*")), folder, folder.parent]
    for place in places[torch.distributed.get_rank() :: torch.distributed.get_world_size()]:
        opened = os.open(place, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def trained_bytes(stage: int, precision: str, trainable: int) -> int:
    """Return the bytes of the trained state: of the optimizer's, and but in ZeRO-3, where they are its, the weights."""
    return (OPTIMIZER_BYTES + (0 if stage == 3 else 2 if precision == "bf16-true" else 4)) * trainable


def trainer(stage: int, precision: Any, steps: int = 1, strategy: Any = None) -> Any:
    """Return Lightning's, of all ranks of the pool, or with a strategy of its own of one rank."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return pl.Trainer(
        accelerator="cpu" if training.is_cpu_rank() else "gpu",
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
    """Return a Llama with adapters."""
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
        with no_init_weights():
            base = LlamaForCausalLM(config)
        base.tie_weights()
        for parameter in base.parameters():
            parameter.data.uniform_(-0.03, 0.03)  # normal values take a minute
        adapters = LoraConfig(r=shape.lora, target_modules=list(shape.targets))
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

    model = training.shard(lora(shape, torch.float32), stage)
    adam = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    batch = torch.arange(16).reshape(2, 8)
    model(input_ids=batch, labels=batch).loss.backward()
    adam.step()
    return model, adam, torch.distributed.new_group(backend="gloo")


def begin(verb: str, way: str, shape: Shape, stage: int, path: str | None) -> dict[str, Any]:
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
    return {"seconds": first - begun, "memory": peak}

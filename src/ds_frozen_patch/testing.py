"""Real DeepSpeed on CPU ranks: for your own CI, our tests and the demo.

    from ds_frozen_patch.testing import cpu_strategy

    DeepSpeedStrategy = cpu_strategy("lightning.pytorch")
    trainer = Trainer(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=3))

The engine, the ZeRO partitions and the checkpoints are the real ones, only slow; the ranks talk
over gloo. Nothing here is needed, or used, on a GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import wrapt


def cpu_strategy(package: str = "lightning.pytorch") -> type[Any]:
    """Let the `DeepSpeedStrategy` of one Lightning run on CPU ranks, in this process, and return it.

    Call it in each rank, before DeepSpeed is imported. The class stays what it is, so aliases such
    as `strategy="deepspeed_stage_2"` and subclasses run on the CPU as well. Pass `accelerator="cpu"`
    and a number of `devices` to the Trainer or Fabric. It works with `patch()` in any order.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning" for Trainer, "lightning.fabric" or
            "lightning_fabric" for Fabric.

    Returns:
        The package's own `DeepSpeedStrategy`.

    Raises:
        ValueError: `package` is none of these.
        ImportError: it, or DeepSpeed, is not installed.
    """
    if package not in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        raise ValueError(f"package must name a Lightning package, such as 'lightning.pytorch', not {package!r}")
    os.environ["DS_ACCELERATOR"] = "cpu"
    adapt_deepspeed()
    module = importlib.import_module(f"{package}.strategies.deepspeed")
    accelerators = importlib.import_module(f"{package}.accelerators")
    # What the strategy asks of its accelerator and devices is that they are CUDA's.
    module.CUDAAccelerator = (accelerators.CUDAAccelerator, accelerators.CPUAccelerator)  # type: ignore[attr-defined]
    module._validate_device_index_selection = lambda parallel_devices: None  # type: ignore[attr-defined]
    strategy: type[Any] = module.DeepSpeedStrategy
    strategy.root_device = property(_indexed_cpu)
    return strategy


def _indexed_cpu(strategy: Any) -> Any:
    """DeepSpeed wants a device with an index, also where that means nothing."""
    import torch

    return torch.device("cpu", strategy.local_rank)


def adapt_deepspeed() -> None:
    """What DeepSpeed does for GPUs, and CPU ranks need otherwise."""
    import deepspeed.comm
    import deepspeed.ops

    # It would build a C++ op for shared memory between CPU ranks; gloo alone does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # To gather ZeRO-3's parameters it starts many collectives and waits for the last. On NCCL's one stream
    # that is enough; gloo has two threads, and a late one overwrote weights that had just been loaded.
    for name in ("all_gather", "all_gather_into_tensor"):
        collective = getattr(deepspeed.comm, name)
        if not isinstance(collective, wrapt.FunctionWrapper):
            setattr(deepspeed.comm, name, wrapt.FunctionWrapper(collective, _finished))


def _finished(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Releases of DeepSpeed gather into views that autograd watches, and forbids to write to.
    handle = wrapped(*map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})
    if handle is not None:
        handle.wait()
    return handle


def _detached(value: Any) -> Any:
    """The same memory without autograd, for a tensor or a list of them."""
    if isinstance(value, list):
        return [_detached(item) for item in value]
    return value.detach() if hasattr(value, "detach") else value

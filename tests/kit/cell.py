"""The cell of `ci/matrix.json` that the tests run in: the Lightning that they use there, what lets old releases run on
CPU ranks, and what makes checkpoints trainable-only, which is the shim or Lightning itself with our patch series.

The environment variable CELL names it; without it, it is the everyday one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from matrix import cells

import ds_frozen_patch

CELL = cells.read()[os.environ.get("CELL", "everyday")]
BF16 = "fp32" not in CELL.needs
PRECISIONS = ("bf16-mixed", "32-true") if BF16 else ("32-true",)
PRECISION = PRECISIONS[0]

if TYPE_CHECKING or CELL.package == "lightning":
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
    from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.strategies import DeepSpeedStrategy

    FABRIC = "lightning.fabric"
else:
    import pytorch_lightning as pl
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeed
    from pytorch_lightning.callbacks import Callback, LambdaCallback, ModelCheckpoint
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.strategies import DeepSpeedStrategy

    FABRIC = "lightning_fabric"

TRAINER = pl.__name__

__all__ = [
    "BF16",
    "CELL",
    "FABRIC",
    "PRECISION",
    "PRECISIONS",
    "TRAINER",
    "Callback",
    "DeepSpeedStrategy",
    "Fabric",
    "FabricDeepSpeed",
    "LambdaCallback",
    "LightningCLI",
    "ModelCheckpoint",
    "pl",
]


def work_around(needs: Collection[str]) -> None:
    """Apply those that a cell needs to this process, before DeepSpeed is imported."""
    if "gloo-gathers" in needs:
        _add_gloo_collectives()
    if "deepspeed-on-cpu" in needs:
        _stub_intel_extensions()
        _group_cpu_gradients()


def _stub_intel_extensions() -> None:
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator._communication_backend_name = "gloo"
    if accelerator.current_stream() is None:
        accelerator.current_stream = _Stream  # a single rank synchronizes it in ZeRO-3


def _group_cpu_gradients() -> None:
    """ZeRO stage 0 groups gradients by the names of CUDA tensor types."""
    from deepspeed.runtime import engine

    engine.split_half_float_double_sparse = lambda gradients: [(gradients[0].dtype, gradients)]


def _add_gloo_collectives() -> None:
    """Add the two collectives on one tensor that gloo in torch 2.1 lacks, by those on lists."""
    import torch.distributed as dist

    def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        parts = list(output_tensor.detach().view(dist.get_world_size(group), -1).unbind())
        return dist.all_gather(parts, input_tensor.flatten(), group=group, async_op=async_op)

    def reduce_scatter_tensor(
        output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        whole = input.clone()
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)].view_as(output))
        return _Done() if async_op else None

    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.reduce_scatter_tensor = reduce_scatter_tensor


class _Stream:
    def synchronize(self) -> None:
        """Return at once; nothing is asynchronous."""


class _Done:
    def wait(self) -> None:
        """Return at once; the collective is complete."""


def trainable_only() -> None:
    """Have new strategies save trainable-only checkpoints from now on."""
    if CELL.patches:
        _set_default(True)
    else:
        ds_frozen_patch.patch()


def stop() -> None:
    """Restore Lightning."""
    _set_default(False) if CELL.patches else ds_frozen_patch.unpatch()


@contextmanager
def full_checkpoint(*strategies: Any) -> Iterator[None]:
    """Save full checkpoints within this block, with these strategies and with new ones."""
    if not CELL.patches:
        with ds_frozen_patch.full_checkpoint():
            yield
        return
    _set_default(False)
    for strategy in strategies:
        strategy.exclude_frozen_parameters = False
    try:
        yield
    finally:
        _set_default(True)
        for strategy in strategies:
            strategy.exclude_frozen_parameters = True


def _set_default(value: bool) -> None:
    for strategy in (DeepSpeedStrategy, FabricDeepSpeed):
        init: Any = strategy.__init__
        # The arguments with a default are the last ones.
        names = init.__code__.co_varnames[: init.__code__.co_argcount][-len(init.__defaults__) :]
        defaults = dict(zip(names, init.__defaults__, strict=True)) | {"exclude_frozen_parameters": value}
        init.__defaults__ = tuple(defaults.values())

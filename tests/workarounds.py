"""Workarounds for running old releases of DeepSpeed and torch on CPU ranks, for the tests only."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def apply(needs: Collection[str]) -> None:
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

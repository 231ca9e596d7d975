"""Whole weights from a running engine, one at a time, whatever ZeRO has made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..settings import current

if TYPE_CHECKING:
    import torch


def gathered(parameters: Mapping[str, torch.nn.Parameter], on_this_rank: bool) -> Iterator[tuple[str, Any]]:
    """Each parameter's name with its whole value in CPU memory; every rank must go through all of them.

    The value is the model's own, or with `patch(fp32_weights=True)` the optimizer's fp32 master where there is one.

    Args:
        parameters: by name, in the same order on every rank.
        on_this_rank: whether this rank wants the values; the others get None.
    """
    from deepspeed import zero

    for name, parameter in parameters.items():
        master = _master(parameter) if current().fp32_weights else None
        if master is not None:
            yield name, master.detach().to("cpu", copy=True) if on_this_rank else None
            continue
        with zero.GatheredParameters([parameter]):
            value = parameter.detach().to("cpu", copy=True) if on_this_rank else None
        yield name, value


def _master(parameter: torch.nn.Parameter) -> Any:
    """The whole fp32 master of a parameter; None where it has none of its own, on every rank alike."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad or (hasattr(parameter, "ds_id") and not hasattr(parameter, "_z3_optimizer")):
        return None
    with _on_the_accelerator(parameter):
        return safe_get_full_fp32_param(parameter)


@contextmanager
def _on_the_accelerator(parameter: torch.nn.Parameter) -> Iterator[None]:
    """After a fit, Lightning moves a model to the CPU; DeepSpeed has the ranks talk where the parameter is, and NCCL
    knows GPUs alone. What the parameter holds does not matter to it.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    if parameter.device.type == get_accelerator().device_name():
        yield
        return
    moved = parameter.data
    parameter.data = torch.empty_like(moved, device=get_accelerator().current_device_name())
    try:
        yield
    finally:
        parameter.data = moved

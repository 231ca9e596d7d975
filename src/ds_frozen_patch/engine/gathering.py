"""Whole weights from a running engine, one at a time, whatever ZeRO has made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..parameters import Contents, plain
from ..settings import current
from ..workarounds.for_deepspeed import on_the_accelerator

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
    with on_the_accelerator(parameter):
        return safe_get_full_fp32_param(parameter)


def put(module: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights into a module's parameters and buffers, by plain name; every rank must call it."""
    import torch
    from deepspeed import zero

    with torch.no_grad():
        for parameter, names in Contents(module).names.items():
            value = next((weights[name] for name in names if name in weights), None)
            if value is not None:
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    if parameter.shape == value.shape:  # a rank that does not gather has an empty one
                        parameter.copy_(value)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if plain(name) in weights:
                buffer.copy_(weights[plain(name)])

"""Whole weights from a running engine, one at a time, whatever ZeRO has made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..parameters import Contents, plain

if TYPE_CHECKING:
    import torch


def gathered(parameters: Mapping[str, torch.nn.Parameter], on_this_rank: bool) -> Iterator[tuple[str, Any]]:
    """Each parameter's name with its whole value in CPU memory; every rank must go through all of them.

    Args:
        parameters: by name, in the same order on every rank.
        on_this_rank: whether this rank wants the values; the others get None.
    """
    from deepspeed import zero

    for name, parameter in parameters.items():
        with zero.GatheredParameters([parameter]):
            value = parameter.detach().to("cpu", copy=True) if on_this_rank else None
        yield name, value


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

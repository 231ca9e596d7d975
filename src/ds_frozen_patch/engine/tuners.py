"""What PEFT has done to a module: its layers, merges, and bases that an initialization has rewritten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .. import process
from ..parameters import is_of_lora, plain
from .served import begin_those_with

if TYPE_CHECKING:
    import torch


def merge_adapter(wrapped: Callable[..., Any], tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`BaseTuner.merge_adapter`, which may be called before the first step: what is rounded later is read now.

    PEFT's users call it, and `unmerge_adapter`, around each use of the merged weights.
    """
    import torch

    begin_those_with(tuner)
    result = wrapped(*args, **kwargs)
    for _, layer in _layers(tuner):
        largest = process.state.merged.setdefault(layer, {})
        for name, parameter in layer.base_layer.named_parameters():
            if layer.merged_adapters and parameter.is_floating_point() and parameter.numel():
                now = torch.linalg.vector_norm(parameter.detach(), float("inf"))
                largest[name] = torch.maximum(now, largest.get(name, now).to(now.device))
    return result


def merges(module: torch.nn.Module) -> tuple[dict[str, float], set[str]]:
    """The plain names of what was merged and is unmerged again, with its largest merged value; of what is merged."""
    unmerged, merged = dict[str, float](), set[str]()
    for path, layer in _layers(module):
        for name, largest in process.state.merged.get(layer, {}).items():
            if layer.merged_adapters:
                merged.add(plain(f"{path}.base_layer.{name}"))
            else:
                unmerged[plain(f"{path}.base_layer.{name}")] = float(largest)
    return unmerged, merged


def built_once(module: torch.nn.Module) -> Iterator[str]:
    """The plain names of what adapters consist of, frozen or not: no base has it.

    These are all tensors of PEFT's layers but those of the layers below; and those that are called like LoRA's where a
    program has added them by hand: `layer.lora_A`, `lora_down.weight`.
    """
    for path, inner in module.named_modules(remove_duplicate=False):
        children = inner._modules
        below = children.get("base_layer", children.get("original_module"))
        if below is not None and (hasattr(type(inner), "adapter_layer_names") or "modules_to_save" in children):
            outside, own = {id(tensor) for _, tensor in _tensors_of(below)}, inner
        elif "prompt_encoder" in children and hasattr(inner, "peft_config"):
            outside, own = set[int](), inner.prompt_encoder
            path = f"{path}.prompt_encoder" if path else "prompt_encoder"
        else:
            continue
        prefix = f"{path}." if path else ""
        yield from (plain(f"{prefix}{name}") for name, tensor in _tensors_of(own) if id(tensor) not in outside)
    for name, _ in module.named_parameters(remove_duplicate=False):
        if is_of_lora(name):
            yield plain(name)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


_AT_RANDOM = ("pissa_niter_", "corda", "lora_ga")
"""The values of PEFT's `init_lora_weights` that rewrite the base by what differs without a seed. Others repeat it."""


def rewritten(module: torch.nn.Module) -> dict[str, str]:
    """The plain names of what an initialization has rewritten at random, with its name; none if there was a seed."""
    if _has_seed():
        return {}
    inits = {
        adapter: init
        for inner in module.modules()
        for adapter, config in (vars(inner).get("peft_config") or {}).items()
        if (init := str(getattr(config, "init_lora_weights", "")).lower()).startswith(_AT_RANDOM)
    }
    names: dict[str, str] = {}
    for path, layer in _layers(module) if inits else ():
        names |= {plain(f"{path}.base_layer.weight"): init for name, init in inits.items() if name in layer.lora_A}
    return names


def _has_seed() -> bool:
    """Whether the program has set a seed before it built the model, as far as can be known.

    Torch draws a seed of 53 bits for a program that sets none. Trainer sets one, but after the model is built.
    """
    import torch

    return torch.initial_seed() < 1 << 32 and "transformers.trainer" not in sys.modules


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with adapters on top of a layer of the base, by path."""
    for path, layer in module.named_modules(remove_duplicate=False):
        if hasattr(type(layer), "adapter_layer_names") and "base_layer" in layer._modules:
            yield path, layer

"""Experts of `deepspeed.moe`: each has a file of its own, where it is numbered among the experts of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parameters import plain

if TYPE_CHECKING:
    import torch


def names_in_files(module: torch.nn.Module) -> dict[str, str]:
    """For each parameter of this rank's experts: its plain name in the module, by its plain name in a file."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    names = {}
    for path, layer in module.named_modules():
        if isinstance(layer, MoE):
            first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts."
            for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                for name in expert.state_dict(keep_vars=True):
                    names[plain(f"{prefix}{first + number}.{name}")] = plain(f"{prefix}{number}.{name}")
    return names

"""Stands in for what OpenRLHF needs of a GPU. Import it before OpenRLHF.

Run, it is `openrlhf.cli.train_sft` with the same arguments.
"""

from __future__ import annotations

import runpy
import sys
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.distributed import device_mesh

FLASH_ATTN = {
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils.distributed": ("all_gather",),
}
"""What OpenRLHF imports of it, and calls only for packed samples."""

for name, functions in FLASH_ATTN.items():
    module = ModuleType(name)
    vars(module).update(dict.fromkeys(functions))
    sys.modules[name] = module

cuda: Any = torch.cuda
cuda.set_device = lambda device: None
cuda.synchronize = lambda device=None: None  # torch.compile refuses one function under two names
cuda.current_device = lambda: "cpu"
init_device_mesh = device_mesh.init_device_mesh


@wraps(init_device_mesh)
def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return init_device_mesh("cpu", *args, **kwargs)


device_mesh.init_device_mesh = on_cpu
if __name__ == "__main__":
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)

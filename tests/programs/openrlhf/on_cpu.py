"""Stands in for what OpenRLHF needs of a GPU, and serves its engines if SERVED is set. Import it before OpenRLHF.

Run, it is `openrlhf.cli.train_sft` with the same arguments.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import wraps
from types import ModuleType
from typing import Any

import deepspeed
import torch
from torch.distributed import device_mesh

import ds_frozen_patch

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
cuda.set_device = cuda.synchronize = lambda device=None: None
cuda.current_device = lambda: "cpu"
init_device_mesh = device_mesh.init_device_mesh
initialize = deepspeed.initialize


@wraps(init_device_mesh)
def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return init_device_mesh("cpu", *args, **kwargs)


@wraps(initialize)
def served(*args: Any, **kwargs: Any) -> Any:
    made = initialize(*args, **kwargs)
    ds_frozen_patch.serve(made[0])
    return made


device_mesh.init_device_mesh = on_cpu
if os.environ.get("SERVED"):
    deepspeed.initialize = served
if __name__ == "__main__":
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)

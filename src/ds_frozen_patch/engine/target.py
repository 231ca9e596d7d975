"""DeepSpeed's engine as a target: what of it is wrapped, and what it must be able to do."""

from __future__ import annotations

from ..common.probing import Finding, Installed, Target
from ..settings import FLAG

METHODS = ("__init__", "save_checkpoint", "load_checkpoint", "module_state_dict", "load_module_state_dict")
REMEDY = "install DeepSpeed 0.10.1 or newer: pip install -U 'deepspeed>=0.10.1'"


def judge(version: str | None, engine: Installed) -> Finding:
    """It must take the flag, as it does since 0.10.1."""
    if not engine.takes("save_checkpoint", FLAG):
        return Finding("refused", version, f"DeepSpeedEngine.save_checkpoint has no argument {FLAG}", REMEDY)
    return Finding("patchable", version, f"save_checkpoint takes {FLAG}")


ENGINE = Target(
    "deepspeed",
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    METHODS,
    ("deepspeed",),
    judge,
    REMEDY,
    "deepspeed",
)
BESIDE = (
    Target("deepspeed", "deepspeed.utils.zero_to_fp32", "", ("get_fp32_state_dict_from_zero_checkpoint",)),
    # Also called by a program that has imported the one above before `patch()`.
    Target("deepspeed", "deepspeed.utils.zero_to_fp32", "", ("_get_fp32_state_dict_from_zero_checkpoint",)),
    Target("deepspeed", "torch.distributed", "", ("destroy_process_group",)),
    Target("deepspeed", "peft.tuners.tuners_utils", "BaseTuner", ("merge_adapter",)),
)
"""Functions that are wrapped beside it, where they exist."""

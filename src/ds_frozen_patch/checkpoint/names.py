"""The names in a checkpoint's directory: which are DeepSpeed's and ours."""

from __future__ import annotations

import re

RECORD = "ds_frozen_patch.json"
"""The name of the record beside the files of a tag (see `record`)."""

WEIGHTS_FILE = "ds_frozen_patch-weights.ckpt"
"""The name of the single file of a weights-only save to a path where a folder is."""

OFFLOADED = "offloaded_tensors"
"""The folder with the optimizer's states on NVMe."""

EXPORTS = ("trainable.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
"""What `patch(export=)` adds to a checkpoint."""

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""The files of each rank, or of all; their groups are the ranks of data and of tensor parallelism."""

_STATE_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt"
    r"|(?:layer_|expert_|expp_rank_)\d.*_states\.pt"
)


def is_state(name: str) -> bool:
    """Whether a save has written what has this name, in the folder of a tag."""
    return is_state_file(name) or name in (OFFLOADED, RECORD)


def is_state_file(name: str) -> bool:
    """Whether DeepSpeed has written the file of this name, in the folder of a tag."""
    return _STATE_FILE.fullmatch(name) is not None


def is_rank_file(name: str) -> bool:
    """Whether this is the name of a file of model or optimizer states, and not of an expert's or a layer's file."""
    return any(kind.fullmatch(name) for kind in (MODEL_FILE, OPTIMIZER_FILE))

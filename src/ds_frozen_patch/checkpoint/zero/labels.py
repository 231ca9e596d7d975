"""Labels: each file of a checkpoint names the save that it is part of, and its own file name.

A file of another rank or run is detected by its label, even if DeepSpeed would load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...manifest import KEY

LABEL = "ds_frozen_patch_label"
"""The key of the label in a file's state.

It has the entries "save" (an id), "file" (a name), and "record": whether there is one beside the file.
"""


ELASTIC_KEY = "ds_frozen_patch_elastic"
"""The key of what an elastic resume needs in a checkpoint's state.

Its "world_size" is that of the run that trained a resharded checkpoint, its "loss_factor" that of `engine.loss`.
"""

PLAIN_GROUPS = "ds_frozen_patch_param_shapes"
"""The key of what DeepSpeed saves as `param_shapes` from ZeRO-1 on, in a checkpoint of stage 0."""

UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""What DeepSpeed's universal converter requires in the state of a checkpoint of ZeRO 1 or 2."""


def get_save_id(state: Any) -> Any:
    """The id of the save in a file's label; None without a label."""
    return get_label(state).get("save")


def get_label(state: Any) -> Mapping[str, Any]:
    """The label in a file's state; empty without one."""
    label = state.get(LABEL) if isinstance(state, Mapping) else None
    return label if isinstance(label, Mapping) else {}


def resharded_save_id(origin: str, stage: int, ranks: int) -> str:
    """The save id of a checkpoint that was resharded from files with this id (see `record.identify`)."""
    return f"{origin} in stage {stage} for {ranks} ranks"


def add_label(state: Mapping[str, Any], save_id: str, file: str, has_record: bool) -> dict[str, Any]:
    """A copy of a file's state with a label."""
    return {**state, LABEL: {"save": save_id, "file": file, "record": has_record}}


def remove_ours(client_state: dict[str, Any]) -> None:
    """Remove it, as soon as it is loaded: a framework, or the program, reads the client state next."""
    for key in (KEY, LABEL, ELASTIC_KEY, PLAIN_GROUPS):
        client_state.pop(key, None)
    for key, value in UNIVERSAL_INFO.items():
        if client_state.get(key) == value:
            del client_state[key]

"""Trainable-only checkpoints for Lightning + DeepSpeed.

>>> import ds_frozen_patch
>>> ds_frozen_patch.patch()
"""

from ._errors import CheckpointError, CheckpointMismatchError, PatchError
from ._patching import Status, TargetStatus, patch, patched, status, unpatch
from ._saving import full_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "PatchError",
    "Status",
    "TargetStatus",
    "full_checkpoint",
    "patch",
    "patched",
    "status",
    "unpatch",
]

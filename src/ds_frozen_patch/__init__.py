"""Trainable-only checkpoints for Lightning + DeepSpeed.

>>> import ds_frozen_patch
>>> ds_frozen_patch.patch()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._errors import CheckpointError, CheckpointMismatchError, PatchError
from ._patching import Status, TargetStatus, patch, patched, status, unpatch
from ._saving import full_checkpoint

if TYPE_CHECKING:
    from .checkpoint.consolidation import Consolidated, consolidate
    from .checkpoint.exporting import Exported, export
    from .checkpoint.inspection import Inspection, inspect
    from .checkpoint.loading import load_trainable
    from .checkpoint.pruning import Pruned, prune
    from .checkpoint.resharding import Resharded, reshard
    from .checkpoint.universal import Universal, universal
    from .checkpoint.verification import Verified, verify

# The tools' modules are imported when they are first used, so that a training script does not wait for them.
_TOOLS = {
    "Consolidated": "consolidation",
    "Exported": "exporting",
    "Inspection": "inspection",
    "Pruned": "pruning",
    "Resharded": "resharding",
    "Universal": "universal",
    "Verified": "verification",
    "consolidate": "consolidation",
    "export": "exporting",
    "inspect": "inspection",
    "load_trainable": "loading",
    "prune": "pruning",
    "reshard": "resharding",
    "universal": "universal",
    "verify": "verification",
}

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "Consolidated",
    "Exported",
    "Inspection",
    "PatchError",
    "Pruned",
    "Resharded",
    "Status",
    "TargetStatus",
    "Universal",
    "Verified",
    "consolidate",
    "export",
    "full_checkpoint",
    "inspect",
    "load_trainable",
    "patch",
    "patched",
    "prune",
    "reshard",
    "status",
    "universal",
    "unpatch",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".checkpoint.{_TOOLS[name]}", __name__), name)

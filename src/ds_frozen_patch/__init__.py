"""Trainable-only checkpoints for Lightning + DeepSpeed.

>>> import ds_frozen_patch
>>> ds_frozen_patch.patch()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._errors import CheckpointError, CheckpointMismatchError, PatchError

if TYPE_CHECKING:
    from ._patching import Status, TargetStatus, patch, patched, status, unpatch
    from ._saving import full_checkpoint
    from .checkpoint.consolidation import Consolidated, consolidate
    from .checkpoint.exporting import Exported, export
    from .checkpoint.inspection import Inspection, inspect
    from .checkpoint.loading import load_trainable
    from .checkpoint.pruning import Pruned, prune
    from .checkpoint.resharding import Resharded, reshard
    from .checkpoint.universal import Universal, universal
    from .checkpoint.verification import Verified, verify

# Imported when they are first used: the import of this package is cheap, and a training script needs no tools.
_MODULES = {
    "Status": "_patching",
    "TargetStatus": "_patching",
    "patch": "_patching",
    "patched": "_patching",
    "status": "_patching",
    "unpatch": "_patching",
    "full_checkpoint": "_saving",
    "Consolidated": "checkpoint.consolidation",
    "consolidate": "checkpoint.consolidation",
    "Exported": "checkpoint.exporting",
    "export": "checkpoint.exporting",
    "Inspection": "checkpoint.inspection",
    "inspect": "checkpoint.inspection",
    "load_trainable": "checkpoint.loading",
    "Pruned": "checkpoint.pruning",
    "prune": "checkpoint.pruning",
    "Resharded": "checkpoint.resharding",
    "reshard": "checkpoint.resharding",
    "Universal": "checkpoint.universal",
    "universal": "checkpoint.universal",
    "Verified": "checkpoint.verification",
    "verify": "checkpoint.verification",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__

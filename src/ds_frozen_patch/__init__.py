"""Trainable-only checkpoints for Lightning + DeepSpeed.

>>> import ds_frozen_patch
>>> ds_frozen_patch.patch()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .common.errors import CheckpointError as CheckpointError
    from .common.errors import CheckpointMismatchError as CheckpointMismatchError
    from .common.errors import PatchError as PatchError
    from .patching.patch import patch as patch
    from .patching.patch import patched as patched
    from .patching.patch import serve as serve
    from .patching.patch import unpatch as unpatch
    from .patching.status import Status as Status
    from .patching.status import TargetStatus as TargetStatus
    from .patching.status import status as status
    from .publish.in_flight import no_wait as no_wait
    from .publish.in_flight import wait as wait
    from .settings import full_checkpoint as full_checkpoint
    from .tools.consolidate import Consolidated as Consolidated
    from .tools.consolidate import consolidate as consolidate
    from .tools.export import Exported as Exported
    from .tools.export import export as export
    from .tools.inspect import Inspection as Inspection
    from .tools.inspect import inspect as inspect
    from .tools.load_trainable import load_trainable as load_trainable
    from .tools.merge import Merged as Merged
    from .tools.merge import merge as merge
    from .tools.prune import Pruned as Pruned
    from .tools.prune import prune as prune
    from .tools.reshard import Resharded as Resharded
    from .tools.reshard import reshard as reshard
    from .tools.verify import Verified as Verified
    from .tools.verify import verify as verify

# Imported when they are first used: the import of this package is cheap, and a training script needs no tools.
# `tests/unit/test_docstrings.py` compares this with the imports for type checkers above.
_NAMES = {
    "tools.consolidate": ("Consolidated", "consolidate"),
    "tools.export": ("Exported", "export"),
    "tools.inspect": ("Inspection", "inspect"),
    "tools.load_trainable": ("load_trainable",),
    "tools.merge": ("Merged", "merge"),
    "tools.prune": ("Pruned", "prune"),
    "tools.reshard": ("Resharded", "reshard"),
    "tools.verify": ("Verified", "verify"),
    "common.errors": ("CheckpointError", "CheckpointMismatchError", "PatchError"),
    "publish.in_flight": ("no_wait", "wait"),
    "patching.patch": ("patch", "patched", "serve", "unpatch"),
    "patching.status": ("Status", "TargetStatus", "status"),
    "settings": ("full_checkpoint",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _version() -> str:
    from .common.probing import version_of

    return version_of("ds_frozen_patch") or "0+unknown"  # a copy of the sources, which nobody has installed

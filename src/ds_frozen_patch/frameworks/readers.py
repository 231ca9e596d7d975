"""Code of others that runs right after a save, and may read the checkpoint: it is to find a finished one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..publish import in_flight

_LIGHTNING = ("lightning", "pytorch_lightning")
_DO_NOT_READ = {
    "on_save": ("transformers",),
    "after_save_checkpoint": _LIGHTNING,
    "_save_checkpoint": ("transformers", "trl", *_LIGHTNING),
}
"""The packages whose own methods do not read a checkpoint after its save, but for uploads that are switched on."""
_UPLOADS = {
    "on_save": (
        "_log_model",  # of W&B, ClearML, DVCLive and SwanLab
        "_log_artifacts",  # of MLflow
        "_should_upload_checkpoint",  # of Neptune
        "sync_checkpoints",  # of Flyte
    ),
    # Lightning's other loggers upload files alone, and the checkpoints of engines are folders.
    "after_save_checkpoint": ("_log_model_checkpoints",),  # of Neptune
    "_save_checkpoint": (),
}
"""The attributes that switch these uploads on."""
_OFF = (None, False, "false", "end")


def wait_for_readers(items: Iterable[Any], method: str) -> None:
    """Wait for the save in flight, if there is one, where a framework calls code after it that may read it.

    Args:
        items: the objects whose method is called.
        method: "on_save", "after_save_checkpoint" or "_save_checkpoint".
    """
    if in_flight.is_any():
        for item in items:
            if may_read(item, method):
                in_flight.wait_for(type(item).__name__)


def may_read(item: Any, method: str) -> bool:
    """Whether a method is not one of those that do not read, or an upload is switched on."""
    package = getattr(item, method, type(item)).__module__.partition(".")[0]
    uploads = (getattr(item, name, None) not in _OFF for name in _UPLOADS[method])
    return package not in _DO_NOT_READ[method] or any(uploads)

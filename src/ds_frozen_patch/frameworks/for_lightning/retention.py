"""With `trust=False`, a checkpoint does not decide which folders Lightning's retention removes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from os.path import realpath
from pathlib import Path
from typing import Any

from ...common.errors import named

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def forget_paths_outside(checkpoint: Any, folders: Collection[str]) -> str | None:
    """Remove the paths of older checkpoints from the states of callbacks, unless all lead into the run's folders.

    ModelCheckpoint restores these paths from a loaded checkpoint, and later removes what is there.

    Args:
        checkpoint: what was loaded.
        folders: those that the callbacks of this run save to.

    Returns:
        A warning, or None if there is no such path.
    """
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    outside: list[str] = []
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if not isinstance(state, dict):
            continue
        best = state.get("best_k_models")
        paths = {*(best if isinstance(best, Mapping) else ()), *(state[key] for key in _PATHS if state.get(key))}
        if odd := [str(path) for path in paths if not any(_leads_into(str(path), folder) for folder in folders)]:
            outside += odd
            state.update(best_k_models={}, **dict.fromkeys(_PATHS, ""))
    if not outside:
        return None
    return (
        f"The checkpoint names checkpoints that are not in a folder that this run saves to: {named(outside, 3)}. With"
        " trust=False they are ignored, and the callback starts with no older checkpoints to keep or remove."
    )


def _leads_into(path: str, folder: str) -> bool:
    if "://" in path or "::" in path:  # an address, as fsspec has it
        return path.startswith(folder.rstrip("/") + "/") and ".." not in path
    return Path(realpath(folder)) in Path(realpath(path)).parents

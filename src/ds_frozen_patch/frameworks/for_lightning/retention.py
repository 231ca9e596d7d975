"""With `weights_only=True`, a checkpoint does not decide which folders Lightning's retention removes."""

from __future__ import annotations

import os
from collections.abc import Collection
from os.path import realpath
from pathlib import Path
from typing import Any

from ...common.errors import named

_OF_MODEL_CHECKPOINT = ("best_model_path", "kth_best_model_path", "last_model_path")


def forget_paths_outside(checkpoint: Any, folders: Collection[str]) -> str | None:
    """Remove from the states of callbacks each path that does not lead into a folder of the run, links followed.

    ModelCheckpoint restores the paths of older checkpoints from a loaded one, and later removes what is there; other
    callbacks may do the same.

    Args:
        checkpoint: what was loaded.
        folders: those that the callbacks of this run save to.

    Returns:
        A warning, or None if there is no such path.
    """
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    states = callbacks if isinstance(callbacks, dict) else {}
    outside: list[str] = []

    def is_outside(value: Any, is_path: bool) -> bool:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
        if not path or not (is_path or _looks_like_path(path)) or any(_leads_into(path, item) for item in folders):
            return False
        outside.append(path)
        return True

    def inside(value: Any, is_path: bool = False) -> Any:
        """A part of a state without paths outside; `is_path`: whether a string is one in any case, by its key."""
        if isinstance(value, dict):
            for key in [key for key in value if is_outside(key, is_path)]:
                del value[key]
            for key in value.keys() - {"dirpath"}:  # which ModelCheckpoint compares with its own
                value[key] = inside(value[key], is_path or "path" in str(key) or key == "best_k_models")
        elif type(value) in (list, tuple, set):
            return type(value)(inside(item, is_path) for item in value if not is_outside(item, is_path))
        return "" if is_outside(value, is_path) else value

    for name, state in states.items():
        before = len(outside)
        states[name] = inside(state)
        if len(outside) > before and isinstance(state, dict) and "best_k_models" in state:  # which fits the others
            state.update(best_k_models={}, **dict.fromkeys(_OF_MODEL_CHECKPOINT, ""))
    if not outside:
        return None
    return (
        f"The checkpoint names paths that are not in a folder that this run saves to: {named(outside, 3)}. With"
        " weights_only=True they are ignored, and ModelCheckpoint starts with no older checkpoints to keep or remove."
    )


def _looks_like_path(text: str) -> bool:
    return "://" in text or text.startswith(("/", "~")) or ".." in text.split("/") or os.path.lexists(text)


def _leads_into(path: str, folder: str) -> bool:
    if "://" in folder:  # an address, as fsspec has it
        return path.startswith(folder.rstrip("/") + "/") and ".." not in path
    try:
        return Path(realpath(folder)) in Path(realpath(path)).parents
    except ValueError:  # no path can contain that
        return False

"""With `trust=False`, a checkpoint does not decide which folders Lightning's retention removes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...common.errors import named

_REMOVED = ("kth_best_model_path", "last_model_path")


def forget_paths_outside(checkpoint: Any) -> str | None:
    """Remove from a loaded checkpoint what ModelCheckpoint would take for older checkpoints of its own, and are not.

    ModelCheckpoint restores the paths of the checkpoints that it keeps, if its `dirpath` is that of the state, and
    removes them later. Where one of them is outside of that folder, all are removed from the state.

    Returns:
        A warning, or None if there is no such path.
    """
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    outside: list[str] = []
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        if isinstance(state, dict) and (odd := [path for path in _kept(state) if not _is_inside(path, state)]):
            outside += odd
            state.update(best_k_models={}, **dict.fromkeys(_REMOVED, ""))
    if not outside:
        return None
    return (
        f"The checkpoint names checkpoints that are not in the folder of its run: {named(outside, 3)}. With trust=False"
        " they are ignored, and the callback starts with no older checkpoints to keep or remove."
    )


def _kept(state: Mapping[str, Any]) -> Iterator[str]:
    """The paths in the state of a callback that it could remove."""
    best = state.get("best_k_models")
    yield from map(str, best if isinstance(best, Mapping) else ())
    yield from (str(state[key]) for key in _REMOVED if state.get(key))


def _is_inside(path: str, state: Mapping[str, Any]) -> bool:
    folder = state.get("dirpath")
    if not isinstance(folder, str) or ("://" in path and not path.startswith(folder)):
        return False
    inside = os.path.abspath(folder)  # noqa: PTH100  -- it also resolves "..", without following links
    return os.path.abspath(path).startswith(os.path.join(inside, ""))  # noqa: PTH100, PTH118

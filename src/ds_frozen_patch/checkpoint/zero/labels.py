"""What each file of a checkpoint says of itself: of which save it is, and under which name it was saved.

So a part of another rank or run is known for what it is, though DeepSpeed would take it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...common.overrides import overridden

LABEL = "ds_frozen_patch_label"
"""Where a file says of which save it is, and under which name it was saved, as "save" and "file"."""


def save_of(state: Any) -> Any:
    """The save that a file's state says it is of; None if it does not say."""
    label = state.get(LABEL) if isinstance(state, Mapping) else None
    return label.get("save") if isinstance(label, Mapping) else None


def resharded(save: object, ranks: int) -> str:
    """What the label of a checkpoint says that was made of a save for another number of ranks."""
    return f"{save} for {ranks} ranks"


def labels(engine: Any, save: str) -> AbstractContextManager[None]:
    """While this lasts, all that the engine saves is labelled as of that save."""
    files = engine.checkpoint_engine
    original = files.save

    def save_with_label(state_dict: dict[str, Any], path: str) -> Any:
        return original(labelled(state_dict, save, Path(path).name), path)

    return overridden([(files, "save", save_with_label)])


def labelled(state: Mapping[str, Any], save: str, file: str) -> dict[str, Any]:
    """What a file is to hold, with its label."""
    return {**state, LABEL: {"save": save, "file": file}}

"""Reads checkpoint directories with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_frozen_patch.parameters import plain


def model_states(checkpoint: str | Path) -> list[dict[str, Any]]:
    """Return the state in each `*model_states.pt` of a checkpoint that this test run has saved.

    The names are those of the user's module, without the prefix of Lightning 2.0.
    """
    files = sorted(Path(checkpoint, "checkpoint").glob("*model_states.pt"))
    states = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    for state in states:
        state["module"] = {plain(name): value for name, value in state["module"].items()}
    return states


def size(checkpoint: str | Path) -> int:
    """Return the bytes of all files of a checkpoint, as `du --apparent-size` counts them."""
    return sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())

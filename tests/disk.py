"""What is in a checkpoint directory: read with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def model_states(checkpoint: str | Path) -> list[dict[str, Any]]:
    """The state in each `*model_states.pt` of a checkpoint that this test run has saved itself."""
    files = sorted(Path(checkpoint, "checkpoint").glob("*model_states.pt"))
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def size(checkpoint: str | Path) -> int:
    """Bytes of all files of a checkpoint, as `du --apparent-size` counts them."""
    return sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())

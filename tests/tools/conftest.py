from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools_checkpoints import Checkpoints, base_model


@pytest.fixture(scope="session")
def checkpoints(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(stage, world_size)`: a folder with `small.ckpt` and `full.ckpt` of one moment."""
    return Checkpoints(ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base model, in fp32, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    base_model().save_pretrained(folder)
    return folder

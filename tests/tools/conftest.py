from __future__ import annotations

from pathlib import Path

import pytest
from kit.checkpoints import base_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base model, in fp32, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    base_model().save_pretrained(folder)
    return folder

from __future__ import annotations

from pathlib import Path

import pytest
from kit.programs import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A Lightning without the flag, and a DeepSpeed that accepts it."""
    made = Site(tmp_path)
    made.lightning()
    made.deepspeed()
    return made

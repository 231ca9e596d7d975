"""The README's first command does its job, and says so honestly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.everyday, pytest.mark.once]


def test_demo(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    kept, done = demo
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in (2, 3):
        assert f"ZeRO-{stage}: the resumed run equals the uninterrupted one, bit for bit." in done.stdout
        whole = json.loads((kept / f"zero{stage}" / "losses.json").read_text())["losses"]
        resumed = json.loads((kept / f"zero{stage}" / "resumed.json").read_text())["losses"]
        assert whole[8:] == resumed
        assert len(resumed) == 8
        assert whole[-1] < whole[0]
    assert "Warning" not in done.stderr


def test_demo_refuses_a_directory_that_exists(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ds_frozen_patch.demo", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} exists already" in done.stderr

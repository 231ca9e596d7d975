"""The list of upstream's faults: the patches that it names, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import upstream

pytestmark = [pytest.mark.short, pytest.mark.everyday]
SERIES = Path(__file__).resolve().parents[2] / "patches"
PATCHES = [said["patch"] for faults in upstream.read().values() for said in faults.values() if "patch" in said]


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_is_in_a_series(patch: str) -> None:
    assert list(SERIES.glob(f"**/{patch}"))


def test_the_page_shows_the_list() -> None:
    assert upstream.BLOCK.read() == upstream.text().strip(), "write it again: nox -f ci/noxfile.py -s docs"

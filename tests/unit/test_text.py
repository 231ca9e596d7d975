"""Formatting of numbers."""

from __future__ import annotations

import pytest

from ds_frozen_patch.common.text import human_bytes

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (92_900_000, "92.9 MB"),
        (999_600_000, "1 GB"),
        (5_700_000_000_000, "5.7 TB"),
        (2 * 10**15, "2 PB"),
        (5 * 10**19, "50000 PB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text

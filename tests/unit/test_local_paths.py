"""Paths that are not on a mounted file system are passed on unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_frozen_patch.publish.ways import is_local

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


@pytest.mark.parametrize("path", ["s3://bucket/name", Path("s3://bucket/name"), "gs://b/x", "file:///tmp/x"])
def test_addresses(path: str | Path) -> None:
    assert not is_local(path)


@pytest.mark.parametrize("path", ["/tmp/x", "out/x.ckpt", Path("epoch=1.ckpt"), "C:/x", "a:b/c", "step:1"])
def test_local_paths(path: str | Path) -> None:
    assert is_local(path)

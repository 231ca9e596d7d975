"""The tools read a checkpoint in a bucket as one on a disk, in ranges, and leave nothing of it on the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kit import buckets
from kit.checkpoints import Checkpoints, contents

import ds_frozen_patch
from ds_frozen_patch.cli import main

pytest.importorskip("moto")
pytest.importorskip("s3fs")

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday]


@pytest.fixture
def copies(server: dict[str, str], checkpoints: Checkpoints, tmp_path: Path, monkeypatch: Any) -> tuple[Path, str]:
    """A folder with checkpoints of one moment, and a copy of it in a bucket."""
    monkeypatch.setenv("DS_FROZEN_PATCH_SCRATCH", str(tmp_path))
    at = f"s3://bucket/{tmp_path.name}"
    buckets.file_system().put(f"{checkpoints(2)}/", at, recursive=True)
    return checkpoints(2), at


@pytest.mark.short
def test_what_is_printed(copies: tuple[Path, str], capsys: Any) -> None:
    printed = []
    for place in map(str, copies):
        for words in (
            ["inspect", f"{place}/small.ckpt"],
            ["verify", f"{place}/small.ckpt", f"{place}/full.ckpt"],
        ):
            assert main(words) == 0
            printed.append(re.sub(r"\d+ s\b|\s+", " ", capsys.readouterr().out.replace(place, "PLACE")))
    assert printed[:2] == printed[2:]
    assert "PLACE" in printed[1]


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "full.ckpt", "pruned.ckpt"],
        ["consolidate", "small.ckpt", "a.safetensors"],
        ["export", "small.ckpt", "b.safetensors", "--format", "safetensors"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_written(copies: tuple[Path, str], tmp_path: Path, words: list[str]) -> None:
    word, source, target, *options = words
    for number, place in enumerate(copies):
        (tmp_path / str(number)).mkdir()
        assert main([word, f"{place}/{source}", str(tmp_path / str(number) / target), *options, "-q"]) == 0
    assert contents(tmp_path / "0" / target) == contents(tmp_path / "1" / target)


def test_what_is_not_there(copies: tuple[Path, str], capsys: Any) -> None:
    _, at = copies
    for words in (["inspect", f"{at}/none.ckpt"], ["prune", f"{at}/none.ckpt", "a"], ["verify", "s3://nowhere/a.ckpt"]):
        assert main(words) == 1
        said = capsys.readouterr()
        assert words[1] in said.out + said.err
        assert "scratch" not in said.out + said.err


def test_without_a_record(copies: tuple[Path, str]) -> None:
    _, at = copies
    before = ds_frozen_patch.inspect(f"{at}/full.ckpt")
    buckets.file_system().rm(f"{at}/full.ckpt/checkpoint/ds_frozen_patch.json")
    after = ds_frozen_patch.inspect(f"{at}/full.ckpt")
    assert before.record
    assert (after.record, after.files, after.path) == (None, before.files, f"{at}/full.ckpt")


def test_damage_is_found(copies: tuple[Path, str]) -> None:
    _, at = copies
    fs = buckets.file_system()
    (name,) = (name for name in fs.find(f"{at}/full.ckpt") if "model_states" in name)
    content = bytearray(fs.cat_file(name))
    content[len(content) // 2] ^= 1
    fs.pipe_file(name, bytes(content))
    assert ds_frozen_patch.verify(f"{at}/full.ckpt").problems

"""The record beside the files of a checkpoint."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.checkpoint.names import RECORD
from ds_frozen_patch.core.record import Record, describe_file, digest_of, write_record
from ds_frozen_patch.load.files import read_record
from ds_frozen_patch.manifest import LeftOut, Manifest

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

MANIFEST = Manifest(
    (LeftOut(("base.weight", "tied.weight"), (2, 3), "bfloat16", "0" * 32), LeftOut(("ü",), (), "float32", None)),
    total_bytes=16,
    zero_stage=2,
    world_size=2,
    versions={"torch": "2.11"},
    adapters={"": {"default": "{}"}},
)
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def written(folder: Path) -> Record:
    torch.save({"module": {"w": torch.ones(3)}}, folder / MODEL)
    torch.save({"optimizer_state_dict": {}}, folder / OPTIMIZER, _use_new_zipfile_serialization=False)
    (folder / "of_the_program.txt").touch()
    write_record(folder, Record("0123456789ab", 2, 2, 7, {"torch": "2.11"}, {}, MANIFEST))
    record = read_record(folder)
    assert record
    return record


def test_the_page_on_the_format_computes_the_same(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], found)
    record = written(tmp_path)
    assert found["directory_of"](tmp_path / MODEL) == record.files[MODEL].directory
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:  # as the tools write it
        archive.writestr("archive/data.pkl", b"x")
    assert found["directory_of"](tmp_path / "other.pt") == describe_file(tmp_path / "other.pt").directory


def edited(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


def with_digest(**changes: Any) -> Callable[[str], str]:
    """As a later release, or a person who computes the digest, might write it."""

    def edit(text: str) -> str:

        values = {**json.loads(text), **changes}
        values = {key: value for key, value in values.items() if value is not ... and key != "digest"}
        return json.dumps({**values, "digest": digest_of(values)})

    return edit


DAMAGED: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "cannot be read, or is damaged"),
    "truncated": (lambda text: text[:-1], "cannot be read, or is damaged"),
    "no object": (lambda text: "[]", "unknown format"),
    "a later format": (edited(format=2), "unknown format.*pip install -U"),
    "edited": (edited(world_size=3), "does not match its digest"),
    "an edited manifest": (lambda text: text.replace("base.weight", "base.other"), "does not match its digest"),
    "deeply nested": (lambda text: "[" * 10**6, "cannot be read, or is damaged"),
    "numbers as words": (with_digest(world_size="2"), "a value has the wrong type"),
    "a negative size": (with_digest(files={MODEL: {"size": -1, "directory": None}}), "a value has the wrong type"),
    "no world size": (with_digest(world_size=...), "is damaged"),
    "unknown keys": (with_digest(mine=1), "is damaged"),
    "files of another kind": (with_digest(files=[1]), "is damaged"),
    "a file of another kind": (with_digest(files={MODEL: 1}), "is damaged"),
    "a damaged manifest": (with_digest(manifest={"format": 1}), "manifest is damaged"),
    "a later manifest": (with_digest(manifest={"format": 9}), "has format 9"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_damage(tmp_path: Path, how: str) -> None:
    written(tmp_path)
    change, said = DAMAGED[how]
    (tmp_path / RECORD).write_text(change((tmp_path / RECORD).read_text()))
    with pytest.raises(CheckpointError, match=said) as raised:
        read_record(tmp_path)
    assert str(tmp_path / RECORD) in str(raised.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_record(tmp_path)

"""The record of a checkpoint: to JSON and from it, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.record import KEY, LeftOut, Record, carried, describe_file, digest_of, read_record, write_record

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

MADE = Record(
    "0123456789ab",
    world_size=2,
    zero_stage=2,
    step=7,
    versions={"torch": "2.11"},
    kind="trainable-only",
    left_out=(
        LeftOut(("base.weight", "tied.weight"), (2, 3), "bfloat16", "0" * 32),
        LeftOut(("base.weight.absmax", "tied.weight.absmax"), (1,), "float32", "1" * 32, "part", "base.weight"),
        LeftOut(("ü",), (), "float32", None, "buffer"),
    ),
    total_bytes=16,
    adapters={"": {"default": "{}"}},
    compiled=frozenset(["model"]),
    loss_factor=1 / 3,
)
# What an NFS server does for a client that has written a file, until somebody else opens it.
LEASE = """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
signal.sigwait([signal.SIGIO])
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
"""
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def written(folder: Path) -> Record:
    torch.save({"module": {"w": torch.ones(3)}}, folder / MODEL)
    torch.save({"optimizer_state_dict": {}}, folder / OPTIMIZER, _use_new_zipfile_serialization=False)
    (folder / "of_the_program.txt").touch()
    write_record(folder, MADE)
    record = read_record(folder)
    assert record
    return record


def test_what_was_written_is_read(tmp_path: Path) -> None:
    record = written(tmp_path)
    assert replace(record, files={}) == MADE
    assert record.files == {name: describe_file(tmp_path / name) for name in (MODEL, OPTIMIZER)}
    assert record.names == {"base.weight", "tied.weight", "base.weight.absmax", "tied.weight.absmax", "ü"}


def test_what_a_file_carries() -> None:
    """A record, an id, nothing, or something that a program has put there."""
    assert carried({KEY: MADE.to_json()}, "one.ckpt") == MADE
    for value, save in (("0123456789ab", "0123456789ab"), (None, ""), ({"format": 1}, ""), (3, "")):
        found = carried({KEY: value}, "one.ckpt")
        assert (found.save, found.kind, found.is_lost) == (save, "unknown", bool(save))
    with pytest.raises(CheckpointError, match=r"'ds_frozen_patch' in one.ckpt was edited"):
        carried({KEY: MADE.to_json().replace("base.weight", "base.other")}, "one.ckpt")


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


def with_entry(**changes: Any) -> Callable[[str], str]:
    """One with a single entry for what was left out."""
    entry = {"names": ["a"], "shape": [1], "dtype": "float32", "fingerprint": None, "kind": "parameter", "group": ""}
    return with_digest(left_out=[{**entry, **changes}])


WRONG_TYPE = "a value has the wrong type"
DAMAGED: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "cannot be read, or is damaged"),
    "truncated": (lambda text: text[:-1], "cannot be read, or is damaged"),
    "no object": (lambda text: "[]", "unknown format"),
    "a later format": (edited(format=2), "unknown format.*git pull && pip install ."),
    "edited": (edited(world_size=3), "does not match its digest"),
    "an edited name": (lambda text: text.replace("base.weight", "base.other"), "does not match its digest"),
    "deeply nested": (lambda text: "[" * 10**6, "cannot be read, or is damaged"),
    "numbers as words": (with_digest(world_size="2"), WRONG_TYPE),
    "a negative size": (with_digest(files={MODEL: {"size": -1, "directory": None}}), WRONG_TYPE),
    "no world size": (with_digest(world_size=...), "lacks 'world_size'"),
    "unknown keys": (with_digest(mine=1), "is damaged"),
    "files of another kind": (with_digest(files=[1]), "is damaged"),
    "a file of another kind": (with_digest(files={MODEL: 1}), "is damaged"),
    "a file elsewhere": (with_digest(files={f"../{MODEL}": {"size": 1, "directory": None}}), "does not write"),
    "an unknown kind": (with_digest(kind="mine"), "of an unknown kind"),
    "no factor": (with_digest(loss_factor=0), WRONG_TYPE),
    "a factor that is no number": (with_digest(loss_factor=float("nan")), WRONG_TYPE),
    "versions of another kind": (with_digest(versions={"torch": 2}), WRONG_TYPE),
    "adapters of another kind": (with_digest(adapters={"": "{}"}), "is damaged"),
    "what was left out is a number": (with_digest(left_out=3), "is damaged"),
    "an entry is a number": (with_digest(left_out=[3]), "is damaged"),
    "a name is a number": (with_entry(names=[1]), WRONG_TYPE),
    "no name": (with_entry(names=[]), "has no name"),
    "a huge shape": (with_entry(shape=[1 << 99]), WRONG_TYPE),
    "a huge number of dimensions": (with_entry(shape=[1] * 65), "no shape"),
    "a dtype is a number": (with_entry(dtype=1), WRONG_TYPE),
    "a fingerprint is a list": (with_entry(fingerprint=["0"]), WRONG_TYPE),
    "an entry of an unknown kind": (with_entry(kind="mine"), "of an unknown kind"),
    "an entry with unknown keys": (with_entry(mine=1), "is damaged"),
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


def test_a_lease_is_waited_for(tmp_path: Path) -> None:
    record = written(tmp_path)
    holder = [sys.executable, "-c", LEASE, str(tmp_path / RECORD)]
    with subprocess.Popen(holder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "leased\n"
            assert read_record(tmp_path) == record
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()

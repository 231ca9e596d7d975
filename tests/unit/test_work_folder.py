"""A folder is put in the place of another, also where names cannot be exchanged and two jobs save to one path."""

from __future__ import annotations

import ctypes
import errno
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ds_frozen_patch.checkpoint.names import is_state
from ds_frozen_patch.publish import durable, work_folder
from ds_frozen_patch.publish.ways import remove_work
from ds_frozen_patch.publish.work_folder import left_behind, swap


def folder_of(job: str, at: Path) -> Path:
    at.mkdir(parents=True)
    (at / "mp_rank_00_model_states.pt").write_text(job)
    return at


@pytest.mark.parametrize("is_killed", [False, True])
def test_two_jobs_replace_a_folder_in_two_steps(tmp_path: Path, monkeypatch: Any, is_killed: bool) -> None:
    """Another job is faster once: this one replaces what that has written, and leaves nothing, unless it is killed."""
    target, work = folder_of("before", tmp_path / "checkpoint"), tmp_path / f"{work_folder.WORK}0123456789ab"
    new = folder_of("this", work / "new" / "checkpoint")
    (work / "old").mkdir()
    rename, attempts = Path.rename, iter(["is faster", "is killed" if is_killed else ""])

    def renamed(path: Path, to: Path) -> Any:
        happens = next(attempts) if path == new else ""
        if happens == "is killed":
            raise KeyboardInterrupt
        if happens == "is faster":
            folder_of("other", target)
        return rename(path, to)

    monkeypatch.setattr(work_folder, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", renamed)
    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            swap(new, target, work / "old")
        found = {(copy / "mp_rank_00_model_states.pt").read_text() for copy in left_behind(target)}
        assert found == {"before", "other", "this"}
        return
    swap(new, target, work / "old")
    assert (target / "mp_rank_00_model_states.pt").read_text() == "this"
    remove_work(work, is_state)
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.EIO])
def test_a_disk_that_cannot_exchange_names(tmp_path: Path, monkeypatch: Any, number: int | None) -> None:
    """NFS says so, an old C library has no such function, and what fails changes nothing."""

    def fail(*_: Any) -> int:
        ctypes.set_errno(number or 0)
        return -1

    target, work = folder_of("before", tmp_path / "checkpoint"), tmp_path / f"{work_folder.WORK}0123456789ab"
    new = folder_of("this", work / "new" / "checkpoint")
    (work / "old").mkdir()
    monkeypatch.setattr(durable, "_renameat2", lambda: number and fail)
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        swap(new, target, work / "old")
    names = {file.read_text(): file.parent for file in tmp_path.rglob("mp_rank_00_model_states.pt")}
    unchanged = {"before": target, "this": new}
    assert names == (unchanged if number == errno.EIO else {"before": work / "old" / "checkpoint", "this": target})

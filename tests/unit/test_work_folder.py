"""A folder is put in the place of another, also where names cannot be exchanged and two jobs save to one path."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ds_frozen_patch.checkpoint.names import WRITER, is_state
from ds_frozen_patch.publish import durable, work_folder
from ds_frozen_patch.publish.publication import Publication
from ds_frozen_patch.publish.ways import Way, remove_work
from ds_frozen_patch.publish.work_folder import is_locked, left_behind, swap, work_folders


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


@pytest.mark.parametrize("there", ["nothing", "a checkpoint", "a link"])
def test_what_is_published_is_synced(tmp_path: Path, monkeypatch: Any, there: str) -> None:
    """But for the files that the ranks have written, and synced, themselves."""
    target, synced = tmp_path / "run" / "checkpoint", set()
    target.parent.mkdir()
    if there == "a checkpoint":
        folder_of("before", target)
    elif there == "a link":
        target.symlink_to(folder_of("before", tmp_path / "elsewhere"))
    publication = Publication(target, target.parent, target, Way.EXCHANGED, WRITER, True, False, False, print)
    publication.open(chooses_way=True)
    for name in WRITER.late:
        (publication.destination / name).write_text("new")
    publication.latest = "checkpoint"
    latest = target.parent / "latest"

    def sync(opened: int) -> None:
        synced.add((os.fstat(opened).st_ino, bool(work_folders(target)), latest.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    publication.give_name()
    publication.close()
    assert latest.read_text() == "checkpoint"
    before_latest = {target, target.parent, *([] if there == "a link" else [latest])}  # a link's is written in place
    assert {path.stat().st_ino for path in before_latest} <= {file for file, *state in synced if not any(state)}
    assert (target.parent.stat().st_ino, False, True) in synced
    assert {path.stat().st_ino for path in (latest, *target.iterdir())} <= {file for file, *_ in synced}


def test_a_forked_process_does_not_keep_a_lock(tmp_path: Path) -> None:
    """Such as a dataloader's worker, which has the lock's descriptor too."""
    target, kept = tmp_path / "a.ckpt", tmp_path / "kept"
    publication = Publication(target, tmp_path, target, Way.UNMANAGED, WRITER, True, False, True, print)
    publication.open(chooses_way=True)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        kept.mkdir()
        (kept / "lock").hardlink_to(publication.work / "lock")
        assert is_locked(kept)
        publication.close()
        assert not publication.work.exists()
        assert not is_locked(kept)
    finally:
        worker.kill()
        worker.join()

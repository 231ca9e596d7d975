"""One entry of a folder is published, is discarded, or fails, in each way and beside what others have there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from memory import open_files

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.checkpoint.names import WRITER
from ds_frozen_patch.publish import publication as module
from ds_frozen_patch.publish import work_folder
from ds_frozen_patch.publish.publication import INCOMPLETE, NOTHING, UNCHANGED, Publication
from ds_frozen_patch.publish.ways import Way
from ds_frozen_patch.publish.work_folder import WORK, identity, is_locked, left_behind, lock, work_folders

STATES, OF_RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
WAYS = {"nothing": Way.NEW, "folder": Way.NEW, "theirs": Way.NEW, "checkpoint": Way.EXCHANGED, "link": Way.OVER}
"""How a target is written where this is."""
in_each_way = pytest.mark.parametrize("there", WAYS)


class Place:
    """A target, `run/checkpoint`, with something at it already; and what is warned of."""

    def __init__(self, path: Path, there: str) -> None:
        self.folder, self.way = path / "run", WAYS[there]
        self.target = self.folder / "checkpoint"
        self.warnings: list[tuple[str, str]] = []
        if there == "nothing":
            return
        self.folder.mkdir()
        if there == "folder":
            return
        inside = path / "elsewhere" if there == "link" else self.target
        inside.mkdir()
        if there == "link":
            self.target.symlink_to(inside)
        (inside / "theirs").write_text("theirs")
        if there != "theirs":
            for name in (STATES, OF_RANK):
                (inside / name).write_text("before")

    def publication(self, **fields: Any) -> Publication:
        """A new one, of which rank 0 has chosen the way."""
        given = {"sync": False, "is_on_own_disks": False, "is_alone": False, **fields}

        def warn(kind: str, text: str) -> None:
            self.warnings.append((kind, text))

        return Publication(self.target, self.folder, self.target, Way.EXCHANGED, WRITER, warn=warn, **given)

    def written(self, **fields: Any) -> Publication:
        """One whose files are written, but have no names yet."""
        made = self.publication(**fields)
        made.open(chooses_way=True)
        made.before = identity(made.target)
        (made.destination / STATES).write_text("new")
        (made.destination.parent / "zero_to_fp32.py").write_text("new")
        return made

    def seen(self) -> dict[str, str]:
        """The files in the folder, and in a target that is a link, by their paths."""
        files = [*self.folder.rglob("*"), *(self.target.iterdir() if self.target.is_symlink() else ())]
        return {str(file.relative_to(self.folder)): file.read_text() for file in files if file.is_file()}


def killed(folder: Path, name: str) -> Path:
    """The work folder that a killed save has left."""
    work = folder / f"{WORK}{name}"
    for inner in ("new", "old"):
        (work / inner).mkdir(parents=True)
    (work / "lock").touch()
    return work


@in_each_way
def test_what_is_published_has_its_names_and_nothing_else_changes(tmp_path: Path, there: str) -> None:
    place = Place(tmp_path, there)
    before, files = place.seen(), open_files()
    made = place.written()
    assert made.way is place.way
    if made.way is Way.EXCHANGED:
        assert place.seen().items() >= before.items()
    assert bool(work_folders(place.target)) == (made.way is not Way.EXCHANGED)
    made.latest = "checkpoint"
    made.give_name()
    assert not work_folders(place.target)
    assert made.state_of_target() == (
        (INCOMPLETE, False)
        if made.way is Way.OVER
        else (f"{place.target} is the new checkpoint already, and complete.", True)
    )
    made.discard()  # keeps what has its name
    made.close()
    assert open_files() == files
    new = {f"checkpoint/{STATES}": "new", "zero_to_fp32.py": "new", "latest": "checkpoint"}
    theirs = {name: text for name, text in before.items() if text == "theirs"}
    assert place.seen() == new | theirs
    assert place.target.is_symlink() == (there == "link")
    assert [kind for kind, _ in place.warnings] == (["a target that cannot be exchanged"] if there == "link" else [])


@in_each_way
def test_what_is_discarded_leaves_what_was_there(tmp_path: Path, there: str) -> None:
    place = Place(tmp_path, there)
    before, files = place.seen(), open_files()
    made = place.written()
    assert made.state_of_target() == ((UNCHANGED, False) if made.way is Way.EXCHANGED else (INCOMPLETE, False))
    (made.destination / WRITER.late[0]).mkdir()
    (made.destination / WRITER.late[0] / "tensor").touch()
    made.discard()
    assert open_files() == files
    if there == "link":
        assert work_folders(place.target)  # it stays incomplete
        return
    assert place.seen() == before
    assert place.folder.exists() == (there != "nothing")
    assert made.state_of_target() == ((UNCHANGED if made.way is Way.EXCHANGED else NOTHING), False)


@in_each_way
def test_what_is_published_is_synced(tmp_path: Path, monkeypatch: Any, there: str) -> None:
    """But for the files that the ranks have written, and synced, themselves."""
    place = Place(tmp_path, there)
    target, synced = place.target, set[Any]()
    publication = place.publication(sync=True)
    latest = target.parent / "latest"

    def sync(opened: int) -> None:
        synced.add((os.fstat(opened).st_ino, bool(work_folders(target)), latest.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    publication.open(chooses_way=True)
    assert publication.work.parent.stat().st_ino in {file for file, *_ in synced}
    synced.clear()
    for name in WRITER.late:
        (publication.destination / name).write_text("new")
    publication.latest = "checkpoint"
    publication.give_name()
    publication.close()
    assert latest.read_text() == "checkpoint"
    before_latest = {target, target.parent, *([latest] if there != "link" else [])}  # a link's is written in place
    assert {path.stat().st_ino for path in before_latest} <= {file for file, *state in synced if not any(state)}
    assert (target.parent.stat().st_ino, False, True) in synced
    assert {path.stat().st_ino for path in (latest, *map(target.joinpath, WRITER.late))} <= {
        file for file, *_ in synced
    }


def test_a_folder_that_is_replaced_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    place = Place(tmp_path, "checkpoint")
    place.target.chmod(0o2750)
    if os.geteuid() == 0:
        os.chown(place.target, 12, 34)
    before = place.target.stat()
    made = place.written()
    made.give_name()
    made.close()
    after = place.target.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize(("is_there", "can_exchange"), [(False, True), (True, True), (True, False)])
def test_a_file_is_published(tmp_path: Path, monkeypatch: Any, is_there: bool, can_exchange: bool) -> None:
    """Weights alone; `run/checkpoint` is a file."""
    if not can_exchange:
        monkeypatch.setattr(work_folder, "exchange", lambda *_: False)
    place, synced = Place(tmp_path, "nothing"), set[int]()
    place.folder.mkdir()
    if is_there:
        place.target.write_text("before")
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    made = place.publication(sync=True)
    made.open(chooses_way=False)
    made.before = identity(place.target)
    made.destination.write_text("new")
    assert made.state_of_target() == (UNCHANGED if is_there else NOTHING, False)
    made.give_name()
    made.close()
    assert place.seen() == {"checkpoint": "new"}
    assert place.target.stat().st_ino in synced


def test_a_forked_process_does_not_keep_a_lock(tmp_path: Path) -> None:
    """Such as a dataloader's worker, which has the lock's descriptor too."""
    kept = tmp_path / "kept"
    publication = Place(tmp_path, "nothing").publication()
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


@pytest.mark.parametrize("is_on_own_disks", [False, True])
def test_what_was_replaced_stays_if_another_disk_may_not_have_the_new_one(
    tmp_path: Path, is_on_own_disks: bool
) -> None:
    place = Place(tmp_path, "checkpoint")
    made = place.written(is_on_own_disks=is_on_own_disks)
    made.give_name()
    made.discard()
    assert left_behind(place.target) == ([made.work / "old" / "checkpoint"] if is_on_own_disks else [])


@pytest.mark.parametrize("is_alone", [False, True])
@in_each_way
def test_what_is_exported_is_in_the_target_or_beside_it(tmp_path: Path, there: str, is_alone: bool) -> None:
    place = Place(tmp_path, there)
    made = place.written(is_alone=is_alone)
    exported = place.folder / "adapter" if is_alone else place.target / "adapter"
    (made.export / "adapter").mkdir(parents=True)
    (made.export / "adapter" / "file").write_text("new")
    assert made.final(made.export / "file") == place.folder / "file"
    assert made.final(made.destination / STATES) == place.target / STATES
    assert made.final("/elsewhere") == Path("/elsewhere")
    made.give_name()
    made.close()
    assert [*exported.iterdir()] == [exported / "file"]
    (exported / "theirs").touch()
    again = place.written(is_alone=is_alone)
    (again.export / "adapter").mkdir(parents=True)
    (again.export / "adapter" / "file").write_text("newer")
    again.give_name()
    again.close()
    assert (exported / "file").read_text() == "newer"
    assert (exported / "theirs").exists()
    made.way = Way.UNMANAGED
    assert made.export == exported.parent
    assert made.state_of_target() == (INCOMPLETE, False)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    place = Place(tmp_path, "theirs")
    (place.target / "adapter").symlink_to(tmp_path)
    made = place.written()
    (made.export / "adapter").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="adapter is a link"):
        made.give_name()


def test_what_is_behind_a_link_of_others_stays_there(tmp_path: Path) -> None:
    place, elsewhere = Place(tmp_path, "checkpoint"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "theirs").touch()
    (place.target / "adapter").symlink_to(elsewhere)
    made = place.written()
    (made.export / "adapter").mkdir(parents=True)
    made.give_name()
    made.close()
    assert (elsewhere / "theirs").exists()
    assert not (place.target / "adapter").is_symlink()


@in_each_way
def test_a_work_folder_that_somebody_removes_is_an_error(tmp_path: Path, there: str) -> None:
    place = Place(tmp_path, there)
    before = place.seen()
    made = place.written()
    shutil.rmtree(made.work)
    with pytest.raises(FileNotFoundError):
        made.give_name()
    assert made.way is not Way.EXCHANGED or place.seen() == before


@pytest.mark.parametrize("is_over", [True, False])
def test_another_job_that_writes_the_target_is_waited_for(tmp_path: Path, monkeypatch: Any, is_over: bool) -> None:
    place = Place(tmp_path, "checkpoint")
    first, other = place.written(), place.target / f"{WORK}other"
    assert not place.warnings
    other.mkdir()
    descriptor = lock(other)
    second = place.publication()
    second.open(chooses_way=True)
    ((_, warning),) = place.warnings
    assert warning.startswith(f"Another job is saving {place.target} at the same time")
    monkeypatch.setattr(module, "_WAIT_SECONDS", 60.0 if is_over else 0.2)
    if is_over:
        threading.Timer(0.3, os.close, [descriptor]).start()
    with nullcontext() if is_over else pytest.raises(CheckpointError, match="has been saving"):
        first.give_name()
    assert (place.target / STATES).read_text() == ("new" if is_over else "before")
    assert is_locked(other) == (not is_over)
    if not is_over:
        os.close(descriptor)
    first.close()
    second.close()


@pytest.mark.parametrize("is_same", [True, False])
def test_two_jobs_that_replace_one_target_are_warned(tmp_path: Path, is_same: bool) -> None:
    place = Place(tmp_path, "checkpoint")
    first, second = place.publication(), place.publication()
    if not is_same:
        second.target = place.folder / "other"
    for made in (first, second):
        made.open(chooses_way=True)
    assert len(place.warnings) == is_same
    first.close()
    second.close()


def test_another_node_writes_as_rank_0_has_chosen(tmp_path: Path) -> None:
    """Its own disk may have files of a save that is not on rank 0's, or no folder."""
    place = Place(tmp_path, "checkpoint")
    made = place.publication(is_on_own_disks=True)
    made.way = Way.NEW
    made.open(chooses_way=False)
    assert place.seen() == {"checkpoint/theirs": "theirs", f"checkpoint/{made.work.name}/lock": ""}
    made.close()
    made = Place(tmp_path / "empty", "nothing").publication()
    made.open(chooses_way=False)
    assert made.work.is_dir()
    made.close()


@pytest.mark.parametrize("is_on_own_disks", [False, True])
def test_what_killed_saves_have_left_is_removed(tmp_path: Path, is_on_own_disks: bool) -> None:
    """On several disks only what is not of another target, which a load may need; nowhere what is still in use."""
    place, files = Place(tmp_path, "nothing"), open_files()
    dead, of_other, running = (killed(place.folder, name) for name in ("dead", "of other", "running"))
    (of_other / "old" / "other").mkdir()
    (place.folder / "other").mkdir()
    descriptor = lock(running)
    made = place.publication(is_on_own_disks=is_on_own_disks)
    made.open(chooses_way=True)
    mark = killed(place.target, "mark")
    made.give_name()
    assert not mark.exists()
    assert left_behind(place.target) == []
    others = place.target.with_name("checkpoint2")
    others.mkdir()
    (others / STATES).touch()
    made.close()
    os.close(descriptor)
    assert open_files() == files
    assert not dead.exists()
    assert of_other.exists() == is_on_own_disks
    assert running.exists()
    assert others.exists()


def test_disks_of_nodes(tmp_path: Path) -> None:
    place = Place(tmp_path, "nothing")
    first, second = place.publication(), place.publication()
    assert second.is_on_another_disk()
    assert place.folder.is_dir()
    second.id = first.id
    first.open(chooses_way=True)
    second.way = first.way
    assert not second.is_on_another_disk()
    second.target = tmp_path / "file" / "checkpoint"
    second.target.parent.touch()
    assert second.is_on_another_disk()


def test_a_current_folder_that_changes_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place(Path(), "nothing")
    made = place.written()
    made.use_absolute_paths()
    monkeypatch.chdir("/")
    made.discard()
    assert not [*tmp_path.iterdir()]

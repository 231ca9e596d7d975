"""One entry of a folder is published, is discarded, or fails, in each way and beside what others have there."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from memory import open_files

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.checkpoint.names import WRITER
from ds_frozen_patch.publish.publication import INCOMPLETE, NOTHING, UNCHANGED, Publication
from ds_frozen_patch.publish.ways import Way
from ds_frozen_patch.publish.work_folder import WORK, identity, left_behind, lock, work_folders

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


@pytest.mark.parametrize("there", ["theirs", "checkpoint"])
def test_a_link_is_not_written_through(tmp_path: Path, there: str) -> None:
    """Where a folder is exchanged as a whole, its link is replaced, and what is behind it stays."""
    place, elsewhere = Place(tmp_path, there), tmp_path / "of others"
    elsewhere.mkdir()
    (elsewhere / "theirs").touch()
    (place.target / "adapter").symlink_to(elsewhere)
    made = place.written()
    (made.export / "adapter").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="adapter is a link") if there == "theirs" else nullcontext():
        made.give_name()
        made.close()
    assert [file.name for file in elsewhere.iterdir()] == ["theirs"]
    assert (place.target / "adapter").is_symlink() == (there == "theirs")


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

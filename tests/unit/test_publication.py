"""A save is killed at any step, or fails where files cannot be renamed, beside what others have left there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.publish.journal import digest_of, finish, is_unfinished, journals, names_now
from ds_frozen_patch.publish.notes import Note, note_of, notes
from ds_frozen_patch.publish.publication import INCOMPLETE, NOTHING, Publication

STATES, OF_RANK = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
GONE = 2**22 + 1
"""A process id that no process has: it is above the largest one."""


class Killed(BaseException):
    """Stands for the end of the process."""


class Place:
    """A target, `run/checkpoint`, with something at it already; and what is warned of."""

    def __init__(self, path: Path, there: str) -> None:
        self.folder = path / "run"
        self.target = self.folder / "checkpoint"
        self.warnings: list[tuple[str, str]] = []
        if there == "nothing":
            return
        self.target.mkdir(parents=True)
        (self.target / "theirs").write_text("theirs")
        if there != "theirs":
            for name in (STATES, OF_RANK, RECORD):
                (self.target / name).write_text("before")

    def publication(self, sync: bool = False) -> Publication:
        given: dict[str, Any] = {"sync": sync, "is_on_own_disks": False, "is_alone": False, "is_tag": True}

        def warn(kind: str, text: str) -> None:
            self.warnings.append((kind, text))

        return Publication(self.target, self.folder, self.target, is_managed=True, warn=warn, **given)

    def written(self, text: str = "new", sync: bool = False) -> Publication:
        """One whose files are written, but have no names yet."""
        made = self.publication(sync)
        made.open()
        made.path(STATES).write_text(text)
        return made

    def save(self, text: str = "new", sync: bool = False) -> None:
        made = self.written(text, sync)
        made.latest = "checkpoint"
        made.prepare(text)
        made.give_names()
        assert made.state_of_target() == (f"{self.target} is the new checkpoint, and complete.", True)

    def seen(self) -> dict[str, str]:
        """The files in the folder, by their paths."""
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(self.folder)): file.read_text() for file in files}


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """End the process, as it were, before the change of that number to the file system; yield those before it."""
    done: list[str] = []
    patched = {
        (Path, name): getattr(Path, name) for name in ("replace", "rename", "unlink", "write_text", "mkdir", "touch")
    }
    patched[os, "link"] = os.link  # type: ignore[index]

    def counting(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if len(done) == number:
                raise Killed
            done.append(f"{name} {args[0]}")
            return change(*args, **kwargs)

        return changed

    for (owner, name), change in patched.items():
        setattr(owner, name, counting(name, change))
    try:
        with suppress(Killed):
            yield done
    finally:
        for (owner, name), change in patched.items():
            setattr(owner, name, change)


@pytest.mark.parametrize("there", ["nothing", "theirs", "checkpoint"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one(tmp_path: Path, there: str) -> None:
    states = []
    for number in itertools.count():
        place = Place(tmp_path / str(number), there)
        with killed_at(number) as done:
            place.save()
        for path, note in notes(place.folder).items():
            replace(note, process=GONE).write(path)
        theirs = place.target / "theirs"
        assert not theirs.parent.exists() or there == "nothing" or theirs.read_text() == "theirs"
        copy = Path(shutil.copytree(place.target, tmp_path / f"copy{number}")) if place.target.exists() else None
        for folder in filter(None, (copy, place.target if place.target.exists() else None)):
            as_read = {name: file.read_text() for name, file in names_now(folder).items()}
            finish(folder)
            assert {file.name: file.read_text() for file in folder.glob("[!.]*.[pj]*")} == as_read
            assert not journals(folder)
        if place.target.exists():
            states.append(as_read)
        place.save("newer")
        after = place.seen()
        assert after.pop("checkpoint/theirs", "theirs") == "theirs"
        expected = {f"checkpoint/{STATES}": "newer", f"checkpoint/{RECORD}": "newer", "latest": "checkpoint"}
        assert after == expected, (number, done)
        if len(done) < number:
            break
    old = dict.fromkeys((STATES, OF_RANK, RECORD), "before") if there == "checkpoint" else {}
    new = dict.fromkeys((STATES, RECORD), "new")
    changes = [state for state, _ in itertools.groupby(states)]
    assert changes == [old, new]


def refuse(number: int) -> Callable[..., Any]:
    def replace(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return replace


@pytest.mark.parametrize("there", ["nothing", "theirs", "checkpoint"])
def test_a_failure_where_files_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    """`faults/test_file_systems.py` shows what succeeds there."""
    place = Place(tmp_path, there)
    monkeypatch.setattr(Path, "replace", refuse(errno.ENOSYS))
    made = place.written()
    assert is_unfinished(place.target)
    assert made.state_of_target() == (INCOMPLETE, False)
    made.prepare("record")
    made.discard()
    assert made.state_of_target() == (NOTHING, False)
    assert place.seen() == ({"checkpoint/theirs": "theirs"} if there != "nothing" else {})
    assert not is_unfinished(place.target)
    assert [kind for kind, _ in place.warnings] == ["files that cannot be renamed"]


@pytest.mark.parametrize("there", ["nothing", "theirs", "checkpoint"])
def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    """A folder is not taken for empty: where one listing fails, a save is complete, or fails and leaves the old one."""
    iterdir = Path.iterdir
    for number in itertools.count():
        place, listings = Place(tmp_path / str(number), there), itertools.count()

        def fail(folder: Path, number: int = number, listings: Iterator[int] = listings) -> Iterator[Path]:
            if next(listings) == number:
                refuse(errno.EIO)()
            return iterdir(folder)

        with monkeypatch.context() as patched, suppress(OSError):
            patched.setattr(Path, "iterdir", fail)
            saved = False
            place.save()
            saved = True
        finish(place.target)
        found = {place.seen().get(f"checkpoint/{name}") for name in (STATES, RECORD)}
        assert found == {"new"} or (not saved and found == {"before" if there == "checkpoint" else None}), number
        if next(listings) <= number:
            break
    assert number > 4


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, "checkpoint")
    before = place.seen()
    monkeypatch.setattr(Path, "touch", refuse(errno.ENOSPC))
    made = place.publication()
    with pytest.raises(OSError, match="No space"):
        made.open()
    made.discard()
    assert place.seen() == before


@pytest.mark.parametrize("why", [errno.EIO, errno.EINVAL])
def test_a_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    """A disk error makes the save fail; a file system that cannot sync folders does not."""
    sync = os.fsync

    def fail(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(why, os.strerror(why))
        sync(opened)

    monkeypatch.setattr(os, "fsync", fail)
    place = Place(tmp_path, "checkpoint")
    with pytest.raises(OSError, match="Input/output") if why == errno.EIO else nullcontext():
        place.save(sync=True)


def test_a_save_that_replaces_another_jobs_warns(tmp_path: Path) -> None:
    place = Place(tmp_path, "checkpoint")
    jobs = {text: place.written(text) for text in ("first", "second")}
    for text, made in jobs.items():
        made.prepare(text)
    place.warnings.clear()
    for made in jobs.values():
        made.give_names()
        warned = ["Another job is saving" in text for _, text in place.warnings]
        assert warned == ([True] if made is jobs["second"] else [])
    expected = {f"checkpoint/{name}": "second" for name in (STATES, RECORD)}
    assert place.seen() == {**expected, "checkpoint/theirs": "theirs"}


def test_what_killed_saves_have_left_is_removed(tmp_path: Path) -> None:
    """And nothing of a save that may still run: of another process here, or of another machine."""
    place, others = Place(tmp_path, "theirs"), {}
    here, day = Note.of_this_process("checkpoint", True, False), 90000
    cases = {
        "running": (here, 0),
        "elsewhere": (replace(here, machine="another"), 0),
        "elsewhere, old": (replace(here, machine="another"), day),
        "gone": (replace(here, process=GONE), 0),
        "another of this id": (replace(here, process=1, started="0"), 0),
        "being written": (Note("", "", False, 0, "", ""), 0),
        "killed as it was written": (Note("", "", False, 0, "", ""), 90),
        "no note": (None, 0),
        "no note, old": (None, day),
    }
    for kind, (note, age) in cases.items():
        save = uuid4().hex[:12]
        others[kind] = [place.target / f".{STATES}.{save}"]
        others[kind][0].touch()
        if note is not None:
            others[kind].append(note_of(place.folder, save))
            note.write(others[kind][1]) if note.process else others[kind][1].touch()
        for file in others[kind]:
            os.utime(file, (time.time() - age,) * 2)
    foreign = place.target / ".mine.0123456789ab"
    foreign.touch()
    made = place.publication()
    made.open()
    left = {kind: [file.exists() for file in files] for kind, files in others.items()}
    assert {kind for kind, there in left.items() if any(there)} == {"running", "elsewhere", "being written", "no note"}
    assert all(there == [True] * len(there) for there in left.values() if any(there))
    assert foreign.exists()
    assert len(place.warnings) == 1
    assert "Another job is saving" in place.warnings[0][1]


@pytest.mark.parametrize("name", ["../theirs", "/etc/passwd", "../../latest", "theirs", "../adapter/../theirs", ""])
def test_a_journal_names_only_what_a_save_writes(tmp_path: Path, name: str) -> None:
    place = Place(tmp_path, "checkpoint")
    values = {"save": "0" * 12, "before": "none", "after": "none", "names": [], "removed": [name]}
    (place.target / RECORD).unlink()
    (place.target / ".ds_frozen_patch-journal-none").write_text(json.dumps(values))
    before = place.seen()
    finish(place.target)
    assert place.seen() == before


def test_a_journal_that_another_save_has_overtaken_is_not_followed(tmp_path: Path) -> None:
    place = Place(tmp_path, "checkpoint")
    values = {"save": "0" * 12, "before": digest_of(b"first"), "after": digest_of(b"second"), "names": []}
    journal = place.target / f".ds_frozen_patch-journal-{values['before']}"
    before = place.seen()
    journal.write_text(json.dumps({**values, "removed": [STATES]}))
    finish(place.target)
    assert place.seen() == before
    (place.target / RECORD).write_text("first")
    journal.write_text(json.dumps({**values, "removed": [STATES]}))
    finish(place.target)
    assert place.seen().keys() == before.keys() - {f"checkpoint/{STATES}"}

"""What one save writes at one path, from the hidden names of its files to their final ones, on one disk.

See `journal` for what is on disk meanwhile. A single file is written under a hidden name, and renamed. Where files
cannot be renamed, they are written over in place.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from ..common.files import OFFLOADED, RECORD, is_state, is_state_file
from .durable import entries, listed, make_folder, sync_file, sync_folder, sync_tree
from .journal import (
    SINGLE,
    Journal,
    commit,
    digest,
    digest_of,
    finish,
    folders_of,
    hidden,
    hidden_files,
    is_unfinished,
    journals,
    read,
    remove,
    remove_states,
)
from .notes import OURS, Note, note_of, notes

if TYPE_CHECKING:
    from ..buckets import Upload

UNCHANGED = "The previous checkpoint there is unchanged."
NOTHING = "There is no checkpoint there now."
INCOMPLETE = "What is there now is incomplete."
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_CANNOT_RENAME = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EXDEV, errno.EMFILE, errno.EACCES, errno.EPERM)
"""What file systems say that do not rename a file over another: gcsfuse EMFILE, mountpoint-s3 ENOSYS, SMB EACCES."""
_OLD_SECONDS = 86400.0
_WRITTEN_SECONDS = 60.0
"""Longer than it takes to write a note."""


def is_local(path: object) -> bool:
    """Whether a path is one of a mounted file system, and not an address such as s3://bucket/name, a `Path` or not."""
    return _ADDRESS.match(str(path)) is None


@dataclass
class Publication:
    """What is written, and where.

    Attributes:
        target: the folder of a tag, or a file; the same on every rank.
        folder: that the program has named, in which the target is.
        shown: what messages name: the target, or the folder.
        is_tag: whether the target is the folder of a tag.
        is_managed: whether we give the files their names; else their writer does, which may not have written yet.
        sync: whether files are synced.
        is_on_own_disks: whether each node has a disk of its own, with a target of its own.
        is_alone: whether the folder is the target's alone, and has what is beside it.
        warn: logs a warning, the second argument, once of each kind, the first; of no kind, each time.
        id: unique among all publications, the same on every rank: 12 hexadecimal digits.
        in_place: whether files are written over, since they cannot be renamed there.
        latest: what the file `latest` is to say; None to leave it.
        exports: the files that are exported, by their paths from `EXPORTS`; False for those that are to be removed.
        is_decided: whether the new checkpoint exists: its files have their names, or get them from whoever comes next.
        upload: itself, if the target is at an address.
    """

    target: Path
    folder: Path
    shown: Path
    is_tag: bool
    is_managed: bool
    sync: bool
    is_on_own_disks: bool
    is_alone: bool
    warn: Callable[[str, str], object]
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    in_place: bool = False
    latest: str | None = None
    exports: dict[str, bool] = field(default_factory=dict)
    is_decided: bool = False
    upload: Upload | None = None
    _created: list[Path] = field(default_factory=list)
    _beside: set[str] = field(default_factory=set)
    _record: str | None = None

    def follow(self, paths: Sequence[str]) -> None:
        """Write to the `paths` of another rank."""
        self.target, self.folder, self.shown = map(Path, paths)

    @property
    def home(self) -> Path:
        """The folder in which files are written."""
        return self.target if self.is_tag else self.target.parent

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """The target, the folder, and what messages name."""
        return self.target, self.folder, self.shown

    def path(self, name: str) -> Path:
        """Where to write the file that is to have this name in the target, or be the target."""
        final = self.home / name
        if self.in_place or not self.is_managed:
            return final
        return hidden(final if self.is_tag else self.home / SINGLE, self.id)

    def export(self, name: str) -> Path:
        """Where to write an export, in the folder if that has no other checkpoint, else in the target."""
        final = (self.folder if self._exports_beside else self.home) / name
        return final if self.in_place or not self.is_managed else hidden(final, self.id)

    @property
    def _exports_beside(self) -> bool:
        return self.is_alone and self.folder == self.target.parent

    def final(self, path: str | os.PathLike[str]) -> Path:
        """Where a file is to be that is written elsewhere, for messages."""
        name = Path(path).name
        if name == f".{SINGLE}.{self.id}":
            return self.target
        return Path(path).with_name(name[1 : -len(self.id) - 1]) if name.endswith(f".{self.id}") else Path(path)

    def written(self) -> dict[str, Path]:
        """What the ranks of this disk have written for the target, by final names.

        Raises:
            OSError: the folder cannot be listed.
        """
        there = self.home.iterdir()  # not `entries`: a folder that a failing disk cannot list is not empty
        if self.in_place or not self.is_managed:
            return {item.name: item for item in there if is_state_file(item.name)}
        mine = {name: item for item, name, save in hidden_files(there) if save == self.id}
        return {name: item for name, item in mine.items() if is_state_file(name)}

    def use_absolute_paths(self) -> None:
        """Let all paths but what messages name be absolute."""
        self.target, self.folder = self.target.absolute(), self.folder.absolute()
        self._created = [folder.absolute() for folder in self._created]

    # The beginning

    def is_on_another_disk(self) -> bool:
        """Whether rank 0, which has opened it, has done so on another disk than this process's."""
        with suppress(OSError):
            make_folder(self.home, self.sync, self._created)
            # Listing them also renews what a network disk's client has cached.
            return not any(note.name in listed(note.parent) for note in self._notes())
        return True

    def _notes(self) -> tuple[Path, Path]:
        """Where the note is, or where the first of these cannot be written."""
        return note_of(self.target.parent, self.id), note_of(self.home, self.id)

    def open(self) -> None:
        """Prepare where it is written."""
        make_folder(self.home, self.sync, self._created)
        self._beside = {script.name for script in self._scripts()}
        if self.is_tag:
            finish(self.home, self.sync)
        self._look_for_others()
        self._write_note()
        self.in_place = self.in_place or not self._can_rename()
        if self.in_place and self.is_tag:
            self._write_note()
            self._make_room()

    def _write_note(self) -> None:
        for note in self._notes():
            with suppress(OSError):
                Note.of_this_process(self.target.name, self.is_tag, self.in_place).write(note)
                break

    def _can_rename(self) -> bool:
        """Try whether a file can be renamed over another in the folder."""
        if self.is_tag and (self.home / OFFLOADED).exists():
            return False  # DeepSpeed writes this folder itself, and not over another
        one, other = (hidden(self.home / f"{OURS[1:]}-{name}", self.id) for name in ("try", "over"))
        try:
            for file in (one, other):
                file.touch()
            one.replace(other)
        except PermissionError:  # perhaps the files that are there may be written all the same
            return False
        except OSError as error:  # raised if it may be over soon: what is there must stay
            if error.errno not in _CANNOT_RENAME or not other.exists():
                raise
            return False
        finally:
            for file in (one, other):
                with suppress(OSError):
                    file.unlink()
        return True

    def _make_room(self) -> None:
        """Remove what is to be written over: the record first, since a checkpoint without one is not whole."""
        self.warn(
            "files that cannot be renamed",
            f"Files in {self.home} cannot be renamed, so they are overwritten in place: a save that is killed or fails"
            " leaves no checkpoint there that can be loaded.",
        )
        with suppress(OSError):
            remove(self.home / RECORD)
            sync_folder(self.home)
            remove_states(self.home)

    def _look_for_others(self) -> None:
        """Warn of other jobs that save to the same path, and remove what killed ones have left."""
        parent, running, dead = self.target.parent, set[str](), dict[str, str]()
        for path, note in notes(parent).items():
            save, is_running = path.name.rpartition("-")[2], note.is_running()
            if is_running is False or (is_running is None and _is_old(path, note)):
                dead[save] = note.tag
            else:
                running.add(save)
                if is_running and (note.tag or note.file) == self.target.name:
                    self._warn_of_other_job()
        # On disks of their own, a load can need what a killed save has prepared for another tag.
        tags = [] if self.is_on_own_disks else [parent / tag for tag in dead.values() if tag]
        for folder in self._folders().union(*map(folders_of, tags)):
            for item, _, save in hidden_files(entries(folder)):
                if save in dead or (save not in running and _is_old(item)):
                    with suppress(OSError):
                        item.unlink()
        for save, tag in dead.items():
            if not is_unfinished(parent / tag) or parent / tag == self.home:
                with suppress(OSError):
                    note_of(parent, save).unlink()

    def _folders(self) -> set[Path]:
        """Where hidden files of saves to the target can be."""
        return folders_of(self.target) if self.is_tag else {self.home}

    def _warn_of_other_job(self) -> None:
        self.warn(
            "",
            f"Another job is saving {self.shown} at the same time, and the later one of the two will replace the"
            " other. Give each run a directory of its own.",
        )

    # The final names

    def prepare(self, record: str | None) -> None:
        """Let everything be on disk that is to get a name, with the record if there is to be one."""
        if not self.is_tag:
            if self.sync:
                sync_tree(self.path(self.target.name))
            return
        self._record = record
        late = [*self.home.glob(OFFLOADED)]
        if self.latest is not None and not self._is_latest(self.latest):
            with suppress(PermissionError):
                self._hidden_latest.write_text(self.latest)  # here, where a full disk has changed nothing yet
                late.append(self._hidden_latest)
        if record is not None and not self.in_place:
            late.append(self.path(RECORD))
            late[-1].write_text(record, encoding="utf-8")
        for item in late if self.sync else ():
            sync_tree(item)
        if not self.in_place:
            self._journal(record).prepare(self.home, self.sync)
            if self.sync:
                sync_folder(self.home)

    def _journal(self, record: str | None) -> Journal:
        names = {*self.written(), *([RECORD] if record is not None else [])}
        removed = {item.name for item in self.home.iterdir() if is_state(item.name)} - names - {OFFLOADED}
        for name, is_written in self.exports.items():
            (names if is_written else removed).add(f"../{name}" if self._exports_beside else name)
        after = digest_of(None if record is None else record.encode())
        return Journal(self.id, digest(self.home), after, tuple(sorted(names)), tuple(sorted(removed)))

    def give_names(self) -> None:
        """Let the new checkpoint exist, and write `latest`."""
        if not self.is_tag:
            if not self.in_place:
                self.path(self.target.name).replace(self.target)
            self.is_decided = True
            if self.sync:
                sync_folder(self.home)
        elif self.in_place:
            for name in (name for name, is_written in self.exports.items() if not is_written):
                self.export(name).unlink(missing_ok=True)
            if self._record is not None:
                (self.home / RECORD).write_text(self._record, encoding="utf-8")
                if self.sync:
                    sync_file(self.home / RECORD)
            if self.sync:
                sync_folder(self.home)
            self.is_decided = True
        else:
            if not commit(self.home, self.id, self.sync):
                self._warn_of_other_job()
            self.is_decided = True
            finish(self.home, self.sync)
        if self.latest is not None:
            self._name_latest(self.latest)
        self._close()

    def _close(self) -> None:
        for note in (self._hidden_latest, *self._notes()):
            with suppress(OSError):
                note.unlink()

    def _name_latest(self, tag: str) -> None:
        latest = self.folder / "latest"
        if self._is_latest(tag):
            return
        is_written_over = self.in_place or latest.is_symlink()
        try:
            if not is_written_over and not self._hidden_latest.exists():  # another job has changed it since `prepare`
                self._hidden_latest.write_text(tag)
        except PermissionError:
            is_written_over = True  # the file that is there may be written all the same
        if is_written_over:
            latest.write_text(tag)
        else:
            self._hidden_latest.replace(latest)
        if self.sync:
            sync_file(latest)
            sync_folder(self.folder)

    def _is_latest(self, tag: str) -> bool:
        latest = self.folder / "latest"
        return latest.is_file() and latest.read_text(errors="replace") == tag

    @property
    def _hidden_latest(self) -> Path:
        return hidden(self.folder / "latest", self.id)

    def _scripts(self) -> list[Path]:
        """DeepSpeed's converters, beside the folder of a tag."""
        return [item for item in entries(self.target.parent) if re.fullmatch(r"zero_to_.*\.py", item.name)]

    # A save that fails

    def discard(self) -> None:
        """Remove what was written, unless it has its name."""
        if not self.state_of_target()[1]:
            items = [item for folder in self._folders() for item in entries(folder)]
            mine = [item for item, _, save in hidden_files(items) if save == self.id]
            scripts = [script for script in self._scripts() if script.name not in self._beside]
            for item in (*mine, *scripts):
                with suppress(OSError):
                    remove(item)
            if self.in_place and self.is_tag:
                remove_states(self.home)
        self._close()
        for folder in reversed(self._created):
            with suppress(OSError):  # a framework has written there too
                folder.rmdir()

    def state_of_target(self) -> tuple[str, bool]:
        """What is at the target now, as a sentence, and whether it is the new checkpoint."""
        if self.is_decided or (self.is_managed and self._is_there()):
            return f"{self.shown} is the new checkpoint, and complete.", True
        # `Path.is_file` raises on a broken disk.
        has_own = os.path.isfile(self.target) or any(is_state_file(item.name) for item in entries(self.target))  # noqa: PTH113
        if not has_own:
            return NOTHING, False
        return (INCOMPLETE if self.in_place or not self.is_managed else UNCHANGED), False

    def _is_there(self) -> bool:
        """Whether another rank has given the files of this save their names, or a journal says so."""
        with suppress(OSError):
            if any(journal and journal.save == self.id for journal in map(read, journals(self.home))):
                return True
            return f'"save": "{self.id}"' in (self.home / RECORD).read_text(encoding="utf-8")
        return False


def finish_as(folder: Path, save: str) -> None:
    """Commit the prepared journal of a save, if there is one: it is committed on the disk of another node."""
    with suppress(FileNotFoundError):  # there is none, or another rank has finished it
        commit(folder, save, sync=True)
    finish(folder)


def _is_old(path: Path, note: Note | None = None) -> bool:
    limit = _WRITTEN_SECONDS if note and not note.process else _OLD_SECONDS
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > limit
    return False

"""One entry of a folder, from the place where it is written to its final name, on one disk.

1. It is written in its place, with a mark meanwhile; or, if something is there, in a work folder (see `work_folder`).
2. Once everything is written, the mark is removed, or the two are exchanged, and then `latest` names it.

So whenever a process is killed or the power fails, what has the name is whole, or has a mark. Nothing else in the
folder that the program has named is touched, and nothing changes there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from ..common.errors import CheckpointError
from .durable import listed, make_folder, sync_file, sync_folder, sync_tree
from .ways import Way, choose_way, make_like, missing_folders, put, remove_work
from .work_folder import (
    WORK,
    Writer,
    entries,
    identity,
    is_dead,
    is_locked,
    lock,
    remove_own,
    replaced,
    swap,
    work_folders,
)

UNCHANGED = "The previous checkpoint there is unchanged."
NOTHING = "There is no checkpoint there now."
INCOMPLETE = "What is there now is incomplete."
_WAIT_SECONDS = 60.0
"""How long to wait for another job that is writing the folder which is to be replaced."""


@dataclass
class Publication:
    """What is published, and where.

    Attributes:
        target: the entry, a folder or a file; the same on every rank.
        folder: that the program has named, in which the target is.
        shown: what messages name: the target, or the folder.
        way: how the target is written.
        writer: whose entries are published.
        sync: whether files are synced.
        is_on_own_disks: whether each node has a disk of its own, with a target of its own.
        is_alone: whether the folder is the target's alone, and has what is beside it.
        warn: logs a warning, the second argument, once of each kind, the first; of no kind, each time.
        id: unique among all publications, the same on every rank: 12 hexadecimal digits.
        before: the identity of what is at the target as the save begins.
        latest: what the file `latest` is to say; None to leave it.
    """

    target: Path
    folder: Path
    shown: Path
    way: Way
    writer: Writer
    sync: bool
    is_on_own_disks: bool
    is_alone: bool
    warn: Callable[[str, str], object]
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    before: tuple[int, ...] = ()
    latest: str | None = None
    _created: list[Path] = field(default_factory=list)
    _had_own: bool = True
    _beside: set[Path] = field(default_factory=set)
    _is_named: bool = False
    _lock: int | None = None

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """The target, the folder, and what messages name."""
        return self.target, self.folder, self.shown

    @property
    def work(self) -> Path:
        """The work folder, which is the mark as long as the target is not whole."""
        is_mark = self.way is Way.OVER or (self.way is Way.NEW and not self._is_named)
        return (self.target if is_mark else self.target.parent) / f"{WORK}{self.id}"

    @property
    def destination(self) -> Path:
        """Where the target is written."""
        return self.work / "new" / self.target.name if self.way is Way.EXCHANGED else self.target

    @property
    def export(self) -> Path:
        """Where to write what is to be beside the target; or in it, if the folder has many."""
        if self.way is Way.UNMANAGED:
            return self.folder if self.is_alone else self.target
        return self.work / "export"

    def final(self, path: str | os.PathLike[str]) -> Path:
        """Where a file is to be that is written elsewhere, for messages."""
        places = [place for place in (self.export, self.destination.parent) if place in Path(path).parents]
        return self.folder / Path(path).relative_to(places[0]) if places else Path(path)

    def use_absolute_paths(self) -> None:
        """Let all paths but what messages name be absolute."""
        self.target, self.folder = self.target.absolute(), self.folder.absolute()
        self._created = [folder.absolute() for folder in self._created]
        self._beside = {item.absolute() for item in self._beside}

    def is_on_another_disk(self) -> bool:
        """Whether rank 0, which has opened it, has done so on another disk than this process's."""
        self._created = missing_folders(self.target)
        with suppress(OSError):
            make_folder(self.work.parent, self.sync)  # which also renews what a network disk's client has cached
            return self.work.name not in listed(self.work.parent)
        return True

    def open(self, chooses_way: bool) -> None:
        """Prepare where it is written.

        Args:
            chooses_way: whether to choose the way, for a folder.
        """
        self._created = self._created or missing_folders(self.target)
        if chooses_way:
            self.way = choose_way(self.target, self.folder, self.writer.owns)
        self._had_own = self.target.is_file() or any(self.writer.owns(item.name) for item in entries(self.target))
        self._beside = set(self._written_beside())
        self._warn_of_others()
        make_folder(self.work.parent, self.sync)
        self.work.mkdir()
        if self.sync:
            sync_folder(self.work.parent)
        self._lock = lock(self.work)
        for name in ("new", "old"):
            (self.work / name).mkdir()
        if self.way is Way.EXCHANGED:
            make_like(self.target, self.destination)
        elif self.way is Way.OVER or not chooses_way:  # this node's own disk may have what rank 0's has not
            remove_own(self.target, self.writer.owns, but=self.work)

    def _warn_of_others(self) -> None:
        """Warn of another job that saves to the same path, and of a target that can only be written over."""
        beside = (item for item in work_folders(self.target.parent) if identity(item / "new" / self.target.name))
        if any(map(is_locked, (*beside, *work_folders(self.target)))):
            self.warn(
                "",
                f"Another job is saving {self.shown} at the same time, and the later one of the two will replace the"
                " other. Give each run a directory of its own.",
            )
        if self.way is Way.OVER:
            self.warn(
                "a target that cannot be exchanged",
                f"{self.target} is a link or a mount point, so its files are overwritten in place: a save that is"
                " killed or fails leaves none that can be loaded. Let it be a directory to keep the previous ones"
                " until then.",
            )

    # The final name

    def give_name(self) -> None:
        """Give the target its name, and what is beside it, and write `latest`."""
        (self.work / "lock").stat()  # raises if somebody has removed the folder meanwhile
        if self.sync:
            self._sync_written()
        if self.latest is not None:
            (self.work / "latest").write_text(self.latest)  # here, where a full disk has changed nothing yet
        for item in entries(self.export):
            put(item, (self.folder if self.is_alone else self.destination) / item.name)
        self._rename()
        if self.sync:
            if self.way is not Way.EXCHANGED:  # then it was synced before, and another job may be replacing it now
                sync_folder(self.target if self.target.is_dir() else self.target.parent)
            sync_folder(self.target.parent)
        if self.latest is not None:
            self._name_latest(self.latest)

    def _rename(self) -> None:
        """Exchange the target, or take the mark out of it."""
        if self.way is Way.EXCHANGED:
            self._wait_for_other_job()
            swap(self.destination, self.target, self.work / "old")
            self._is_named = True
            for item in entries(self.work / "new"):
                put(item, self.folder / item.name)
            return
        for mark in work_folders(self.target):
            if mark != self.work or self.way is Way.OVER:
                shutil.rmtree(mark)
        if self.way is Way.NEW:
            self.work.rename(self.target.parent / self.work.name)
        self._is_named = True

    def _name_latest(self, tag: str) -> None:
        note, latest = self.work / "latest", self.folder / "latest"
        if self.way is Way.OVER or latest.is_symlink():
            latest.write_text(tag)  # its folder may be on another disk, and a link stays
        else:
            if self.sync:
                sync_file(note)
            note.replace(latest)
        if self.sync:
            sync_file(latest)
            sync_folder(self.folder)

    def _sync_written(self) -> None:
        """Sync everything but the ranks' own files, which they have synced themselves."""
        if self.destination.is_dir():
            written = [item for item in entries(self.destination) if item.name in self.writer.late]
        else:
            written = [self.destination]
        for item in (*written, *self._written_beside()):
            sync_tree(item)
        sync_folder(self.destination if self.destination.is_dir() else self.destination.parent)

    def _written_beside(self) -> list[Path]:
        return list((self.work / "new" if self.way is Way.EXCHANGED else self.folder).glob(self.writer.beside))

    # The end

    def close(self) -> None:
        """Remove what is no longer needed, once the target has its name."""
        self._unlock()
        with suppress(OSError):  # what stays is removed by a later save
            for folder in (self.work, *self._leftovers()):
                remove_work(folder, self.writer.owns)

    def discard(self) -> None:
        """Remove what was written, unless it has its name: on several disks, a load may then need what was there."""
        self._unlock()
        if self._is_named:
            if not self.is_on_own_disks:
                remove_work(self.work, self.writer.owns)
            return
        if self.way is Way.EXCHANGED:
            remove_work(self.work, self.writer.owns)  # which keeps what could not be renamed back
        elif self.way is Way.NEW:
            remove_own(self.target, self.writer.owns)
            with suppress(OSError):
                for item in {*self._written_beside()} - self._beside:
                    item.unlink()
        for folder in reversed(self._created):
            with suppress(OSError):  # a framework has written there too
                folder.rmdir()

    def state_of_target(self) -> tuple[str, bool]:
        """What is at the target now, as a sentence, and whether it is the new checkpoint."""
        names = [item.name for item in entries(self.target)]  # which refreshes the cache of a network disk's client
        if self.way in (Way.OVER, Way.UNMANAGED) or self.work.name in names:
            return INCOMPLETE, False
        with suppress(OSError):
            listed(self.target.parent)
        now = identity(self.target)
        if self.way is Way.EXCHANGED and now == self.before != ():
            return (UNCHANGED if self._had_own else NOTHING), False
        if not now or (self.way is Way.NEW and not any(map(self.writer.owns, names))):
            return NOTHING, False
        return f"{self.shown} is the new checkpoint already, and complete.", True

    # Other jobs

    def _wait_for_other_job(self) -> None:
        """Wait for another job that writes the target in place; its files must not come into ours."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while any(map(is_locked, work_folders(self.target))):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Another job has been saving {self.shown} for more than {_WAIT_SECONDS:.0f} s. Give each run a"
                    " directory of its own."
                )
            time.sleep(0.1)

    def _leftovers(self) -> list[Path]:
        """Work folders of killed saves; on several disks those of this target alone, since loads may need others."""
        dead = [folder for folder in work_folders(self.target.parent) if is_dead(folder)]
        if not self.is_on_own_disks:
            return dead
        return [folder for folder in dead if not any(old.name != self.target.name for old in replaced(folder))]

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough where a dataloader's worker was forked
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None

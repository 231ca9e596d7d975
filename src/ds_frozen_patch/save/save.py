"""One save of one engine, from the agreement of the ranks to the final name of its files.

1. The ranks agree on what is saved, and where to, in one collective. If their requests differ, all of them raise.
2. They write into the folder of the tag, which has a mark meanwhile; or, if a checkpoint is there, into a work folder
   (see `common.work_folder`). Each syncs what it has written.
3. Once every rank has written its part, one rank per disk removes the mark, or exchanges the two folders, and writes
   `latest`.
4. One more collective: an error of one rank is raised on every rank.

So whenever a process is killed or the power fails, what has the name of the tag is a whole checkpoint, or has a mark.
Nothing else in the folder that the program has named is touched, and nothing changes there after the save.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..checkpoint.record import File, Record, pack, unpack, write_record
from ..common.collectives import gather_numbers
from ..common.durable import listed, make_folder, sync_file, sync_folder, sync_tree
from ..common.errors import CheckpointError
from ..common.work_folder import (
    RECORD,
    WORK,
    entries,
    identity,
    is_dead,
    is_locked,
    is_state,
    lock,
    remove_states,
    replaced,
    swap,
    work_folders,
)
from ..engine.attached import Attached
from ..engine.owner import Owner
from ..parameters import Held
from .failures import Failures
from .recording import Recorder
from .ways import Way, choose_way, make_like, missing_folders, put, remove_work

UNCHANGED = "The previous checkpoint there is unchanged."
NOTHING = "There is no checkpoint there now."
INCOMPLETE = "What is there now is incomplete."
_WAIT_SECONDS = 60.0
"""How long a save waits for another job that is writing the folder which it is about to replace."""

current: ContextVar[Save | None] = ContextVar("ds_frozen_patch_save", default=None)
"""The save that is running, for what upstream's code calls back."""


@dataclass
class Save:
    """One save of one engine.

    Attributes:
        owner: of the engine.
        engine: that is saved.
        attached: what is known of it.
        target: the folder of the tag, or a file; the same on every rank.
        folder: that the program has named, in which the target is.
        shown: what messages name: the target, or the folder.
        way: how the target is written.
        left_out: what is left out; None for a full checkpoint.
        sync: whether files are synced.
        id: unique among all saves, the same on every rank: 12 hexadecimal digits.
        is_in_one_place: whether all ranks are on one node, and save to the same path.
        base_is_known: whether every rank knows the fingerprints of what is left out.
        base_has_changed: whether a rank has seen training change some of it.
        publishes: whether this rank gives the files their names on its disk.
        before: the identity of what is at the target as the save begins.
        latest: what the file `latest` is to say; None to leave it.
        written: what this rank has written, by name.
        record: of what is saved, to be written beside the files; None if it is not managed.
        names_left_out: the names in the manifest, once there is one.
        removed: those of them that were in the module's state dict.
        recorder: of what the engine writes, to be written later; None if the save writes it.
    """

    owner: Owner
    engine: Any
    attached: Attached
    target: Path
    folder: Path
    shown: Path
    way: Way
    left_out: list[Held] | None
    sync: bool
    id: str = field(default_factory=lambda: uuid4().hex[:12])
    is_in_one_place: bool = False
    base_is_known: bool = False
    base_has_changed: bool = False
    publishes: bool = False
    before: tuple[int, ...] = ()
    latest: str | None = None
    written: dict[str, File] = field(default_factory=dict)
    record: Record | None = None
    names_left_out: frozenset[str] | None = None
    removed: set[str] = field(default_factory=set)
    recorder: Recorder | None = None
    _created: list[Path] = field(default_factory=list)
    _had_states: bool = True
    _scripts: set[Path] = field(default_factory=set)
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
            return self.folder if self.owner.names_each_save else self.target
        return self.work / "export"

    @property
    def publisher(self) -> int:
        """The rank that publishes on this rank's disk, by DeepSpeed's configuration."""
        return self.owner.rank - self.owner.local_rank if self.engine.use_node_local_storage() else 0

    @cached_property
    def failures(self) -> Failures:
        """The errors of this rank."""
        return Failures(self.owner, self.shown)

    # Errors

    def final(self, path: str | os.PathLike[str]) -> Path:
        """Where a file is to be that this save writes elsewhere, for messages."""
        places = [place for place in (self.export, self.destination.parent) if place in Path(path).parents]
        return self.folder / Path(path).relative_to(places[0]) if places else Path(path)

    def agree(self) -> dict[int, File]:
        """Raise on every rank if one has recorded an error; every rank must call it. It is a barrier.

        Returns:
            What the ranks have written, by the digests of the file names. It lacks names for which ranks differ, as on
            disks of their own.
        """
        everyone = gather_numbers([bool(self.failures.errors), *pack(self.written)], self.owner.device)
        if any(one[0] for one in everyone):
            self.discard()
            raise self.failures.error(self.state_of_target()[0] if self.publishes else None)
        written: dict[int, File | None] = {}
        for name, file in (item for _, *packed in everyone for item in unpack(packed).items()):
            if written.setdefault(name, file) != file:
                written[name] = None
        return {name: file for name, file in written.items() if file is not None}

    def use_absolute_paths(self) -> None:
        """Let all paths but what messages name be absolute."""
        self.target, self.folder = self.target.absolute(), self.folder.absolute()
        self._created = [folder.absolute() for folder in self._created]
        self._scripts = {script.absolute() for script in self._scripts}

    # The final name

    def is_on_own_disk(self) -> bool:
        """Whether rank 0, which has opened the save, has done so on another disk than this rank's; with a warning."""
        self._created = missing_folders(self.target)
        with suppress(OSError):
            make_folder(self.work.parent, self.sync)  # which also renews what a network disk's client has cached
            if self.work.name in listed(self.work.parent):
                return False
        if not self.engine.use_node_local_storage() and self.attached.is_first_time("disks that are not configured"):
            self.owner.logger.warning(
                "This node writes %s to a disk of its own, but DeepSpeed is configured for a shared one: it will not"
                ' find all files at a resume. Set "checkpoint": {"use_node_local_storage": true} in its configuration,'
                " or save to a disk that all nodes share.",
                self.folder,
            )
        return True

    def open(self, is_tag: bool = False) -> None:
        """Prepare where this rank, and those that share its disk, write; an error is recorded.

        Args:
            is_tag: whether to choose the way, for the folder of a tag.
        """
        self.publishes = self.attached.publishes = True
        with self.failures.deferred(self.shown):
            self._created = self._created or missing_folders(self.target)
            if is_tag:
                self.way = choose_way(self.target, self.folder)
            self._had_states = self.target.is_file() or any(is_state(item.name) for item in entries(self.target))
            self._scripts = set(self._recovery_scripts())
            self._warn()
            make_folder(self.work.parent, self.sync)
            self.work.mkdir()
            if self.sync:
                sync_folder(self.work.parent)
            self._lock = lock(self.work)
            for name in ("new", "old"):
                (self.work / name).mkdir()
            if self.way is Way.EXCHANGED:
                make_like(self.target, self.destination)
            elif self.way is Way.OVER or not is_tag:  # this node's own disk may have what rank 0's has not
                remove_states(self.target, but=self.work)

    def _warn(self) -> None:
        """Warn of another job that saves to the same path, and of a target that can only be written over."""
        beside = (item for item in work_folders(self.target.parent) if identity(item / "new" / self.target.name))
        if any(map(is_locked, (*beside, *work_folders(self.target)))):
            self.owner.logger.warning(
                "Another job is saving %s at the same time, and the later one of the two will replace the other. Give"
                " each run a directory of its own.",
                self.shown,
            )
        if self.way is Way.OVER and self.attached.is_first_time("a target that cannot be exchanged"):
            self.owner.logger.warning(
                "%s is a link or a mount point, so its files are overwritten in place: a save that is killed or fails"
                " leaves none that can be loaded. Let it be a directory to keep the previous ones until then.",
                self.target,
            )

    def publish(self) -> None:
        """Give the checkpoint its final name on every disk; every rank must call it.

        Raises:
            CheckpointError: a rank has recorded an error.
        """
        several = self.engine.use_node_local_storage()
        written = self.agree()
        if self.publishes:
            self.give_name(written)
            if not several and not self.failures.errors:
                self.close()  # before the others go on
        self.agree()
        if several:
            if self.publishes:
                self.close()
            gather_numbers([0], self.owner.device)

    def give_name(self, written: Mapping[int, File] | None = None) -> None:
        """Give the checkpoint its final name on this rank's disk; an error is recorded.

        Args:
            written: what the ranks have written, as far as it is known.
        """
        with self.failures.deferred(self.shown):
            (self.work / "lock").stat()  # raises if somebody has removed the folder meanwhile
            if self.record is not None:
                write_record(self.destination, self.record, written)
            if self.sync:
                self._sync_written()
            if self.latest is not None:
                (self.work / "latest").write_text(self.latest)  # here, where a full disk has changed nothing yet
            for item in entries(self.export):
                put(item, (self.folder if self.owner.names_each_save else self.destination) / item.name)
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

    def close(self) -> None:
        """Remove what is no longer needed, once the checkpoint has its name."""
        self._unlock()
        with suppress(OSError):  # what stays is removed by a later save
            for folder in (self.work, *self._leftovers()):
                remove_work(folder)
            for item in entries(self.target.parent):
                if item.name.startswith(f"{self.target.name}.ranks"):  # of `reshard_inside`, from what was there
                    remove_states(item)

    def discard(self) -> None:
        """Remove what was written, unless it has its name: on several disks, a load may then need what was there."""
        if not self.publishes:
            return
        self._unlock()
        if self._is_named:
            if not self.engine.use_node_local_storage():
                remove_work(self.work)
            return
        if self.way is Way.EXCHANGED:
            remove_work(self.work)  # which keeps what could not be renamed back
        elif self.way is Way.NEW:
            remove_states(self.target)
            with suppress(OSError):
                for script in {*self._recovery_scripts()} - self._scripts:
                    script.unlink()
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
            return (UNCHANGED if self._had_states else NOTHING), False
        if not now or (self.way is Way.NEW and not any(map(is_state, names))):
            return NOTHING, False
        return f"{self.shown} is the new checkpoint already, and complete.", True

    def _sync_written(self) -> None:
        """Sync everything but the ranks' own files, which they have synced themselves."""
        if self.destination.is_dir():
            written = [item for item in entries(self.destination) if item.name in ("offloaded_tensors", RECORD)]
        else:
            written = [self.destination]
        for item in (*written, *self._recovery_scripts()):
            sync_tree(item)
        sync_folder(self.destination if self.destination.is_dir() else self.destination.parent)

    def _recovery_scripts(self) -> list[Path]:
        """The scripts that DeepSpeed writes beside the folder of a tag."""
        return list((self.work / "new" if self.way is Way.EXCHANGED else self.folder).glob("zero_to_*.py"))

    # Other saves to the same place

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
        if not self.engine.use_node_local_storage():
            return dead
        return [folder for folder in dead if not any(old.name != self.target.name for old in replaced(folder))]

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough where a dataloader's worker was forked
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None

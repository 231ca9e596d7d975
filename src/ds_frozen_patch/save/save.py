"""One save, from the agreement of the ranks to the final name of the checkpoint.

1. The ranks agree on what is saved, in one collective. If their requests differ, all of them raise.
2. They write into a work folder beside the target (see `common.work_folder`), and each syncs what it has written.
3. Once every rank has written its part, one rank per disk swaps the names and syncs the folder.
4. One more collective: an error of one rank is raised on every rank, and the swap is undone. If there is none, the work
   folder is removed in the background.

So whenever a process is killed or the power fails, a whole checkpoint has the final name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common.collectives import default_store, gather, gather_numbers
from ..common.durable import link_missing, listed, make_folder, make_own_folder, sync_file, sync_folder, sync_tree
from ..common.errors import CheckpointError
from ..common.overrides import overridden
from ..common.text import human_bytes
from ..common.work_folder import WORK, entries, identity, is_dead, lock, marker, swap, swap_back, work_folders
from ..engine.attached import Attached
from ..engine.disks import Disks, find_disks
from ..engine.owner import Owner
from ..parameters import Held
from .recording import Recorder

UNCHANGED = "The previous checkpoint there is unchanged."
_REMEMBERED = 4

current: ContextVar[Save | None] = ContextVar("ds_frozen_patch_save", default=None)
"""The save that is running, for what upstream's code calls back."""


@dataclass
class Save:
    """One save of one engine.

    Attributes:
        owner: of the engine.
        engine: that is saved.
        attached: what is known of it.
        target: the final path of the checkpoint, the same on every rank.
        id: unique among all saves, the same on every rank.
        left_out: what is left out; None for a full checkpoint.
        base_is_known: whether every rank knows the fingerprints of that.
        base_has_changed: whether a rank has seen training change some of it.
        sync: whether files are synced.
        file_systems: of each rank, if all ranks have the same path; else None.
        failed: the errors of this rank.
        disks: which rank publishes, once it is known.
        is_in_place: whether the checkpoint is written to the target itself, without a work folder.
        names_left_out: the names in the manifest, once there is one.
        removed: those of them that were in the module's state dict.
        of_ranks: folders in which each rank has synced its own files.
        keeps_others: whether what others have put into the folder of the previous checkpoint stays there.
        place: the folder of the work folder, if not the target's own; on the same disk.
        recorder: of what the engine writes, to be written later; None if the save writes it.
        goes_on_after_engine: whether ranks write more once the engine, whose save ends in a barrier, has saved.
    """

    owner: Owner
    engine: Any
    attached: Attached
    target: Path
    id: str
    left_out: list[Held] | None
    base_is_known: bool
    base_has_changed: bool
    sync: bool
    file_systems: tuple[int, ...] | None
    failed: list[CheckpointError] = field(default_factory=list)
    disks: Disks | None = None
    is_in_place: bool = False
    names_left_out: frozenset[str] | None = None
    removed: set[str] = field(default_factory=set)
    of_ranks: set[Path] = field(default_factory=set)
    keeps_others: bool = False
    place: Path | None = None
    goes_on_after_engine: bool = False
    recorder: Recorder | None = None
    _before: tuple[int, ...] = ()
    _old: Path | None = None
    _is_swapped: bool = False
    _lock: int | None = None

    @property
    def work(self) -> Path:
        """The work folder."""
        return (self.place or self.target.parent) / f"{WORK}{self.id}"

    @property
    def new(self) -> Path:
        """Where the checkpoint is written."""
        return self.work / "new" / self.target.name

    @property
    def destination(self) -> Path:
        """Where to write: the target itself, or `new`."""
        return self.target if self.is_in_place else self.new

    @property
    def publisher(self) -> int:
        """The rank that publishes on this rank's disk."""
        return self.disks.publishers[self.owner.rank] if self.disks is not None else 0

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes on its disk."""
        return self.publisher == self.owner.rank

    @cached_property
    def _store(self) -> Any:
        return default_store()

    # Errors

    def fail(self, error: CheckpointError) -> None:
        """Record an error of this rank, so that no rank publishes."""
        self.failed.append(error)
        if len(self.failed) == 1 and self._store is not None:
            self._store.add(f"ds_frozen_patch/{self.id}", 1)

    def anyone_failed(self, asks: bool) -> bool:
        """Whether a rank has recorded an error; every rank must call it, and only one that `asks` gets the answer.

        What the ranks have written before is complete then.
        """
        if self._store is None or self.goes_on_after_engine:
            return any(failed for (failed,) in gather_numbers([bool(self.failed)], self.owner.device))
        return asks and int(self._store.add(f"ds_frozen_patch/{self.id}", 0)) > 0

    @contextmanager
    def deferring_errors(self, path: Any) -> Iterator[None]:
        """Record an error in place of raising it: this rank must not miss the collectives that follow."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CheckpointError):
                cause = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                recorded = CheckpointError(f"{path} cannot be written ({cause}){_free_space(Path(path))}")
                _release_files(error)
                recorded.__cause__ = error
                error = recorded
            self.fail(error)

    def deferring(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes, with its errors recorded: one that rank 0 alone may raise."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            with self.deferring_errors(self.target):
                return write(*args, **kwargs)

        return attempt

    def deferring_write_errors(self) -> AbstractContextManager[None]:
        """While this lasts, DeepSpeed goes on if it cannot write a file or create a folder, and files are synced."""
        engine = self.engine
        writer = engine.checkpoint_engine
        writes = [(writer, "save", self.sync), (writer, "makedirs", False), (engine, "_copy_recovery_script", False)]
        found = [(owner, name, getattr(owner, name), sync) for owner, name, sync in writes if hasattr(owner, name)]
        return overridden([(owner, name, self._deferring(write, sync)) for owner, name, write, sync in found])

    def _deferring(self, write: Callable[..., Any], sync: bool) -> Callable[..., None]:
        def attempt(*args: Any, **kwargs: Any) -> None:
            paths = [item for item in (*args, *kwargs.values()) if isinstance(item, str | os.PathLike)]
            recording = self.recorder.recording() if self.recorder is not None else nullcontext()
            with self.deferring_errors(paths[0] if paths else "a file"), recording:
                write(*args, **kwargs)
                if sync and paths and Path(paths[0]).is_file():
                    sync_file(Path(paths[0]))

        return attempt

    def raise_on_all_ranks(self) -> None:
        """Raise on every rank if one has recorded an error; every rank must call it."""
        if not any(failed for (failed,) in gather_numbers([bool(self.failed)], self.owner.device)):
            return
        self.undo_rename()
        own = str(self.failed[0]) if self.failed else None
        found = gather((own, self.state_of_target()[0] if self.publishes else None))
        self.discard()
        errors = [f"Rank {rank}: {text.removesuffix('.')}." for rank, (text, _) in enumerate(found) if text]
        states = " ".join(dict.fromkeys(text for _, text in found if text))
        raise self.failure(errors[:2], len(errors), states) from (self.failed[0] if self.failed else None)

    def failure(self, errors: list[str], count: int, states: str) -> CheckpointError:
        """The error that every rank raises.

        Args:
            errors: those of the first two ranks, as sentences.
            count: of all ranks with an error.
            states: of the target on each disk, as sentences.
        """
        more = f" And {count - 2} more ranks." if count > 2 else ""
        return CheckpointError(
            f"{self.target} was not saved. {' '.join(errors)}{more} {states} The run can go on, and save again once"
            " the cause is removed."
        )

    def write_recorded(self) -> None:
        """Write and sync what the recorder has; an error is recorded."""
        assert self.recorder is not None
        with self.deferring_errors(self.target):
            for path in self.recorder.write():
                if self.sync:
                    sync_file(path)

    # The final name

    def begin(self) -> None:
        """Find out who publishes, and create the work folder; every rank must call it."""
        self._before = identity(self.target)
        self.disks = self._known_disks()
        if self.publishes:
            with self.deferring_errors(self.target):
                make_own_folder(self.work, self.sync)
                make_folder(self.target.parent, self.sync)
                self._lock = lock(marker(self.work, self.owner.rank))
                for folder in (self.new.parent, self.work / "old"):
                    folder.mkdir(exist_ok=True)

    def _known_disks(self) -> Disks:
        known = self.attached.disks
        if self.file_systems is None:
            return find_disks(self.owner, self.work)
        if self.file_systems not in known:
            known[self.file_systems] = find_disks(self.owner, self.work)
        return known[self.file_systems]

    def publish(self, finish: Callable[[Save], None] | None = None) -> None:
        """Give the checkpoint its final name on every disk, or on none; every rank must call it.

        Args:
            finish: is called on the ranks that publish, once the checkpoint has its name.

        Raises:
            CheckpointError: a rank has recorded an error.
        """
        if not self.anyone_failed(self.publishes) and self.publishes and not self.failed:
            self.rename(finish)
        self.raise_on_all_ranks()
        if self.publishes:
            self._note_published()
            self._remove()

    def rename(self, finish: Callable[[Save], None] | None) -> None:
        """Give the checkpoint its final name on this rank's disk; an error is recorded."""
        with self.deferring_errors(self.target):
            marker(self.work, self.owner.rank).stat()  # raises if somebody has removed the folder meanwhile
            if self.sync:
                self._sync_new()
            if self.keeps_others and self.target.is_dir():
                link_missing(self.target, self.new)
            self._old = swap(self.new, self.target, self.work / "old")
            self._is_swapped = True
            if finish is not None:
                finish(self)
            if self.sync:
                sync_folder(self.target.parent)

    def undo_rename(self) -> None:
        """Put what was at the target back, if this rank has renamed."""
        if self._is_swapped:
            with suppress(OSError):
                swap_back(self.target, self._old, self.new)
                self._is_swapped, self._old = False, None

    def close(self) -> None:
        """Remove what is no longer needed, once the checkpoint has its name."""
        if self.publishes:
            self._note_published()
            self._unlock()
            self._remove_all()

    def _note_published(self) -> None:
        published = self.attached.published
        published.pop(self.target, None)
        published[self.target] = identity(self.target)
        if len(published) > _REMEMBERED:
            published.pop(next(iter(published)))

    def discard(self) -> None:
        """Remove what was written, unless another rank may have published its part."""
        if self.is_in_place or self.disks is None or not self.publishes:
            return
        self._unlock()
        if not self._is_swapped and self._old is None:
            shutil.rmtree(self.work, ignore_errors=True)

    def state_of_target(self) -> tuple[str, bool]:
        """What is at the target now, as a sentence, and whether it is the new checkpoint."""
        if self.is_in_place:
            return "What is there now is incomplete.", False
        with suppress(OSError):
            listed(self.target.parent)  # refreshes the cache of a network disk's client
        now = identity(self.target)
        if now == self._before:
            return UNCHANGED, False
        if now and self.publishes and not self._is_swapped:
            return f"Another program has saved {self.target} in the meantime.", False
        if now:
            return f"{self.target} is the new checkpoint already, and complete.", True
        return f"The previous checkpoint is {self._old}; rename it to {self.target.name}.", False

    def _sync_new(self) -> None:
        """Sync everything but the ranks' own files, which they have synced themselves."""
        folders = {self.new.parent, *([self.new] if self.new.is_dir() else []), *self.of_ranks}
        # What is beside the files of the ranks in the same folder has been synced too (`save.export_trained`).
        inside = [] if self.new in self.of_ranks else entries(self.new) or [self.new]
        others = [item for item in inside if item not in self.of_ranks]
        copies = [path for folder in self.of_ranks if (path := folder / "offloaded_tensors").exists()]  # from NVMe
        for item in (*others, *copies):
            sync_tree(item)
        for folder in folders:
            sync_folder(folder)

    def other_job(self) -> str | None:
        """A warning if another job has saved to the same path, or is about to; for rank 0."""
        known = self.attached.published.get(self.target)
        if known is not None and (now := identity(self.target)) and now != known:
            return (
                f"Another program has saved {self.target} since this run did; this save replaces it. Give each run a"
                " directory of its own."
            )
        for folder in work_folders(self.work.parent):
            if folder != self.work and identity(folder / "new" / self.target.name) and not is_dead(folder):
                return (
                    f"Another job is saving {self.target} at the same time, and the later one of the two will replace"
                    " the other. Give each run a directory of its own."
                )
        return None

    def _leftovers(self) -> list[Path]:
        """Work folders of killed saves that contain nothing that is needed."""
        found = []
        for folder in work_folders(self.work.parent):
            names = {item.name for inner in ("new", "old") for item in entries(folder / inner)}
            only = {item.name for item in entries(folder / "old")} - {item.name for item in entries(folder.parent)}
            mine = names <= {self.target.name} or not (self.disks and self.disks.are_several)
            if folder != self.work and mine and not only and is_dead(folder):
                found.append(folder)
        return found

    def _remove(self) -> None:
        """Remove what is no longer needed while training goes on: a thousand ranks leave thousands of files."""
        self._unlock()
        if self.attached.remover is not None:
            self.attached.remover.join()
        self.attached.remover = threading.Thread(target=self._remove_all, name="ds_frozen_patch: remove old files")
        self.attached.remover.start()

    def _remove_all(self) -> None:
        for folder in (self.work, *self._leftovers()):
            shutil.rmtree(folder, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough where a dataloader's worker was forked
            with suppress(OSError):
                os.close(self._lock)
            self._lock = None


def _release_files(error: BaseException | None) -> None:
    """Close the file that could not be written: while the frames of an error keep it open, it takes up space."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _free_space(path: Path) -> str:
    """The free space, since torch reports a full disk only by a line of its own source code."""
    try:
        folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
        return f", with {human_bytes(shutil.disk_usage(folder).free)} free on its disk"
    except OSError:
        return ""

"""One save, from the agreement of the ranks to the name of the checkpoint.

1. The ranks agree on what is saved, in one collective. Where one was asked for something else, all raise.
2. They write into a *work folder* beside the target, and each syncs what it has written:

       out/
       ├── last.ckpt                       the checkpoint from before: as it was
       └── .ds_frozen_patch-3f2a9c01d4e8/
           ├── rank0                       a marker (see `_disks`), locked as long as the save runs
           ├── new/last.ckpt               the new one
           └── old/last.ckpt               the one from before, once the new one has its name

3. When every rank has written its part, one rank per disk swaps the names and syncs the folder.
4. All meet, in one more collective. What failed on one rank is raised on every rank, and what was swapped is swapped
   back. Otherwise the work folder is removed, in the background.

So at any moment of a kill or a power cut, a whole checkpoint has the name. Where the file system cannot swap two names
in one step (NFS), there is an instant in which only the work folder has it: `left_behind` finds it there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..common.collectives import default_store, digest, gather, gather_numbers
from ..common.disks import Disks, file_system, find_disks, marked, marker
from ..common.durable import exchange, listed, make_own_folder, sync_file, sync_folder, sync_tree
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.overrides import lent
from ..common.text import human_bytes
from ..parameters import Held

WORK = ".ds_frozen_patch-"
"""What the names of work folders begin with: nothing that Lightning looks for ("last", "ckpt_") is in them."""

AS_BEFORE = "What was saved there before is as it was."
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_REMEMBERED = 4
_YOUNG_SECONDS = 60.0
_OLD_SECONDS = 86400.0

current: ContextVar[Save | None] = ContextVar("ds_frozen_patch_save", default=None)
"""The save that is running: upstream's code lies between its parts."""

_published: dict[Path, tuple[int, ...]] = {}
"""The `_identity` of this run's last few checkpoints, to know another program's in their place."""
_remover: threading.Thread | None = None


@dataclass
class Save:
    """One save of one engine.

    Attributes:
        strategy: that saves.
        engine: whose checkpoint it is.
        target: the path that the checkpoint is to have, the same on every rank.
        id: a name that no other save has, the same on every rank.
        left_out: what is left out; None for a full checkpoint.
        base_is_known: whether every rank knows the fingerprints of that.
        base_has_changed: whether a rank has seen that training has changed some of it.
        sync: whether files are synced.
        file_systems: each rank's file system, where all have been given the same path.
        failed: what has failed on this rank.
        disks: who publishes, once it is known.
        is_in_place: it is written straight to the target, as by a direct call of the engine.
        names_left_out: the names in the manifest, once there is one.
        removed: those of them that were in the module's state and were taken out.
    """

    strategy: Any
    engine: Any
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
    _before: tuple[int, ...] = ()
    _old: Path | None = None
    _is_swapped: bool = False
    _lock: int | None = None

    @property
    def work(self) -> Path:
        """The work folder."""
        return self.target.with_name(f"{WORK}{self.id}")

    @property
    def new(self) -> Path:
        """Where the checkpoint is written."""
        return self.work / "new" / self.target.name

    @property
    def publisher(self) -> int:
        """The rank that renames on this rank's disk."""
        return self.disks.publishers[self.strategy.global_rank] if self.disks is not None else 0

    @property
    def publishes(self) -> bool:
        """Whether this rank renames on its disk."""
        return bool(self.publisher == self.strategy.global_rank)

    @cached_property
    def _store(self) -> Any:
        return default_store()

    # What fails on one rank

    def fail(self, error: CheckpointError) -> None:
        """Remember what has failed on this rank, and let the ranks that publish know."""
        self.failed.append(error)
        if len(self.failed) == 1 and self._store is not None:
            self._store.add(f"ds_frozen_patch/{self.id}", 1)

    def anyone_failed(self, asks: bool) -> bool:
        """Whether a rank has failed before the last collective; every rank must call it, and learns it if it `asks`."""
        if self._store is None:
            return any(told[0] for told in gather_numbers([bool(self.failed)], self.strategy.root_device))
        return asks and int(self._store.add(f"ds_frozen_patch/{self.id}", 0)) > 0

    @contextmanager
    def put_off(self, path: Any) -> Iterator[None]:
        """Remember what fails, and go on: the ranks meet several times in a save, and none must stay away."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CheckpointError):
                cause = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                kept = CheckpointError(f"{path} cannot be written ({cause}){_room(Path(path))}")
                _release_files(error)
                kept.__cause__ = error
                error = kept
            self.fail(error)

    def writes_put_off(self) -> AbstractContextManager[None]:
        """While this lasts, DeepSpeed goes on when it cannot write a file or make a folder, and files are synced."""
        engine = self.engine
        writer = engine.checkpoint_engine
        writes = [(writer, "save", self.sync), (writer, "makedirs", False), (engine, "_copy_recovery_script", False)]
        there = [(owner, name, getattr(owner, name), sync) for owner, name, sync in writes if hasattr(owner, name)]
        return lent([(owner, name, self._putting_off(write, sync)) for owner, name, write, sync in there])

    def _putting_off(self, write: Callable[..., Any], sync: bool) -> Callable[..., None]:
        def attempt(*args: Any, **kwargs: Any) -> None:
            paths = [item for item in (*args, *kwargs.values()) if isinstance(item, str | os.PathLike)]
            with self.put_off(paths[0] if paths else "a file"):
                write(*args, **kwargs)
                if sync and paths and Path(paths[0]).is_file():
                    sync_file(Path(paths[0]))

        return attempt

    # The name

    def begin(self) -> None:
        """Find out who publishes, and make the work folder; every rank must call it."""
        self._before = _identity(self.target)
        self.disks = find_disks(self.strategy, self.file_systems, self.work)
        if self.publishes:
            with self.put_off(self.target):
                make_own_folder(self.work, self.sync)
                self._lock = _locked(marker(self.work, self.strategy.global_rank))
                for folder in (self.new.parent, self.work / "old"):
                    folder.mkdir(exist_ok=True)

    def publish(self) -> None:
        """Give the checkpoint its name on every disk, or on none; every rank must call it.

        Raises:
            CheckpointError: something has failed, on this rank or another.
        """
        if not self.anyone_failed(self.publishes) and self.publishes and not self.failed:
            with self.put_off(self.target):
                marker(self.work, self.strategy.global_rank).stat()  # gone if somebody has removed the folder meanwhile
                if self.sync:
                    self._sync_new()
                self._old = _swap(self.new, self.target, self.work / "old")
                self._is_swapped = True
                if self.sync:
                    sync_folder(self.target.parent)
        self.meet()
        if self.publishes:
            _published.pop(self.target, None)
            _published[self.target] = _identity(self.target)
            if len(_published) > _REMEMBERED:
                _published.pop(next(iter(_published)))
            self._remove()

    def meet(self) -> None:
        """Raise on every rank what has failed on one; every rank must call it."""
        told = gather_numbers([bool(self.failed)], self.strategy.root_device)
        if not any(failed for (failed,) in told):
            return
        if self._is_swapped:
            with suppress(OSError):
                _swap_back(self.target, self._old, self.new)
                self._is_swapped, self._old = False, None
        found = gather((str(self.failed[0]) if self.failed else None, self.in_place()[0] if self.publishes else None))
        self.abandon()
        said = [f"Rank {rank}: {text.removesuffix('.')}." for rank, (text, _) in enumerate(found) if text]
        more = f" And {len(said) - 2} more ranks." if len(said) > 2 else ""
        there = " ".join(dict.fromkeys(text for _, text in found if text))
        raise CheckpointError(
            f"{self.target} was not saved. {' '.join(said[:2])}{more} {there} The run can go on, and save again when"
            " this is mended."
        ) from (self.failed[0] if self.failed else None)

    def abandon(self) -> None:
        """Remove what was written, unless another rank may have published its part."""
        if self.is_in_place or self.disks is None or not self.publishes:
            return
        self._unlock()
        if not self._is_swapped and self._old is None:
            shutil.rmtree(self.work, ignore_errors=True)

    def in_place(self) -> tuple[str, bool]:
        """What is at the target now, as a sentence, and whether it is the new checkpoint."""
        if self.is_in_place:
            return "What is there now is not whole.", False
        with suppress(OSError):
            listed(self.target.parent)  # so that the client of a network disk knows what is there
        now = _identity(self.target)
        if now == self._before:
            return AS_BEFORE, False
        if now and self.publishes and not self._is_swapped:
            return f"Another program has saved {self.target} meanwhile.", False
        if now:
            return f"{self.target} is the new checkpoint already, and whole.", True
        return f"What was saved there before is {self._old}; rename it to {self.target.name}.", False

    def _sync_new(self) -> None:
        """All but the ranks' own files, which they have synced themselves."""
        of_ranks = self.new / "checkpoint"
        folders = [self.new.parent, self.new, of_ranks] if self.new.is_dir() else [self.new.parent]
        others = [item for item in _listed(self.new) if item != of_ranks] or [self.new]
        copies = [item for item in _listed(of_ranks) if item.name == "offloaded_tensors"]  # of what is on NVMe
        for item in (*others, *copies):
            sync_tree(item)
        for folder in folders:
            sync_folder(folder)

    def other_job(self) -> str | None:
        """A warning where another job has saved to the same path, or is about to; for the first rank."""
        if self.target in _published and (now := _identity(self.target)) and now != _published[self.target]:
            return (
                f"Another program has saved {self.target} since this run did; this save takes its place. Give each run"
                " a directory of its own."
            )
        for folder in _work_folders(self.target.parent):
            if folder != self.work and _identity(folder / "new" / self.target.name) and not _is_dead(folder):
                return (
                    f"Another job is saving {self.target} at this moment, and the later of the two stays there. Give"
                    " each run a directory of its own."
                )
        return None

    def _leftovers(self) -> list[Path]:
        """Work folders of saves that were killed, and hold nothing that is needed."""
        found = []
        for folder in _work_folders(self.target.parent):
            names = {item.name for inner in ("new", "old") for item in _listed(folder / inner)}
            only = {item.name for item in _listed(folder / "old")} - {item.name for item in _listed(folder.parent)}
            mine = names <= {self.target.name} or not (self.disks and self.disks.are_several)
            if folder != self.work and mine and not only and _is_dead(folder):
                found.append(folder)
        return found

    def _remove(self) -> None:
        """Remove what is no longer needed while training goes on: a thousand ranks leave thousands of files."""
        global _remover
        self._unlock()
        if _remover is not None:
            _remover.join()
        _remover = threading.Thread(target=self._remove_all, name="ds_frozen_patch: remove old files")
        _remover.start()

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


def agree(
    strategy: Any,
    engine: Any,
    path: Any,
    request: Mapping[str, Any],
    left_out: list[Held] | None,
    base_has_changed: bool,
) -> Save:
    """Let the ranks agree on a save; every rank must call it.

    Args:
        strategy: that saves.
        engine: whose checkpoint it is.
        path: where to; the first rank's counts.
        request: what this rank is asked for, which must be the same on every rank.
        left_out: as of `Save`.
        base_has_changed: whether this rank has seen that.

    Raises:
        CheckpointMismatchError: the ranks were asked for different things.
    """
    from ..fingerprint import process_memory
    from ..settings import current as settings

    is_known = all(process_memory().holds(one.tensor) for one in left_out or ())
    own = [digest(sorted(request.items())), digest(str(path)), uuid4().int >> 65, is_known, file_system(Path(path))]
    own.append(base_has_changed)
    told = gather_numbers(own, strategy.root_device)
    if len({one[0] for one in told}) > 1:
        raise CheckpointMismatchError(f"{path} was not saved. {_difference(gather(dict(request)))}")
    is_one_path = len({one[1] for one in told}) == 1
    return Save(
        strategy,
        engine,
        Path(path if is_one_path else gather(str(path))[0]),
        f"{told[0][2]:016x}"[-12:],
        left_out,
        base_is_known=all(one[3] for one in told),
        base_has_changed=any(one[5] for one in told),
        sync=settings().sync,
        file_systems=tuple(one[4] for one in told) if is_one_path else None,
    )


def _difference(requests: list[dict[str, Any]]) -> str:
    """Which ranks were asked for what, where they differ."""
    lines = []
    for key in sorted({key for request in requests for key in request}):
        ranks: dict[str, list[str]] = {}
        for rank, request in enumerate(requests):
            ranks.setdefault(repr(request.get(key)), []).append(str(rank))
        if len(ranks) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} on rank {_shortened(who)}" for value, who in ranks.items()))
    return (
        f"The ranks were asked for different saves ({'; '.join(lines)}). Call patch(), full_checkpoint() and"
        " save_checkpoint() on every rank alike."
    )


def _shortened(ranks: list[str]) -> str:
    return ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


@contextmanager
def explained(path: Any) -> Iterator[list[Save]]:
    """Say of an error of torch's, as when another rank has died, what could not be saved, and what is there."""
    saves: list[Save] = []
    try:
        yield saves
    except (CheckpointError, CheckpointMismatchError):
        raise
    except RuntimeError as error:
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            raise
        there, is_saved = saves[0].in_place() if saves else (AS_BEFORE, False)
        done = "was saved, but not every rank knows" if is_saved else "was not saved"
        raise CheckpointError(
            f"{path} {done} ({error}). If that says that another rank is gone, start the run again from its last"
            f" checkpoint. {there}"
        ) from error


def left_behind(path: Path) -> list[Path]:
    """Copies of a checkpoint in the work folders of saves that were killed: those from before first."""
    folders = _work_folders(path.parent)
    copies = [folder / inner / path.name for inner in ("old", "new") for folder in folders]
    return [copy for copy in copies if copy.exists()]


def moved_away(folder: Path) -> list[Path]:
    """What killed saves have moved away from a folder, and no other has the name now."""
    names = {item.name for item in _listed(folder)}
    return [item for work in _work_folders(folder) for item in _listed(work / "old") if item.name not in names]


def is_left_behind(path: Path) -> bool:
    """Whether a path is in a work folder."""
    return path.parent.parent.name.startswith(WORK)


def _work_folders(parent: Path) -> list[Path]:
    return [item for item in _listed(parent) if item.name.startswith(WORK)]


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in listed(folder)]
    except OSError:
        return []


def _identity(path: Path) -> tuple[int, ...]:
    """What tells a file or folder from another of its name; empty if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino


def _locked(file: Path) -> int:
    """A file, made and locked until it is closed, so that other jobs know its folder to be in use."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(opened, fcntl.LOCK_EX)  # which a job that looks whether this one is alive may have for a moment
    return opened


def _is_dead(folder: Path) -> bool:
    """Whether no process that is alive uses a work folder."""
    markers = [marker(folder, rank) for rank in marked(folder)]
    age = 0.0
    try:
        age = time.time() - folder.stat().st_mtime
        for file in markers:
            opened = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(opened)
    except (FileNotFoundError, BlockingIOError):
        return False
    except OSError:  # no locks here
        return age > _OLD_SECONDS
    has_begun = any((folder / name).is_dir() for name in ("new", "old"))  # `begin` locks its marker, then makes these
    return bool(markers and has_begun) or age > _YOUNG_SECONDS


def _swap(new: Path, target: Path, folder: Path) -> Path | None:
    """Let `new` take the place of `target`, which goes into `folder`; gives where it is now, None if there was none.

    Raises:
        OSError: it cannot be done; what was at the target is there again.
    """
    old = folder / target.name
    with suppress(FileNotFoundError):  # there is nothing at the target
        if exchange(new, target):
            with suppress(OSError):
                new.rename(old)
                return old
            return new
    if target.is_file() and not target.is_symlink():
        with suppress(OSError):
            os.link(target, old)
        new.replace(target)
        return old if old.exists() else None
    return _rename_both(new, target, old)


def _rename_both(new: Path, target: Path, old: Path) -> Path | None:
    """In two steps, where the file system cannot exchange names."""
    for attempt in range(200):
        aside = old if not attempt else old.with_name(f"{attempt}.{old.name}")
        listed(target.parent)  # so that the client of a network disk knows what is there
        try:
            target.rename(aside)
        except FileNotFoundError:
            aside = None  # type: ignore[assignment]
        try:
            new.rename(target)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                time.sleep(attempt / 100)  # for what a client remembers of a name, a minute at most
                continue  # another job has saved there in between
            if aside is not None:
                aside.rename(target)
            raise
        return aside
    raise OSError(errno.EBUSY, "other programs go on saving there", str(target))


def _swap_back(target: Path, old: Path | None, new: Path) -> None:
    if old is None:
        target.rename(new)
    elif not exchange(old, target):
        target.rename(new)
        old.rename(target)


def _release_files(error: BaseException | None) -> None:
    """Of the file that could not be written: as long as the frames of an error hold it open, it takes up room."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _room(path: Path) -> str:
    """How much room there is: torch tells of a full disk by the place in its own sources where it noticed."""
    try:
        there = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
        return f", with {human_bytes(shutil.disk_usage(there).free)} free on its disk"
    except OSError:
        return ""

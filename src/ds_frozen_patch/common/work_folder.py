"""Work folders: where a save writes before its checkpoint gets its final name.

    out/
    ├── last.ckpt                       the previous checkpoint, untouched
    └── .ds_frozen_patch-3f2a9c01d4e8/
        ├── rank0                       a marker (see `engine.disks`), locked while the save runs
        ├── new/last.ckpt               the new checkpoint
        └── old/last.ckpt               the previous one, after the swap

Where the file system cannot swap two names in one step (NFS), there is an instant in which only the work folder holds a
checkpoint of that name. `left_behind` finds it there after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from .durable import exchange, listed

WORK = ".ds_frozen_patch-"
"""The prefix of the names of work folders. It contains nothing that Lightning searches for ("last", "ckpt_")."""

MARKER = "rank"
"""The prefix of the names of markers."""

_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_YOUNG_SECONDS = 60.0
_OLD_SECONDS = 86400.0


def marker(folder: Path, rank: int) -> Path:
    """The file that a rank puts into a folder."""
    return folder / f"{MARKER}{rank}"


def marked(folder: Path) -> list[int]:
    """The ranks that have a marker in a folder; none if it cannot be listed."""
    try:
        names = listed(folder)
    except OSError:
        return []
    return [int(number) for name in names if (number := name.removeprefix(MARKER)) != name and number.isdecimal()]


def left_behind(path: Path) -> list[Path]:
    """Copies of a checkpoint in the work folders of killed saves, previous checkpoints first."""
    folders = work_folders(path.parent)
    copies = [folder / inner / path.name for inner in ("old", "new") for folder in folders]
    return [copy for copy in copies if copy.exists()]


def moved_away(folder: Path) -> list[Path]:
    """What killed saves have moved out of a folder, where nothing else has taken the name since."""
    names = {item.name for item in entries(folder)}
    return [item for work in work_folders(folder) for item in entries(work / "old") if item.name not in names]


def is_left_behind(path: Path) -> bool:
    """Whether a path is in a work folder."""
    return path.parent.parent.name.startswith(WORK)


def work_folders(parent: Path) -> list[Path]:
    """The work folders in a folder."""
    return [item for item in entries(parent) if item.name.startswith(WORK)]


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it cannot be listed."""
    try:
        return [folder / name for name in listed(folder)]
    except OSError:
        return []


def identity(path: Path) -> tuple[int, ...]:
    """Device and inode, which differ between two files that have had the same name; empty if there is no file."""
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino


def lock(file: Path) -> int:
    """Create a file and lock it until the descriptor returned is closed, so that other jobs see its folder in use."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(opened, fcntl.LOCK_EX)  # another job may hold it for a moment, in `is_dead`
    return opened


def is_dead(folder: Path) -> bool:
    """Whether no running process uses a work folder."""
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
    except OSError:  # this file system has no locks
        return age > _OLD_SECONDS
    has_begun = any((folder / name).is_dir() for name in ("new", "old"))  # `begin` locks its marker, then makes these
    return bool(markers and has_begun) or age > _YOUNG_SECONDS


def swap(new: Path, target: Path, folder: Path) -> Path | None:
    """Put `new` in the place of `target`, and move what was there into `folder`.

    Returns:
        The new path of what was at the target, or None if there was nothing.

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
    """`swap` in two steps, where the file system cannot exchange names."""
    for attempt in range(200):
        aside = old if not attempt else old.with_name(f"{attempt}.{old.name}")
        listed(target.parent)  # refreshes the cache of a network disk's client
        try:
            target.rename(aside)
        except FileNotFoundError:
            aside = None  # type: ignore[assignment]
        try:
            new.rename(target)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                time.sleep(attempt / 100)  # clients of network disks cache a name for up to a minute
                continue  # another job has saved there meanwhile
            if aside is not None:
                aside.rename(target)
            raise
        return aside
    raise OSError(errno.EBUSY, "other programs go on saving there", str(target))


def swap_back(target: Path, old: Path | None, new: Path) -> None:
    """Undo `swap`."""
    if old is None:
        target.rename(new)
    elif not exchange(old, target):
        target.rename(new)
        old.rename(target)

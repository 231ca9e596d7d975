"""Work folders: what is there while a save runs, inside the folder that the program has named.

    last.ckpt/                                  named by the program
    ├── latest                                  renamed into place last
    ├── checkpoint/                             of the tag
    │   └── .ds_frozen_patch-3f2a9c01d4e8/      a mark: what is written here is not whole yet
    │       └── lock                            locked while the save runs
    └── .ds_frozen_patch-9b1e77c20a55/          where a folder of that tag exists
        ├── lock
        ├── new/checkpoint/                     the new one
        └── old/checkpoint/                     the previous one, once the two are exchanged

A tag's folder that is new is written in place, with a mark in it until it is whole. One that exists is exchanged. Where
the file system cannot exchange two names in one step (NFS), there is an instant in which only the work folder holds a
folder of that name. `left_behind` finds it there after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .durable import exchange, listed

OURS = ".ds_frozen_patch"
"""The prefix of all names that are only there while a save runs."""

WORK = f"{OURS}-"
"""The prefix of the names of work folders. It contains nothing that Lightning searches for ("last", "ckpt_")."""


@dataclass(frozen=True)
class Writer:
    """Whose entries are published, and how they are recognised.

    Attributes:
        owns: whether an entry of the target with this name is the writer's.
        late: the names of entries that the ranks have not synced themselves.
        beside: a pattern of the names of what the writer puts beside the target.
    """

    owns: Callable[[str], bool]
    late: tuple[str, ...]
    beside: str


_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_YOUNG_SECONDS = 60.0
_OLD_SECONDS = 86400.0


def left_behind(path: Path) -> list[Path]:
    """Copies of a tag's folder in the work folders of killed saves, previous ones first."""
    folders = work_folders(path.parent)
    copies = [old for folder in folders for old in replaced(folder) if old.name == path.name]
    return copies + [copy for folder in folders if (copy := folder / "new" / path.name).exists()]


def replaced(folder: Path) -> list[Path]:
    """What a save has moved into its work folder to make room: `swap` may have done that more than once."""
    return [old for inner in entries(folder) if inner.name.startswith("old") for old in entries(inner)]


def is_in_work_folder(path: Path) -> bool:
    """Whether a path is that of `old` or `new` in a work folder."""
    return path.parent.name.startswith(WORK)


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
        status = os.lstat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino


# Which saves run


def lock(folder: Path) -> int:
    """Lock a work folder until the descriptor returned is closed, so that other jobs see that it is in use."""
    opened = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(opened, fcntl.LOCK_EX)  # another job may hold it for a moment, in `is_locked`
    return opened


def is_locked(folder: Path) -> bool | None:
    """Whether a running process uses a work folder; None if the file system has no locks."""
    try:
        opened = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(opened)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def is_dead(folder: Path) -> bool:
    """Whether no running process uses a work folder, so that it may be removed."""
    try:
        age = time.time() - folder.stat().st_mtime
    except OSError:
        return False
    # `Publication.open` makes these once it is locked.
    has_begun = any((folder / name).is_dir() for name in ("new", "old"))
    in_use = is_locked(folder)
    return age > _OLD_SECONDS if in_use is None else not in_use and (has_begun or age > _YOUNG_SECONDS)


# What is whole


def is_unfinished(tag: Path) -> bool:
    """Whether a tag's folder has the mark of a save that is still running, or was killed."""
    return bool(work_folders(tag))


# Names


def remove_own(target: Path, owns: Callable[[str], bool], but: Path | None = None) -> None:
    """Remove the writer's entries of a target, then our marks, and the folder if nothing else is in it.

    A mark `but` stays.
    """
    for item in entries(target):
        if owns(item.name):
            _remove(item)
    for mark in work_folders(target):
        if mark != but:
            shutil.rmtree(mark, ignore_errors=True)
    with suppress(OSError):
        target.rmdir()


def _remove(item: Path) -> None:
    try:
        item.unlink()
    except IsADirectoryError:
        shutil.rmtree(item, ignore_errors=True)
    except OSError:
        pass


def give_back(old: Path, new: Path, owns: Callable[[str], bool]) -> None:
    """Move into the folder `new` what only the folder `old` has, but for the writer's entries."""
    for item in entries(old):
        place = new / item.name
        if owns(item.name) or item.name.startswith(WORK):
            continue
        if not identity(place):
            item.rename(place)
        elif item.is_dir() and not item.is_symlink() and place.is_dir():
            give_back(item, place, owns)


def swap(new: Path, target: Path, folder: Path) -> None:
    """Put `new` in the place of `target`, and move what was there, if anything, into `folder`.

    Raises:
        OSError: it cannot be done; what was at the target is there again.
    """
    old = folder / target.name
    with suppress(FileNotFoundError):  # there is nothing at the target
        if exchange(new, target):
            try:
                new.rename(old)
            except OSError:
                exchange(new, target)
                raise
            return
    if target.is_file() and not target.is_symlink():
        new.replace(target)
        return
    _rename_both(new, target, old)


def _rename_both(new: Path, target: Path, old: Path) -> None:
    """`swap` in two steps, where the file system cannot exchange names."""
    for attempt in range(200):
        aside = old if not attempt else old.parent.with_name(f"old{attempt}") / old.name
        aside.parent.mkdir(exist_ok=True)
        listed(target.parent)  # refreshes the cache of a network disk's client
        with suppress(FileNotFoundError):
            target.rename(aside)
        try:
            new.rename(target)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                time.sleep(attempt / 100)  # clients of network disks cache a name for up to a minute
                continue  # another job has saved there meanwhile
            if aside.exists():
                aside.rename(target)
            raise
        return
    raise OSError(errno.EBUSY, "other programs go on saving there", str(target))

"""Files that survive a power cut: what is written is synced before its name counts, and renamed in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM)
_CACHE_SECONDS = 60  # NFS keeps names for up to `acdirmax`, which is that
_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def sync_file(path: str | Path) -> None:
    """Return once the content of a file is on its disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: str | Path) -> None:
    """Return once the names in a folder are on its disk; some file systems cannot sync a folder, and need not."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise


def sync_tree(path: str | Path) -> None:
    """Return once a file, or a folder with all that is in it, is on its disk. Links are not followed."""
    folders = [Path(path)] if Path(path).is_dir() else []
    if not folders:
        sync_file(path)
    for folder in folders:  # it grows
        for item in folder.iterdir():
            if item.is_symlink():
                continue
            folders.append(item) if item.is_dir() else sync_file(item)
    for folder in folders:
        sync_folder(folder)


def listed(folder: Path) -> list[str]:
    """The names in a folder. The client of a network disk asks its server for them, and then knows what is there."""
    return sorted(item.name for item in folder.iterdir())


def wait_for_name(path: Path) -> None:
    """Wait where a folder lists a name and has nothing at it: a network disk's client forgets within a minute."""
    for _ in range(_CACHE_SECONDS):
        try:
            if path.exists() or path.name not in listed(path.parent):
                return
        except OSError:
            return
        time.sleep(1)


def make_folder(path: Path, sync: bool = True) -> None:
    """Make a folder and its missing parents, and sync their names."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        if sync:
            sync_folder(folder.parent)


def make_own_folder(path: Path, sync: bool = True) -> None:
    """Make a folder that has a name of its own; another rank may have made it.

    Raises:
        OSError: it cannot be made; FileExistsError if something else has the name, such as a link to a folder.
    """
    make_folder(path.parent, sync)
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise
    if sync:
        sync_folder(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders in one step; False where the kernel or the file system cannot (NFS).

    Raises:
        OSError: they cannot be renamed; FileNotFoundError if one is not there.
    """
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """The C library's function (glibc 2.28, Linux 3.15), or None."""
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

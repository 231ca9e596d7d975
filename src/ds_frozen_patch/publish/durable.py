"""Files that survive a power cut: contents are synced first, then renamed to their final name in one step."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CACHE_SECONDS = 60  # NFS caches names for up to `acdirmax`
_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def sync_file(path: str | Path) -> None:
    """Return once the content of a file is on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_folder(path: str | Path) -> None:
    """Return once the names in a folder are on disk; file systems that cannot sync a folder do not need it."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise


def sync_tree(path: str | Path) -> None:
    """Return once a file, or a folder and all files in it, is on disk. Links are not followed, nor pipes opened."""
    folders = [Path(path)] if Path(path).is_dir() else []
    if not folders:
        sync_file(path)
    for folder in folders:  # the list grows
        for item in folder.iterdir():
            if item.is_symlink():
                continue
            if item.is_dir():
                folders.append(item)
            elif item.is_file():
                sync_file(item)
    for folder in folders:
        sync_folder(folder)


@contextmanager
def write_beside(target: Path, *, replace: bool = False, sync: bool = True) -> Iterator[Path]:
    """Write a file or folder to a hidden place beside `target`; when the block ends, sync it and rename it to `target`.

    After an error nothing is left behind. A killed process may leave a hidden `.NAME.*partial`.

    Args:
        target: the final name.
        replace: replace a file or link that has this name at the end, instead of raising FileExistsError.
        sync: wait until the content and the name are on disk.

    Yields:
        The path to write to. Other files may be put beside it; they are removed.
    """
    make_folder(target.parent, sync)
    hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield hidden / target.name
        if sync:
            sync_tree(hidden / target.name)
        if not replace and (target.exists() or target.is_symlink()):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        (hidden / target.name).rename(target)
        if sync:
            sync_folder(target.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def listed(folder: Path) -> list[str]:
    """List the names in a folder. This makes the client of a network disk ask the server and refresh its cache."""
    return sorted(item.name for item in folder.iterdir())


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def wait_for_name(path: Path) -> None:
    """Wait while a folder lists a name that cannot be opened: a network disk's client has cached its absence."""
    for _ in range(_CACHE_SECONDS):
        try:
            if path.exists() or path.name not in listed(path.parent):
                return
        except OSError:
            return
        time.sleep(1)


def make_folder(path: Path, sync: bool = True, made: list[Path] | None = None) -> None:
    """Make a folder and its missing parents, and sync their names; `made` gets these, outermost first."""
    missing = []
    while not path.exists() and path != path.parent:
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        if made is not None:
            made.append(folder)
        folder.mkdir(exist_ok=True)
        if sync:
            sync_folder(folder.parent)

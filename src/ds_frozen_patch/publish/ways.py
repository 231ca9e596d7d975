"""How the target of a save is written, and the steps of that on disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from .work_folder import (
    WORK,
    entries,
    give_back,
    identity,
    is_locked,
    remove_own,
    replaced,
    work_folders,
)

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def is_local(path: Any) -> bool:
    """Whether a path is one of a mounted file system, and not an address such as s3://bucket/name, a `Path` or not."""
    return _ADDRESS.match(str(path)) is None


class Way(IntEnum):
    """How a target is written."""

    NEW = 0
    """In place, with a mark until it is whole: no checkpoint is there."""
    EXCHANGED = 1
    """In a work folder, and exchanged with what is there."""
    OVER = 2
    """In place, with a mark, over what is there: a link or a mount point, which cannot be exchanged."""
    UNMANAGED = 3
    """By its writer alone, which may return before it has written, or the path is an address."""


def choose_way(target: Path, folder: Path, owns: Callable[[str], bool]) -> Way:
    """How to write a target that is a folder; it is created where it is new.

    Args:
        target: the folder.
        folder: that the program has named.
        owns: whether an entry of the target is the writer's.
    """
    if target.is_symlink() or target == folder or ".." in target.parts or os.path.ismount(target):
        return Way.OVER
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir()
    except FileExistsError:
        inside = [item.name for item in entries(target)]
        is_in_use = any(map(owns, inside)) or any(map(is_locked, work_folders(target)))
        has_others = not all(name.startswith(WORK) for name in inside)
        # Another job may have created an empty one at this moment.
        return Way.NEW if has_others and not is_in_use else Way.EXCHANGED
    except OSError:
        pass  # the save will report it
    return Way.NEW


def missing_folders(path: Path) -> list[Path]:
    """Those of a path and its parents that do not exist, outermost first."""
    missing = []
    while not path.exists() and path != path.parent:
        missing.append(path)
        path = path.parent
    return missing[::-1]


def make_like(target: Path, new: Path) -> None:
    """Make a folder with the mode, the owner and the attributes of another, if that is one."""
    if not target.is_dir():
        return
    new.mkdir()
    with suppress(OSError):
        shutil.copystat(target, new)
        status = target.stat()
        os.chown(new, status.st_uid, status.st_gid)


def put(source: Path, target: Path) -> None:
    """Move a file over another, and the files of a folder into another."""
    if not source.is_dir():
        source.replace(target)
        return
    if target.is_symlink():  # the checkpoint's own directory may be a link
        raise CheckpointError(f"{target} is a link, and saves do not write through links. Remove it.")
    target.mkdir(exist_ok=True)
    for item in entries(source):
        put(item, target / item.name)


def remove_work(folder: Path, owns: Callable[[str], bool]) -> None:
    """Remove a work folder, once what others have put into the target is back where it was."""
    try:
        for old in replaced(folder):
            if not identity(folder.parent / old.name):
                return  # a load finds it here
            give_back(old, folder.parent / old.name, owns)
            remove_own(old, owns)
    except OSError:
        return  # the files of others stay here
    shutil.rmtree(folder, ignore_errors=True)

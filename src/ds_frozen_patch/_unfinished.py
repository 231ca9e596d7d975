"""A checkpoint gets its name once it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._together import on_each_disk


def writes_at_once(engine: Any) -> bool:
    """Whether DeepSpeed has written all when it says so, which its engines of other kinds do not promise."""
    return type(getattr(engine, "checkpoint_engine", None)).__name__ == "TorchCheckpointEngine"


@contextmanager
def unfinished(strategy: Any, target: Path) -> Iterator[Path]:
    """A directory for a checkpoint that takes the target's place, and name, once every rank has written its part.

    So one that is there is whole, and has no files of an earlier save by more ranks.
    """
    if not writes_at_once(strategy.model):
        yield target
        return
    partial, previous = (target.with_name(f".{target.name}.{what}") for what in ("partial", "previous"))
    if strategy.local_rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # DeepSpeed's ranks meet before they write there

    def swap() -> None:
        if not strategy.is_global_zero and not partial.is_dir():
            return  # rank 0 has done it on the same disk
        over = target.is_symlink() or target.exists()  # the former of ModelCheckpoint(save_last="link")
        if over:
            _remove(previous)
            target.rename(previous)
        try:
            partial.rename(target)
        except OSError:
            if over:
                previous.rename(target)
            raise
        _remove(previous)

    try:
        yield partial
        on_each_disk(strategy, target, swap)
    except BaseException:
        if strategy.local_rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def named_in_the_end(folder: Path) -> Path:
    """The name that a directory of `unfinished` is to have."""
    if not folder.name.endswith(".partial"):
        return folder
    return folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))

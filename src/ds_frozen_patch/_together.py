"""What fails on one rank of a save is raised on every rank: none is left waiting for one that has given up.

DeepSpeed's ranks meet several times in a save, before and after each has written its part. A rank whose disk is full
would leave them by an exception, and the others would wait until the process group times out.
"""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ._errors import CheckpointError, CheckpointMismatchError
from ._lending import lent
from ._text import human_bytes
from .fingerprint import on_any_rank

AS_BEFORE = "What was saved there before is as it was."


@contextmanager
def put_off(failed: list[CheckpointError], path: Any) -> Iterator[None]:
    """Keep what fails in `failed`, for `raise_together`, and go on."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, CheckpointError):
            cause = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            kept = CheckpointError(f"{path} cannot be written ({cause}){_room(Path(path))}")
            _let_go(error)
            kept.__cause__ = error
            error = kept
        failed.append(error)


def _let_go(error: BaseException | None) -> None:
    """Of the file that could not be written: as long as the frames of an error hold it open, it takes up room."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _room(path: Path) -> str:
    """How much room there is: torch tells of a full disk by the place in its own sources where it noticed."""
    there = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    try:
        return f", with {human_bytes(shutil.disk_usage(there).free)} free on its disk"
    except OSError:
        return ""


def raise_together(strategy: Any, target: Any, failed: list[CheckpointError], there: str = AS_BEFORE) -> None:
    """Raise on every rank what has failed on one; every rank must call it. It is a barrier too.

    Args:
        strategy: that saves.
        target: what it saves.
        failed: on this rank.
        there: what is to be said of what is there.

    Raises:
        CheckpointError: something has failed, on this rank or another.
    """
    if not any(on_any_rank([bool(failed)], strategy.root_device)):
        return
    import torch.distributed as dist

    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(failed[0]) if failed else None)
    said = [f"Rank {rank}: {text.removesuffix('.')}." for rank, text in enumerate(everywhere) if text]
    more = f" And {len(said) - 2} more ranks." if len(said) > 2 else ""
    raise CheckpointError(
        f"{target} was not saved. {' '.join(said[:2])}{more} {there} The run can go on, and save again when this"
        " is mended."
    ) from (failed[0] if failed else None)


def on_each_disk(strategy: Any, path: Any, do: Callable[[], None]) -> None:
    """Rank 0 does it, and then a rank of each node, whose disk may be another; what fails is raised on every rank."""
    failed: list[CheckpointError] = []
    if strategy.is_global_zero:
        with put_off(failed, path):
            do()
    raise_together(strategy, path, failed)
    if strategy.local_rank == 0 and not strategy.is_global_zero:
        with put_off(failed, path):
            do()
    raise_together(strategy, path, failed, "Other nodes, with disks of their own, may have saved it.")


def writes_put_off(engine: Any, failed: list[CheckpointError]) -> AbstractContextManager[None]:
    """While this lasts, DeepSpeed goes on when it cannot write a file or make a folder; see `put_off`."""
    writer = engine.checkpoint_engine
    writes = [(writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]
    there = [(owner, name, getattr(owner, name)) for owner, name in writes if hasattr(owner, name)]
    return lent([(owner, name, _putting_off(write, failed)) for owner, name, write in there])


def _putting_off(write: Callable[..., Any], failed: list[CheckpointError]) -> Callable[..., None]:
    def attempt(*args: Any, **kwargs: Any) -> None:
        paths = [item for item in (*args, *kwargs.values()) if isinstance(item, str | os.PathLike)]
        with put_off(failed, paths[0] if paths else "a file"):
            write(*args, **kwargs)

    return attempt


@contextmanager
def naming(target: Any) -> Iterator[None]:
    """Say of an error of torch's, as when another rank has died, what could not be saved."""
    try:
        yield
    except (CheckpointError, CheckpointMismatchError):
        raise
    except RuntimeError as error:
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            raise
        raise CheckpointError(
            f"{target} was not saved ({error}). If that says that another rank is gone, start the run again from its"
            f" last checkpoint. {AS_BEFORE}"
        ) from error

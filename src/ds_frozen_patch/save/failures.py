"""The errors of one rank in a save: recorded where they occur, and raised on every rank at its end.

A rank that raised at once would leave the others waiting in the next collective.
"""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from ..common.text import human_bytes
from ..engine.owner import Owner
from ..ranks import gather, gather_numbers

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NEARLY_FULL = 16 * 2**20
"""torch reports a full disk by a line of its own source code, when less than this is free."""


@dataclass
class Failures:
    """The errors of this rank in writing to one path.

    Attributes:
        owner: of the engine.
        target: the path.
        errors: in the order in which they occurred.
    """

    owner: Owner
    target: Path
    errors: list[CheckpointError] = field(default_factory=list)

    @contextmanager
    def deferred(self, path: Any) -> Iterator[None]:
        """Record an error in place of raising it: this rank must not miss the collectives that follow."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CheckpointError):
                recorded = CheckpointError(
                    f"{path} cannot be written ({_cause(error, Path(path))}){_free_space(error, Path(path))}"
                )
                _release_files(error)
                recorded.__cause__ = error
                error = recorded
            self.errors.append(error)

    def deferring(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes, with its errors recorded."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            with self.deferred(self.target):
                return write(*args, **kwargs)

        return attempt

    def any(self) -> bool:
        """Whether a rank has recorded an error; every rank must call it. It is a barrier."""
        return any(failed for (failed,) in gather_numbers([bool(self.errors)], self.owner.device))

    def error(self, state: str | None, is_saved: bool = False) -> CheckpointError:
        """What every rank raises, once `any` has said so; every rank must call it.

        Args:
            state: what is at the path now, as a sentence; None if another rank says it.
            is_saved: whether that is the new checkpoint, on this rank's disk.
        """
        reports = gather((str(self.errors[0]) if self.errors else None, state, is_saved))
        errors = [f"Rank {rank}: {text.removesuffix('.')}." for rank, (text, *_) in enumerate(reports) if text]
        states = " ".join(dict.fromkeys(text for _, text, _ in reports if text))
        saved = all(is_there for _, text, is_there in reports if text)
        error = failure(self.target, errors[:2], len(errors), states, saved)
        error.__cause__ = self.errors[0] if self.errors else None
        return error


def failure(target: Path, errors: list[str], count: int, states: str, is_saved: bool) -> CheckpointError:
    """The error that every rank raises.

    Args:
        target: what was not saved.
        errors: those of the first two ranks, as sentences.
        count: of all ranks with an error.
        states: of the target on each disk, as sentences.
        is_saved: whether the error has followed after the new checkpoint exists.
    """
    more = f" And {count - 2} more ranks." if count > 2 else ""
    outcome = "was saved, but an error has followed" if is_saved else "was not saved"
    return CheckpointError(
        f"{target} {outcome}. {' '.join(errors)}{more} {states} The run can go on, and save again once the cause is"
        " removed."
    )


def _cause(error: Exception, path: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        at = f": {error.filename}" if error.filename is not None and str(error.filename) != str(path) else ""
        return f"{error.strerror}{at}"
    return f"{type(error).__name__}: {error}"


def _free_space(error: Exception, path: Path) -> str:
    """The free space, where a lack of it is the cause."""
    try:
        folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path(os.sep))
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    is_full = error.errno in _NO_SPACE if isinstance(error, OSError) else free < _NEARLY_FULL
    if not is_full:
        return ""
    return f", with {human_bytes(free)} free on its disk. A save over a checkpoint needs room for both until it is done"


def _release_files(error: BaseException | None) -> None:
    """Close the file that could not be written: while the frames of an error keep it open, it takes up space."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__

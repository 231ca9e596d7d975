"""The newest checkpoint of several, where a framework looks for it by itself: one that is not whole is passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ..ranks import rank


def last_whole(folders: Sequence[Path], is_whole: Callable[[Path], bool], logger: logging.Logger) -> Path | None:
    """The last of some folders that is whole, or None; rank 0 logs each that is passed over.

    Args:
        folders: of checkpoints, the newest last.
        is_whole: whether a folder has everything that the framework writes.
        logger: of the framework.
    """
    for folder in reversed(folders):
        if is_whole(folder):
            return folder
        if rank() == 0:
            logger.warning("%s is passed over: the save that wrote it was interrupted, or still runs.", folder)
    return None

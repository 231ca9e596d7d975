"""Asynchronous saves whose files take long to be written, or cannot be. Everything here runs inside a rank."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.save.recording import Recorder

WRITE = Recorder.write


def writing(seconds: float = 0, fails: bool = False, rank: int | None = None) -> AbstractContextManager[None]:
    """While this lasts, a rank's files, or all, take so many seconds to be written, or cannot be."""

    def write(recorder: Recorder) -> Iterator[Path]:
        if rank is None or rank == torch.distributed.get_rank():
            time.sleep(seconds)
            if fails:
                raise OSError(errno.ENOSPC, "No space left on device")
        yield from WRITE(recorder)

    return overridden([(Recorder, "write", write)])


def writing_when(told: threading.Event) -> AbstractContextManager[None]:
    """While this lasts, files are written once that is set; those of rank 1 after those of rank 0."""

    def write(recorder: Recorder) -> Iterator[Path]:
        told.wait(60)
        time.sleep(0.5 * torch.distributed.get_rank())
        yield from WRITE(recorder)

    return overridden([(Recorder, "write", write)])

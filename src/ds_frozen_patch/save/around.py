"""What a framework writes beside the files of its engines: it stays where the framework puts it, and gets synced."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from ..checkpoint.names import is_state
from ..engine.owner import Owner
from ..engine.served import ServedEngine
from ..publish.durable import entries, sync_folder, sync_tree
from ..publish.notes import OURS
from ..settings import current as settings
from .failures import Failures

_CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a file server may be behind."""


class Around:
    """One save by a framework, from before its first file to after its last.

    Attributes:
        failures: in what the framework writes.
    """

    def __init__(self, owner: Owner, folder: Path) -> None:
        self.failures = Failures(owner, folder)
        self._folder = folder
        self._since = time.time() - _CLOCKS_DIFFER

    def end(self, served: ServedEngine) -> None:
        """Sync what is new in the folder, and raise an error of one rank on all; every rank must call it.

        Args:
            served: an engine that was saved there, whose own files are synced already.

        Raises:
            CheckpointError: a rank could not write or sync its files.
        """
        self._raise()
        if not settings().fsync:
            return
        if served.publishes:
            with self.failures.deferred(self._folder):
                for item in entries(self._folder):
                    with suppress(FileNotFoundError, PermissionError):  # other programs have files here too
                        if self._is_new(item):
                            sync_tree(item)
                sync_folder(self._folder)
        self._raise()

    def _is_new(self, item: Path) -> bool:
        """Whether the framework has written it in this save; an engine syncs its files itself."""
        names = [item.name, *(inner.name for inner in entries(item))]
        if item.is_symlink() or any(is_state(name) or name.startswith(OURS) for name in names):
            return False
        return (item.is_dir() or item.is_file()) and item.stat().st_mtime >= self._since

    def _raise(self) -> None:
        if self.failures.any():
            raise self.failures.error("It lacks these files now.")

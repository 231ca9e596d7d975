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
from .agreement import SaveRanks

_CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a file server may be behind."""


class Around:
    """One save by a framework, from before its first file to after its last.

    Attributes:
        ranks: lets the ranks agree; also as `failures`, where it only records errors.
    """

    def __init__(self, owner: Owner, folder: Path) -> None:
        self.ranks = self.failures = SaveRanks(owner.device, folder, lambda: ("It lacks these files now.", False))
        self._folder = folder
        self._since = time.time() - _CLOCKS_DIFFER

    def end(self, served: ServedEngine) -> None:
        """Sync what is new in the folder, and raise an error of one rank on all; every rank must call it.

        Args:
            served: an engine that was saved there, whose own files are synced already.

        Raises:
            CheckpointError: a rank could not write or sync its files.
        """
        self.ranks.step("write beside the engine's files")
        if settings().fsync:
            self.ranks.step("sync what was written", self._sync if served.publishes else None)

    def _sync(self) -> None:
        for item in entries(self._folder):
            with suppress(FileNotFoundError, PermissionError):  # other programs have files here too
                if self._is_new(item):
                    sync_tree(item)
        sync_folder(self._folder)

    def _is_new(self, item: Path) -> bool:
        """Whether the framework has written it in this save; an engine syncs its files itself."""
        names = [item.name, *(inner.name for inner in entries(item))]
        if item.is_symlink() or any(is_state(name) or name.startswith(OURS) for name in names):
            return False
        return (item.is_dir() or item.is_file()) and item.stat().st_mtime >= self._since

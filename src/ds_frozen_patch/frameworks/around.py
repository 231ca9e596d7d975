"""What a framework writes in one save beside the files of its engines."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..common.files import is_state
from ..engine.served import Owner, ServedEngine
from ..publish.durable import entries, sync_folder, sync_tree
from ..publish.notes import OURS
from ..publish.publication import is_local
from ..save.agreement import SaveRanks
from ..settings import current as settings

_CLOCKS_DIFFER = 60.0
"""Seconds by which the clock of a file server may be behind."""


class Around:
    """What a framework writes in one save beside the files of its engines: it stays there, and gets synced.

    If that is at an address, it writes to a scratch folder of the rank, which is uploaded, and removed with the block.

    Attributes:
        ranks: lets the ranks agree, and records errors until the next step.
        folder: where it writes, on this machine.
        is_remote: whether that is a scratch folder.
        shown: the folder that the program has named.
    """

    def __init__(self, owner: Owner, folder: Path, last: str) -> None:
        self.folder, self.shown, self.is_remote, self._last = folder, str(folder), not is_local(folder), last
        if self.is_remote:
            from ..buckets import address_of, scratch_of

            self.folder, self.shown = scratch_of(folder), address_of(folder)
        self.ranks = SaveRanks(owner.device, self.folder, lambda: ("It lacks these files now.", False))
        self._since = time.time() - _CLOCKS_DIFFER

    def __enter__(self) -> Around:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_remote:
            from ..buckets import release

            release(self.folder)

    def end(self, served: ServedEngine) -> None:
        """Sync or upload what is new in the folder, and raise an error of one rank on all; every rank must call it.

        Args:
            served: an engine that was saved there, whose own files are synced already.

        Raises:
            CheckpointError: a rank could not write, sync or upload its files.
        """
        self.ranks.step("write beside the engine's files")
        if self.is_remote:
            for is_last in (False, True):
                self.ranks.step("upload what was written", partial(self._upload, is_last))
        elif settings().fsync:
            self.ranks.step("sync what was written", self._sync if served.publishes else None)

    def remove(self, older: Path) -> None:
        """Remove an older checkpoint."""
        if self.is_remote:
            from .remote import remove_checkpoint

            remove_checkpoint(older)
        else:
            shutil.rmtree(older)

    def _upload(self, is_last: bool) -> None:
        """Upload what this rank has written, but for the file that says that all is there; or that one."""
        from ..buckets import put

        files = [item for item in self.folder.rglob("*") if item.is_file()]
        put(item for item in files if (item == self.folder / self._last) is is_last)

    def _sync(self) -> None:
        for item in self.folder.iterdir():
            with suppress(FileNotFoundError, PermissionError):  # other programs have files here too
                if self._is_new(item):
                    sync_tree(item)
        sync_folder(self.folder)

    def _is_new(self, item: Path) -> bool:
        """Whether the framework has written it in this save; an engine syncs its files itself."""
        names = [item.name, *(inner.name for inner in entries(item))]
        if item.is_symlink() or any(is_state(name) or name.startswith(OURS) for name in names):
            return False
        return (item.is_dir() or item.is_file()) and item.stat().st_mtime >= self._since

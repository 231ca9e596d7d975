"""The end of a save whose files are written: they get their names on every disk, or on none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..common.collectives import digest
from ..common.errors import CheckpointError
from ..record import File, listing
from . import export_trained
from .running import Save

Agree = Callable[[str], Mapping[int, File]]
"""Lets the ranks agree that all have done a step, by name; it raises CheckpointError on every rank if one has failed.

It returns what the ranks have written and need not be read again, by the digests of the file names.
"""


def publish(save: Save, agree: Agree) -> None:
    """Give the files of a save their names; every rank must call it, once it has written its own.

    Raises:
        CheckpointError: a rank has recorded an error.
    """
    written = agree("written")
    if save.publishes:
        if save.export is not None:
            export_trained.write(save, save.export)
        if not save.failures.errors:
            with save.failures.deferred(save.place.shown):
                save.place.prepare(_record(save, written))
    if save.place.is_on_own_disks:  # what is prepared on all can be finished by a load
        agree("prepared")
        save.place.is_decided = True
    if save.publishes and not save.failures.errors:
        with save.failures.deferred(save.place.shown):
            save.place.give_names()
    agree("named")


def _record(save: Save, written: Mapping[int, File]) -> str | None:
    """The content of the record, for all files on this rank's disk."""
    if not save.place.is_tag:
        return None
    files = save.place.written()
    lost = save.written.keys() - files.keys()
    if lost or (save.is_in_one_place and not written.keys() <= {digest(name) for name in files}):
        raise CheckpointError(f"another program has removed files from {save.place.target} during the save")
    return None if save.record is None else listing(save.record, files, written)

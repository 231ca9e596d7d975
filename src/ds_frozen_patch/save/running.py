"""One save that is running: what is known of it, and what each rank does on its disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base import Base
from ..common.files import SCRATCH
from ..engine.served import Owner, ServedEngine
from ..parameters import Contents
from ..publish.publication import Publication
from ..record import File, Record
from ..settings import current as settings
from .agreement import SaveRanks
from .writer import Recorder


@dataclass
class Save:
    """One save of one engine.

    Attributes:
        engine: that is saved.
        served: what is known of it.
        place: where it is written: the folder of the tag, or a file.
        base: what is left out of it; None for a full checkpoint.
        is_in_one_place: whether all ranks save to the same path, on one node, or to one address.
        opens_disk: whether this rank is the first of those that write to a target, which can be on a disk of its own.
        publishes: whether this rank gives the files their names on its disk.
        written: what this rank has written, and where.
        note: takes the path and the description of a file that is written.
        record: of the checkpoint, once it is made, without its files; None of a single file.
        removed: the names of what is left out that were in the module's state dict.
        recorder: of what the engine writes, to be written later; None if the save writes it.
        export: the format in which the trained weights are exported too, or None.
        ranks: lets the ranks agree, and records errors until the next step.
        thread: that saves.
    """

    engine: Any
    served: ServedEngine
    place: Publication
    base: Base | None = None
    is_in_one_place: bool = False
    opens_disk: bool = False
    publishes: bool = False
    written: dict[Path, File] = field(default_factory=dict)
    record: Record | None = None
    removed: set[str] = field(default_factory=set)
    recorder: Recorder | None = None
    export: str | None = None
    ranks: SaveRanks = field(init=False)
    note: Callable[[Path, File], None] = field(init=False)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def owner(self) -> Owner:
        """Whoever made the engine."""
        return self.served.owner

    @cached_property
    def contents(self) -> Contents:
        """What the module contains, at the moment of the save."""
        return Contents(self.engine.module)

    def open(self) -> None:
        """Prepare where this rank, and those that share its disk, write."""
        self.publishes = self.served.publishes = True
        with self.ranks.deferred(self.place.shown):
            self.place.open()

    def is_on_own_disk(self) -> bool:
        """Whether rank 0, which has opened the save, has done so on another disk than this rank's; with a warning."""
        if not self.place.is_on_another_disk():
            return False
        if not self.place.is_on_own_disks and self.served.is_first_time("disks that are not configured"):
            self.owner.logger.warning(
                "This node writes %s to a disk of its own, but DeepSpeed is configured for a shared one: it will not"
                ' find all files at a resume. Set "checkpoint": {"use_node_local_storage": true} in its configuration,'
                " or save to a disk that all nodes share.",
                self.place.folder,
            )
        return True

    def clean_up(self) -> tuple[str | None, bool]:
        """As `SaveRanks` needs it."""
        self.discard()
        return self.place.state_of_target() if self.publishes else (None, False)

    def discard(self) -> None:
        """Remove what was written on this rank's disk, unless it has its name."""
        if self.publishes:
            with suppress(OSError):  # the other ranks wait for what follows
                self.place.discard()
        if self.place.upload is not None:
            self.place.upload.release()


def place_of(
    engine: Any, served: ServedEngine, target: Path, shown: Path, is_managed: bool, folder: Path | None = None
) -> Publication:
    """Where a save is written.

    Args:
        engine, served: what is saved.
        target: the folder of the tag, or a file.
        shown: what messages name.
        is_managed: whether we give the files their names; else whoever writes them does.
        folder: that the program has named, if the target is the folder of a tag.
    """
    owner = served.owner

    def warn(kind: str, message: str) -> None:
        if not kind or served.is_first_time(kind):
            owner.logger.warning(message)

    kind, is_remote = Publication, SCRATCH.match(str(target)) is not None
    if is_remote:
        from ..buckets import Upload

        kind = Upload
    return kind(
        target,
        folder or target.parent,
        shown,
        is_tag=folder is not None,
        is_managed=is_managed,
        sync=settings().fsync and not is_remote,
        is_on_own_disks=bool(engine.use_node_local_storage()) and not is_remote,
        is_alone=owner.names_each_save,
        warn=warn,
    )

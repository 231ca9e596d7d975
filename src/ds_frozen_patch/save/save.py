"""One save of one engine, from the agreement of the ranks to the final name of its files.

1. The ranks agree on what is saved, and where to, in one collective. If their requests differ, all of them raise.
2. They write to where the publication says. Each syncs what it has written.
3. Once every rank has written its part, one rank per disk gives the files their names.
4. One more collective: an error of one rank is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint.names import WRITER
from ..common.collectives import gather_numbers
from ..core.record import File, Record, pack, unpack, write_record
from ..engine.owner import Owner
from ..engine.served import ServedEngine
from ..parameters import ModuleTensor
from ..publish.publication import Publication
from ..publish.ways import Way
from .failures import Failures
from .recording import Recorder

current: ContextVar[Save | None] = ContextVar("ds_frozen_patch_save", default=None)
"""The save that is running, for what upstream's code calls back."""


@dataclass
class Save:
    """One save of one engine.

    Attributes:
        owner: of the engine.
        engine: that is saved.
        attached: what is known of it.
        place: where it is written: the folder of the tag, or a file.
        left_out: what is left out; None for a full checkpoint.
        is_in_one_place: whether all ranks are on one node, and save to the same path.
        base_is_known: whether every rank knows the fingerprints of what is left out.
        base_has_changed: whether a rank has seen training change some of it.
        publishes: whether this rank gives the files their names on its disk.
        written: what this rank has written, by name.
        record: of what is saved, to be written beside the files; None if it is not managed.
        names_left_out: the names in the manifest, once there is one.
        removed: those of them that were in the module's state dict.
        recorder: of what the engine writes, to be written later; None if the save writes it.
    """

    owner: Owner
    engine: Any
    attached: ServedEngine
    place: Publication
    left_out: list[ModuleTensor] | None
    is_in_one_place: bool = False
    base_is_known: bool = False
    base_has_changed: bool = False
    publishes: bool = False
    written: dict[str, File] = field(default_factory=dict)
    record: Record | None = None
    names_left_out: frozenset[str] | None = None
    removed: set[str] = field(default_factory=set)
    recorder: Recorder | None = None

    @cached_property
    def failures(self) -> Failures:
        """The errors of this rank."""
        return Failures(self.owner, self.place.shown)

    def open(self, is_tag: bool = False) -> None:
        """Prepare where this rank, and those that share its disk, write; an error is recorded.

        Args:
            is_tag: whether the target is the folder of a tag.
        """
        self.publishes = self.attached.publishes = True
        with self.failures.deferred(self.place.shown):
            self.place.open(chooses_way=is_tag)

    def is_on_own_disk(self) -> bool:
        """Whether rank 0, which has opened the save, has done so on another disk than this rank's; with a warning."""
        if not self.place.is_on_another_disk():
            return False
        if not self.place.is_on_own_disks and self.attached.is_first_time("disks that are not configured"):
            self.owner.logger.warning(
                "This node writes %s to a disk of its own, but DeepSpeed is configured for a shared one: it will not"
                ' find all files at a resume. Set "checkpoint": {"use_node_local_storage": true} in its configuration,'
                " or save to a disk that all nodes share.",
                self.place.folder,
            )
        return True

    def agree(self) -> dict[int, File]:
        """Raise on every rank if one has recorded an error; every rank must call it. It is a barrier.

        Returns:
            What the ranks have written, by the digests of the file names. It lacks names for which ranks differ, as on
            disks of their own.
        """
        everyone = gather_numbers([bool(self.failures.errors), *pack(self.written)], self.owner.device)
        if any(one[0] for one in everyone):
            self.discard()
            raise self.failures.error(self.place.state_of_target()[0] if self.publishes else None)
        written: dict[int, File | None] = {}
        for name, file in (item for _, *packed in everyone for item in unpack(packed).items()):
            if written.setdefault(name, file) != file:
                written[name] = None
        return {name: file for name, file in written.items() if file is not None}

    def publish(self) -> None:
        """Give the checkpoint its final name on every disk; every rank must call it.

        Raises:
            CheckpointError: a rank has recorded an error.
        """
        several = self.place.is_on_own_disks
        written = self.agree()
        if self.publishes:
            self.give_name(written)
            if not several and not self.failures.errors:
                self.place.close()  # before the others go on
        self.agree()
        if several:
            if self.publishes:
                self.place.close()
            gather_numbers([0], self.owner.device)

    def give_name(self, written: Mapping[int, File] | None = None) -> None:
        """Give the checkpoint its final name on this rank's disk; an error is recorded.

        Args:
            written: what the ranks have written, as far as it is known.
        """
        with self.failures.deferred(self.place.shown):
            if self.record is not None:
                write_record(self.place.destination, self.record, written)
            self.place.give_name()

    def discard(self) -> None:
        """Remove what was written on this rank's disk, unless it has its name."""
        if self.publishes:
            self.place.discard()


def place_of(
    owner: Owner, engine: Any, attached: ServedEngine, paths: tuple[Path, Path, Path], is_managed: bool, sync: bool
) -> Publication:
    """Where a save is written.

    Args:
        owner, engine, attached: of the save.
        paths: the target, the folder that the program has named, and what messages name.
        is_managed: whether we give the files their names.
        sync: whether files are synced.
    """

    def warn(kind: str, message: str) -> None:
        if not kind or attached.is_first_time(kind):
            owner.logger.warning(message)

    return Publication(
        *paths,
        way=Way.EXCHANGED if is_managed else Way.UNMANAGED,
        writer=WRITER,
        sync=sync,
        is_on_own_disks=bool(engine.use_node_local_storage()),
        is_alone=owner.names_each_save,
        warn=warn,
    )

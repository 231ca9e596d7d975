"""One load, from a path to the agreement of the ranks that all of them can load it.

Before DeepSpeed loads anything, each rank verifies a share of the files, and one collective follows: an error of one
rank, or of one file, is raised on every rank. Rank 0 lists the folder and shares the list through the process group's
store; on disks of their own (`use_node_local_storage`), each rank looks for its own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoint.zero.layout import latest_tag
from ..checkpoint.zero.states import FileDigests
from ..common.collectives import default_store, digest, gather, gather_numbers, world_size
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..core.base import frozen
from ..core.record import Record, read_record
from ..engine.owner import Owner, is_first, warn
from ..fingerprint import process_memory
from ..publish.durable import wait_for_name
from ..publish.work_folder import left_behind
from ..settings import current as settings
from .integrity import check_files, own_share, share
from .listing import Listing, list_all, list_own

current: ContextVar[Load | None] = ContextVar("ds_frozen_patch_load", default=None)
"""The load that is running, for what upstream's code calls back."""

_numbers = count()


def where_it_is(owner: Owner, tag: Path) -> Path:
    """The folder of a tag, or with a warning where a killed save has left the previous one."""
    wait_for_name(tag)
    if not tag.exists() and (copies := left_behind(tag)):
        warn(
            owner,
            f"A save was killed while it renamed its checkpoint. The previous {tag} is loaded from {copies[0]}.",
        )
        return copies[0]
    return tag


@dataclass
class Load:
    """One load.

    Attributes:
        owner: of the engine.
        requested: what Fabric is to restore.
        engine: that loads, once it is known.
        source: the directory, on this rank.
        tag: the folder in it.
        restores_optimizer: whether the optimizer's state is loaded too.
        base_is_known: whether every rank knows the fingerprints of what is frozen.
        record: of the checkpoint; None if it has none.
        may_be_missing: the names that the record's manifest allows to be missing.
        read: what identifies the files that DeepSpeed has read on this rank.
        module: the module's state dict in this rank's file, where DeepSpeed replaces it by another.
        state: the part of the checkpoint's own state that is needed afterwards.
    """

    owner: Owner
    requested: tuple[Any, ...] = ()
    engine: Any = None
    source: str = ""
    tag: str | None = None
    restores_optimizer: bool = False
    base_is_known: bool = False
    record: Record | None = None
    may_be_missing: frozenset[str] = frozenset()
    read: list[FileDigests] = field(default_factory=list)
    module: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    _number: int = field(default_factory=lambda: next(_numbers))
    _listings: int = 0

    @property
    def is_on_own_disks(self) -> bool:
        """Whether nodes have disks of their own: by the run's configuration, since an engine for tests lacks it."""
        section = self.owner.config.get("checkpoint")
        configured = isinstance(section, Mapping) and section.get("use_node_local_storage")
        return bool(configured or (self.engine is not None and self.engine.use_node_local_storage()))

    def list_files(self) -> Listing:
        """What is in the folder, as rank 0 sees it; on disks of their own, as this rank does."""
        if self.is_on_own_disks:
            return list_own(self.engine, self.source, self.tag)
        store = default_store()
        if is_first(self.owner):
            return self.share_listing(list_all(self.source, self.tag, self.restores_optimizer))
        if store is None:
            return list_all(self.source, self.tag, self.restores_optimizer)
        return Listing.from_bytes(store.get(self._key()))

    def share_listing(self, listing: Listing) -> Listing:
        """On rank 0, send its listing to the other ranks, which wait for it."""
        store = default_store()
        if store is not None and is_first(self.owner):
            store.set(self._key(), listing.to_bytes())
        return listing

    def _key(self) -> str:
        self._listings += 1
        return f"ds_frozen_patch/load{self._number}.{self._listings}"

    def check(self, listing: Listing) -> None:
        """Read the record, verify this rank's share of the files, and agree; every rank must call it.

        Raises:
            CheckpointError: on every rank, if one has found a file to be missing, damaged, or of another save.
        """
        if self._check_and_agree(listing):
            return
        if self.is_on_own_disks:
            self._choose_common_save()
            if self._check_and_agree(self.list_files()):
                return
        raise CheckpointError(f"{self.source} has files of more than one save. Take all files from one checkpoint.")

    def _check_and_agree(self, listing: Listing) -> bool:
        """Whether the ranks have the record of one save, whose files are whole."""
        problem: Exception | None = CheckpointError(listing.problem) if listing.problem else None
        if problem is None and listing.tag is not None:
            try:
                self._check_share(listing)
            except (CheckpointError, CheckpointMismatchError) as error:
                problem = error
            except Exception as error:  # which the other ranks would wait for
                problem = CheckpointError(f"{self.source} cannot be read: {type(error).__name__}: {error}")
        return self.agree("a checkpoint", problem)

    def _check_share(self, listing: Listing) -> None:
        layout = listing.layout(self.source)
        self.record = listing.record or read_record(layout.model[0].parent)
        if self.is_on_own_disks:
            check_files(own_share(layout, self.owner.rank, self.owner.local_rank), self.record)
            return
        check_files(share(layout, self.owner.rank, world_size()), self.record)

    def agree(self, what: str, problem: Exception | None = None) -> bool:
        """Let the ranks agree on a load; every rank must call it, once for each load.

        Args:
            what: this rank has found at the path.
            problem: what this rank would raise.

        Returns:
            Whether the ranks have the record of one save.

        Raises:
            CheckpointError: another rank has a problem.
            CheckpointMismatchError: the ranks load different things, or their settings differ.
        """
        now = settings()
        request = f"{what}, verify_base={now.verify_base!r}, elastic={now.elastic!r}"
        save = digest(self.record.save) if self.record is not None else 0
        own = [problem is not None, digest(request), self._knows_base(), save]
        everyone = gather_numbers(own, self.owner.device)
        self.base_is_known = all(one[2] for one in everyone)
        if any(one[0] for one in everyone):
            self.raise_on_all_ranks(problem)
        if len({one[1] for one in everyone}) > 1:
            found = {text: rank for rank, text in reversed(list(enumerate(gather(request))))}
            differing = "; ".join(f"rank {rank}: {text}" for text, rank in found.items())
            raise CheckpointMismatchError(
                f"The ranks load different checkpoints ({differing}). Give every rank the same path and settings."
            )
        return len({one[3] for one in everyone}) == 1

    def _knows_base(self) -> bool:
        module = getattr(self.engine, "module", None)
        if module is None or settings().verify_base == "off":
            return True
        return all(process_memory().holds(one.tensor) for one in frozen(module))

    def raise_on_all_ranks(self, problem: Exception | None) -> None:
        """Raise this rank's own problem, or those of the others; every rank must call it."""
        of_a_file = problem is None or isinstance(problem, CheckpointError)
        found = gather((str(problem or ""), of_a_file))
        if problem is not None and not of_a_file:
            raise problem
        texts = [text if plain else f"Rank {rank}: {text}" for rank, (text, plain) in enumerate(found) if text]
        raise CheckpointError("\n".join(dict.fromkeys(texts))) from problem

    def _choose_common_save(self) -> None:
        """Choose the newest save that all nodes have, after a kill between two nodes' renames.

        Copies that are newer than every named checkpoint are ignored: they may be from an abandoned run.

        Raises:
            CheckpointError: there is none.
        """
        copies: dict[str, tuple[int, str]] = {}
        self.tag = latest_tag(Path(self.source)) if self.tag is None else self.tag
        tag = Path(self.source, self.tag)
        for copy in (self.source, *(str(copy.parent) for copy in left_behind(tag))):
            if (record := list_own(self.engine, copy, self.tag).record) is not None:
                copies.setdefault(record.save, (record.step, copy))
        everyone = gather((next(iter(copies), None), copies))
        newest = max((others[first][0] for first, others in everyone if first is not None), default=0)
        common = [
            save
            for save, (step, _) in copies.items()
            if step <= newest and all(save in others for _, others in everyone)
        ]
        if not common:
            lines = [
                f"rank {rank}: of step {others[first][0]}" if first else f"rank {rank}: of an unknown save"
                for rank, (first, others) in enumerate(everyone)
            ]
            raise CheckpointError(
                f"The nodes have different saves of {self.source} ({'; '.join(lines[:10])}). A save was killed between"
                " the renames of two nodes. Load a checkpoint that all nodes have."
            )
        save = max(common, key=lambda one: (everyone[0][1][one][0], one))
        step, self.source = copies[save]
        warn(
            self.owner,
            "A save was killed after some nodes had renamed its checkpoint, and before the others had. All nodes load"
            f" the one of step {step}, which each of them has: here from {self.source}.",
        )

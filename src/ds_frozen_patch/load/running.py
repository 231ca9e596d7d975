"""One load that is running: what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

from ..base import Base
from ..checkpoint.zero.states import FileDigests
from ..core.record import Record
from ..engine.owner import Owner, warn
from ..parameters import ModuleTensor

current: ContextVar[Load | None] = ContextVar("ds_frozen_patch_load", default=None)
"""The load that is running, for what DeepSpeed calls back."""

_numbers = count()


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
        base_is_known: whether every rank knows the fingerprints of what is frozen, which is as it was built.
        record: of the checkpoint; None if it has none.
        may_be_missing: the names that the record's manifest allows to be missing.
        starts_fresh: all names of what is trained now and was not at the save, see `changed_parameters`.
        read: what identifies the files that DeepSpeed has read on this rank.
        module: the module's state dict in this rank's file, where DeepSpeed replaces it by another.
        state: the part of the checkpoint's own state that is needed afterwards.
        number: of the load in this process.
        attempts: how often it has begun.
        listings: how many listings of files the ranks have shared.
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
    starts_fresh: frozenset[str] = frozenset()
    read: list[FileDigests] = field(default_factory=list)
    module: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))
    listings: int = 0
    attempts: int = 1

    def begin_again(self) -> None:
        """Forget what was read of a checkpoint that another process has replaced."""
        warn(self.owner, f"{self.source} was replaced by a newer checkpoint during the load, which begins again.")
        self.attempts += 1
        self.record, self.may_be_missing, self.starts_fresh = None, frozenset(), frozenset()
        self.read, self.module, self.state = [], {}, {}

    @property
    def is_on_own_disks(self) -> bool:
        """Whether nodes have disks of their own: by the run's configuration, since an engine for tests lacks it."""
        section = self.owner.config.get("checkpoint")
        configured = isinstance(section, Mapping) and section.get("use_node_local_storage")
        return bool(configured or (self.engine is not None and self.engine.use_node_local_storage()))

    @cached_property
    def base(self) -> Base:
        """The base of the engine before the load."""
        return Base(self.engine)

    @cached_property
    def held(self) -> dict[str, ModuleTensor]:
        """What the engine's module holds before the load, by all names."""
        return self.base.contents.by_name

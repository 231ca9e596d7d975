"""One load that is running: what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..base import Base
from ..common.files import shown
from ..engine.served import Owner, warn
from ..parameters import PART, ModuleTensor
from ..record import Record
from .listing import Listing


@dataclass
class Load:
    """One load.

    Attributes:
        owner: of the engine.
        requested: what Fabric is to restore.
        engine: that loads, once it is known.
        source: the directory, on this rank.
        tag: the folder in it.
        listing: what is in the folder, once the ranks know it.
        restores_optimizer: whether the optimizer's masters are loaded too.
        restarts: whether its state is not, although the call asks for it.
        base_is_known: whether every rank knows the fingerprints of what is frozen, which is as it was built.
        record: of the checkpoint; None if it has none.
        may_be_missing: the names that may be missing from the checkpoint; None if that is not known yet.
        starts_fresh: all names of what is trained now and was not at the save, see `changed_parameters`.
        read: the digest of the id of the save whose model states this rank has read; 0 before.
        answers: what DeepSpeed gets for a file without reading it, see `elastic`; None for those that it reads.
        module: the module's state dict in this rank's file, where DeepSpeed replaces it by another.
        state: the part of the checkpoint's own state that is needed afterwards.
        attempts: how often it has begun.
    """

    owner: Owner
    requested: tuple[Any, ...] = ()
    engine: Any = None
    source: str = ""
    tag: str | None = None
    listing: Listing = field(default_factory=Listing)
    restores_optimizer: bool = False
    restarts: bool = False
    base_is_known: bool = False
    record: Record | None = None
    may_be_missing: frozenset[str] | None = None
    starts_fresh: frozenset[str] = frozenset()
    read: int = 0
    answers: Callable[[str], Any] = lambda _: None
    module: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 1

    def begin_again(self) -> None:
        """Forget what was read of a checkpoint that another process has replaced."""
        warn(
            self.owner, f"{shown(self.source)} was replaced by a newer checkpoint during the load, which begins again."
        )
        self.attempts += 1
        self.record, self.may_be_missing, self.starts_fresh = None, None, frozenset()
        self.read, self.module, self.state = 0, {}, {}

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

    @cached_property
    def parts(self) -> frozenset[str]:
        """All names of the parts of quantized frozen parameters in `held`."""
        return frozenset(name for name, entry in self.held.items() if entry.kind == PART and entry.is_frozen)

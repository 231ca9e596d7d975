"""The engines that are served, and what is known of each; others are left alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from .owner import Owner, warn
from .topology import Topology, topology_of


@dataclass
class Attached:
    """What is known of an engine.

    Attributes:
        owner: that made it.
        topology: what kind of engine it is.
        prints: the fingerprints at the last save, by name.
        loss_factor: what each loss is multiplied by, see `engine.loss`.
        publishes: whether this rank has published the last checkpoint on its disk.
        recorder: of saves that training does not wait for (`save.recording.Recorder`), once there was one.
        logged: what is logged only once and has been.
    """

    owner: Owner
    topology: Topology
    prints: Mapping[str, str | None] = field(default_factory=dict)
    loss_factor: float = 1.0
    publishes: bool = False
    recorder: Any = None
    logged: set[str] = field(default_factory=set)

    def warn_once(self, message: str) -> None:
        """Log a warning on rank 0, the first time."""
        self.log_once(message, message)

    def log_once(self, kind: str, message: str) -> None:
        """Log a warning on rank 0, the first of its kind."""
        if self.is_first_time(kind):
            warn(self.owner, message)

    def is_first_time(self, what: str) -> bool:
        """Whether this is the first call with this text."""
        is_new = what not in self.logged
        self.logged.add(what)
        return is_new


_engines: WeakKeyDictionary[Any, Attached | None] = WeakKeyDictionary()
"""None for those that are passed on: their saves and loads are as without `patch()`."""


def attach(engine: Any, owner: Owner) -> Attached | None:
    """Serve an engine from now on; what is known of one that is attached already is kept.

    Every rank must call it. It returns None, the first time with a warning, for a kind of engine that is not served.
    """
    if engine not in _engines:
        topology = topology_of(engine)
        _engines[engine] = None if topology.unserved else Attached(owner, topology)
        if topology.unserved:
            warn(
                owner,
                f"ds_frozen_patch does not support {topology.unserved}. Checkpoints of this engine contain frozen"
                " parameters too, and loads do not verify them, as without patch().",
            )
    return _engines[engine]


def attached(engine: Any) -> Attached | None:
    """What is known of an engine; None if it is not served."""
    return _engines.get(engine)


def override(engine: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of one engine, until `restore_methods`."""
    replacement.is_ours = True  # type: ignore[attr-defined]
    setattr(engine, method, replacement)


def restore_methods() -> None:
    """Give every engine its own methods back."""
    for engine in list(_engines):
        for name in [name for name, value in vars(engine).items() if getattr(value, "is_ours", False) is True]:
            delattr(engine, name)

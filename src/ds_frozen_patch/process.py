"""What lasts in this process between one call of a program or framework and the next: one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

    from .base import Origin
    from .engine.served import ServedEngine
    from .patching.patch import Patch
    from .publish.in_flight import InFlight
    from .settings import Settings


@dataclass
class State:
    """What `unpatch()` drops, and a few facts that the next `patch()` must know too.

    Attributes:
        patch: what is wrapped, and what is to be wrapped when it is imported; None without `patch()`.
        refused: why `ds-frozen-patch run` could not patch the program; empty if it could, or has not tried.
        left: why a framework is left as it is, by its package's name; empty if it is not.
        notes: what `ds-frozen-patch run` has to tell the program at its first engine.
        settings: of the `patch()` in force; None for those of the environment.
        engines: what is known of each engine; None for one that is left to DeepSpeed.
        warned: the engines of which the program was told that they are not known.
        agreed: the stores through which the ranks have agreed on their settings.
        in_flight: kept: the save that training does not wait for, until somebody (`unpatch()`, too) has waited for it.
        at_end: kept: what lets a process, by its number, end only when no save is in flight.
        full_requests: kept: how many blocks of `full_checkpoint()` the program is in.
        no_waits: kept: how many blocks of `no_wait()` the program is in.
        hooked: kept: the modules whose import calls us: wrapt cannot remove a hook.
        origins: kept: by module, for each of its parameters and buffers by name, its identity and where its values come
            from. What was trained or replaced is no base of later engines either.
        merged: kept: by layer whose adapters have been merged, the largest merged value of each parameter.
    """

    patch: Patch | None = None
    refused: str = ""
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    settings: Settings | None = None
    engines: WeakKeyDictionary[Any, ServedEngine | None] = field(default_factory=WeakKeyDictionary)
    warned: WeakSet[Any] = field(default_factory=WeakSet)
    agreed: WeakSet[Any] = field(default_factory=WeakSet)
    in_flight: InFlight | None = None
    at_end: dict[int, Finalize] = field(default_factory=dict)
    full_requests: int = 0
    no_waits: int = 0
    hooked: set[str] = field(default_factory=set)
    origins: WeakKeyDictionary[Any, dict[str, tuple[int, Origin]]] = field(default_factory=WeakKeyDictionary)
    merged: WeakKeyDictionary[Any, dict[str, Any]] = field(default_factory=WeakKeyDictionary)


_KEPT = ("in_flight", "at_end", "full_requests", "no_waits", "hooked", "origins", "merged")

state = State()
"""Of this process. Look it up in this module each time, since `drop` replaces it."""


def drop() -> None:
    """Forget everything but what must be kept, for `unpatch()`."""
    global state
    state = State(**{name: getattr(state, name) for name in _KEPT})

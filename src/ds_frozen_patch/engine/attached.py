"""Which strategy a DeepSpeed engine belongs to, and what we know of it: engines of nobody we know are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from ..common.overrides import set_to


@dataclass
class Attached:
    """What is known of an engine.

    Attributes:
        strategy: that made it, as a weak reference.
        trained: the first names of the parameters that were trainable when it was made.
        at_start: a sample of what is frozen from when training began, as `_frozen.sample` gives it.
        loaded: the groups (see `parameters.Held`) of what is frozen and got other values from a checkpoint, on this
            rank.
        changed: the groups of what is frozen and yet in no base, the same on every rank.
        prints: the fingerprints at the last save, by name.
    """

    strategy: ref[Any]
    trained: frozenset[str]
    at_start: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    prints: Mapping[str, str | None] = field(default_factory=dict)


_at_work: ContextVar[Any] = ContextVar("ds_frozen_patch_strategy", default=None)
_attached: WeakKeyDictionary[Any, Attached] = WeakKeyDictionary()


def at_work(strategy: Any) -> AbstractContextManager[None]:
    """While this lasts, whatever engine is used belongs to `strategy`."""
    return set_to(_at_work, strategy)


def attach(engine: Any, strategy: Any, trained: frozenset[str]) -> Attached:
    """Remember that `strategy` made `engine`, and what it trains.

    It reaches what goes past the strategy's own save and load: a subclass that overrides them
    without calling them, or a callback that calls the engine directly.
    """
    _attached[engine] = made = Attached(ref(strategy), trained)
    return made


def attached(engine: Any) -> Attached | None:
    """What is known of an engine; None if no strategy that we know has made it."""
    return _attached.get(engine)


def owner(engine: Any) -> Any | None:
    """The strategy that an engine belongs to, or None."""
    known = _attached.get(engine)
    return _at_work.get() or (known.strategy() if known else None)


def in_strategy() -> bool:
    """Whether a strategy's own save or load is running, rather than a direct call of the engine."""
    return _at_work.get() is not None

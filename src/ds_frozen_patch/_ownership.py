"""Which strategy a DeepSpeed engine belongs to: engines of nobody we know are left alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

from ._lending import set_to

_at_work: ContextVar[Any] = ContextVar("ds_frozen_patch_strategy", default=None)
_owners: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


def at_work(strategy: Any) -> AbstractContextManager[None]:
    """While this lasts, whatever engine is used belongs to `strategy`."""
    return set_to(_at_work, strategy)


def own(engine: Any, strategy: Any) -> None:
    """Remember that `strategy` made `engine`.

    It reaches what goes past the strategy's own save and load: a subclass that overrides them
    without calling them, or a callback that calls the engine directly.
    """
    _owners[engine] = ref(strategy)


def owner(engine: Any) -> Any | None:
    """The strategy that an engine belongs to, or None."""
    remembered = _owners.get(engine)
    return _at_work.get() or (remembered() if remembered else None)


def in_strategy() -> bool:
    """Whether a strategy's own save or load is running, rather than a direct call of the engine."""
    return _at_work.get() is not None

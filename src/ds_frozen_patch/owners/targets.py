"""All that may own an engine, as targets of `patch()`."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.target import ENGINE
from . import accelerate, transformers
from .lightning.targets import BESIDE as BESIDE_LIGHTNING
from .lightning.targets import TARGETS as LIGHTNING

OWNERS = (*LIGHTNING, accelerate.TARGET, transformers.TARGET)
BESIDE = (*BESIDE_LIGHTNING, transformers.LOAD)


def chosen(names: Iterable[str] | None) -> frozenset[str]:
    """The names of the targets that `patch(targets=...)` chooses, and of those that they need.

    Raises:
        TypeError, ValueError: there is no such target.
    """
    known = [what.name for what in (*OWNERS, ENGINE)]
    if names is None:
        return frozenset(known)
    given = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"targets must be a list of names such as {known[:1]!r}, not {names!r}")
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"targets must be of {', '.join(map(repr, known))}, not {', '.join(map(repr, unknown))}")
    return frozenset([*given, ENGINE.name, *([accelerate.TARGET.name] if transformers.TARGET.name in given else [])])

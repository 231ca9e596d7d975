"""The targets of `patch()`: every framework that creates engines."""

from __future__ import annotations

from collections.abc import Iterable

from ..engine.target import BESIDE as BESIDE_ENGINE
from ..engine.target import ENGINE
from . import for_accelerate as accelerate
from . import for_transformers as transformers
from .for_lightning.targets import BESIDE as BESIDE_LIGHTNING
from .for_lightning.targets import TARGETS as LIGHTNING

OPTIONAL = (accelerate.TARGET, transformers.TARGET)
"""If one of these cannot be patched, a program of Lightning's works nevertheless: PEFT installs both."""
OWNERS = (*LIGHTNING, *OPTIONAL)
BESIDE = (*BESIDE_LIGHTNING, *transformers.BESIDE, *BESIDE_ENGINE)


def may_be_left_alone(name: str, names: Iterable[str]) -> bool:
    """Whether a target that cannot be patched is no error, because Lightning is among those that are served."""
    return name in {what.name for what in OPTIONAL} and not {what.name for what in LIGHTNING}.isdisjoint(names)


def chosen(names: Iterable[str] | None) -> frozenset[str]:
    """The names of the targets that `patch(targets=...)` chooses, and of those that they need.

    Raises:
        TypeError, ValueError: there is no such target.
    """
    possible = [what.name for what in (*OWNERS, ENGINE)]
    if names is None:
        return frozenset(possible)
    requested = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in requested):
        raise TypeError(f"targets must be a list of names such as {possible[:1]!r}, not {names!r}")
    if unknown := [name for name in requested if name not in possible]:
        raise ValueError(f"targets must be of {', '.join(map(repr, possible))}, not {', '.join(map(repr, unknown))}")
    needed = [accelerate.TARGET.name] if transformers.TARGET.name in requested else []
    return frozenset([*requested, ENGINE.name, *needed])

"""The targets of `patch()`: every framework that creates engines."""

from __future__ import annotations

from collections.abc import Iterable

from ..internals import BESIDE as BESIDE_ENGINE
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

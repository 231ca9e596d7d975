"""Setting something for a while, and restoring it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Attributes = list[tuple[Any, str, Any]]
"""Attributes to set for a while: object, name, value."""

_ABSENT = object()


@contextmanager
def overridden(attributes: Attributes) -> Iterator[None]:
    """While this lasts, each object has the attribute of that name and value; what fails half way is undone."""
    with ExitStack() as undo:
        for owner, name, value in attributes:
            before = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            undo.callback(delattr, owner, name) if before is _ABSENT else undo.callback(setattr, owner, name, before)
        yield

"""What is set for a while, and then is as it was before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ABSENT = object()


@contextmanager
def set_to(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """While this lasts, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def lent(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """While this lasts, each object has the attribute of that name and value."""
    before = [vars(owner).get(name, _ABSENT) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), own in zip(attributes, before, strict=True):
            delattr(owner, name) if own is _ABSENT else setattr(owner, name, own)

"""Hiding names of others from our functions, while those of others find them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ds_frozen_patch

_ROOT = str(Path(ds_frozen_patch.__file__).parent)


def _is_ours(frame: Any) -> bool:
    return str(frame.f_code.co_filename).startswith(_ROOT)


@contextmanager
def hidden(owner: Any, names: tuple[str, ...]) -> Iterator[None]:
    """While this lasts, our functions do not find these attributes of a module, or of any object of a class."""
    with pytest.MonkeyPatch.context() as patched:
        if isinstance(owner, ModuleType):
            patched.setattr(owner, "__class__", Seen)
        cls = owner if isinstance(owner, type) else Seen
        for method in ("__getattribute__", "__getattr__"):
            if (find := getattr(cls, method, None)) is None:
                continue

            def get(self: Any, name: str, find: Any = find) -> Any:
                if name in names and _is_ours(sys._getframe(1)):
                    raise AttributeError(name)
                return find(self, name)

            patched.setattr(cls, method, get, raising=False)
        yield


class Seen(ModuleType):
    """The class of a module of which names can be hidden."""

"""Names of an upstream that are not public, or that differ between releases: declared where they are used, and probed.

What lacks one is left to the upstream, as without `patch()`: no save or load fails for that.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class Name(NamedTuple):
    """A name that is used.

    Attributes:
        of: the kind of object that has it, as messages name it, or a module by its path.
        names: the name, or several of which one is enough.
        is_needed: whether nothing is done without it.
    """

    of: str
    names: tuple[str, ...]
    is_needed: bool


class Names:
    """The names that are used of one upstream.

    Attributes:
        used: as functions have declared them.
    """

    def __init__(self) -> None:
        self.used: list[Name] = []

    def uses(self, of: str, *names: str) -> Callable[[_F], _F]:
        """Declare what a function uses of a kind of object: "a|b" if one of them is enough, "a?" if it needs none."""
        self.used.extend(Name(of, tuple(name.rstrip("?").split("|")), name[-1] != "?") for name in names)
        return lambda function: function

    def missing(self, kinds: Mapping[str, Sequence[Any]]) -> str:
        """What is not there, as messages name it; empty if all is there that is needed.

        Args:
            kinds: the objects or classes of each kind, one of which must have its names; none if it is not needed.
        """
        return ", ".join(
            dict.fromkeys(
                f"{' or '.join(name.names)} of {name.of}"
                for name in self.used
                if name.is_needed and (having := kinds.get(name.of, [] if "." not in name.of else [resolved(name.of)]))
                if not any(has(one, each) for one in having for each in name.names)
            )
        )


def has(owner: Any, name: str) -> bool:
    """Whether an object or a module has an attribute, or an object of a class would: its methods use such a name."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    methods = (inspect.unwrap(method) for cls in owner.__mro__ for method in vars(cls).values())
    return any(name in method.__code__.co_names for method in methods if inspect.isfunction(method))


def resolved(path: str) -> Any:
    """The module, or what a module has, at a path such as "package.module:Class"; None if it is not there."""
    with suppress(ImportError, AttributeError):
        return pkgutil.resolve_name(path)
    return None

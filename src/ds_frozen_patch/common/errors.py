"""What this package raises, and how it names many things in one message."""

from __future__ import annotations

from collections.abc import Collection

from .files import shown
from .text import printable, printable_lines

UPDATE = "update it, in a clone of its repository: git pull && pip install ."
"""How to get a newer release of this package, which is on no package index. A release there changes this line."""


class PatchError(RuntimeError):
    """`patch()` cannot patch what is installed; nothing has been patched."""


class _FromFilesError(RuntimeError):
    """Its message may have names from a file, which must not control a terminal."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(shown(message).split("\n")))


class CheckpointMismatchError(_FromFilesError):
    """A checkpoint does not belong to the model, the base or the number of ranks that it is loaded into."""


class CheckpointError(_FromFilesError):
    """A checkpoint, or a file of one, cannot be read or written."""


def named(names: Collection[str], limit: int = 10) -> str:
    """The first `limit` names, quoted and in order, then how many more there are; `printable`, for files say them."""
    shown = ", ".join(f"'{printable(name)}'" for name in sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"

"""Whether a load may run code that a checkpoint names: `patch(trust=...)`.

torch unpickles the files that DeepSpeed and Lightning load, and calls whatever a pickle names. With `trust=False` it
reads tensors, plain values and a few classes of DeepSpeed's, and nothing else: each file is inspected before it is
loaded, and every `torch.load`, whoever calls it, gets `weights_only=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..checkpoint.format.allowed import OF_DEEPSPEED
from ..checkpoint.format.archive import Contents, UnreadableError, read_archive
from ..common.errors import CheckpointError, named
from ..common.overrides import overridden
from ..common.text import printable
from ..settings import current


def runs_nothing() -> bool:
    """Whether a load must not run anything."""
    return current().trust is False


@contextmanager
def trust() -> Iterator[None]:
    """While this lasts, `torch.load` runs no more than `patch(trust=...)` allows."""
    if not runs_nothing():
        yield
        return
    import torch

    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        raise CheckpointError(
            f"patch(trust=False) needs torch 2.6 or newer, better 2.10: torch {torch.__version__} cannot list what a"
            " file names. Update torch, or load without trust=False."
        )
    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "weights_only": True})

    with torch.serialization.safe_globals(_safe()), overridden([(torch, "load", load)]):
        yield


def _safe() -> list[Any]:
    """What DeepSpeed's optimizer files name beyond torch's own safe list; none of it runs anything."""
    return [resolve_name(name) for name in OF_DEEPSPEED]


def read_file(file: Path) -> Contents:
    """The contents of a file that torch is about to load: as torch reads it, if our own reader cannot.

    Raises:
        CheckpointError: neither can.
    """
    try:
        return read_archive(file, trust=True)
    except UnreadableError as error:
        if runs_nothing():
            raise
        import torch

        try:
            return Contents(torch.load(file, map_location="cpu", mmap=True, weights_only=False), 0)
        except Exception:  # whatever a damaged pickle leads to
            raise error from None


def inspect_file(file: Path) -> Contents | None:
    """The contents of a file that torch is about to load, or None if it cannot be read; within `trust()`.

    It logs classes and functions that are not expected in a checkpoint, unless `patch(trust=...)` was given.

    Raises:
        CheckpointError: with `trust=False`, the file cannot be read here, or names something that could run.
    """
    try:
        contents = read_file(file)
    except CheckpointError:
        if runs_nothing():
            raise
        return None
    if runs_nothing():
        _refuse_unsafe(file)
    elif contents.unexpected and current().trust is None:
        logging.getLogger("ds_frozen_patch").warning(  # `-W error` would turn a warning into an exception of one rank
            "%s names %s, not expected in a checkpoint, and this load runs what it names. patch(trust=False) refuses"
            " such files; patch(trust=True) loads them without this warning.",
            printable(str(file)),
            named(contents.unexpected),
        )
    return contents


def _refuse_unsafe(file: Path) -> None:
    import torch

    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise CheckpointError(
            f"{file} names {named(unsafe)}, and patch(trust=False) loads nothing that could run. Nothing was run. If"
            " you know these classes and trust the origin of the file, declare them with"
            " torch.serialization.add_safe_globals, or load without trust=False."
        )

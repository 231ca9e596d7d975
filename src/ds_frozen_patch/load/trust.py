"""Whether a load may run what a checkpoint names: `patch(trust=...)`.

torch unpickles the files that DeepSpeed and Lightning load, and calls whatever a pickle names. With `trust=False` it
reads tensors, plain values and a few classes of DeepSpeed's, and nothing else: each file is asked for what it names
before it is loaded, and `torch.load` is told to refuse the rest (`weights_only=True`), whoever calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from packaging.version import Version

from ..checkpoint.format.allowed import OF_DEEPSPEED
from ..checkpoint.format.archive import Contents, read
from ..common.errors import CheckpointError, named
from ..common.overrides import lent
from ..common.text import printable
from ..settings import current

SINCE = Version("2.6")
"""The first torch with `get_unsafe_globals_in_checkpoint`."""


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

    if Version(metadata.version("torch")) < SINCE:
        raise CheckpointError(
            f"patch(trust=False) needs torch {SINCE} or newer, better 2.10: torch {torch.__version__} cannot say what a"
            " file names. Update torch, or load without it."
        )
    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "weights_only": True})

    with torch.serialization.safe_globals(_safe()), lent([(torch, "load", load)]):
        yield


def _safe() -> list[Any]:
    """What a file of DeepSpeed's optimizers names, beyond what torch takes for safe; none of it runs anything."""
    return [resolve_name(name) for name in OF_DEEPSPEED]


def look(file: Path) -> Contents | None:
    """What a file holds that torch is about to load, or None where only torch can read it; within `trust()`.

    It warns of classes and functions that are not expected in a checkpoint, unless `patch()` was told whether to trust.

    Raises:
        CheckpointError: with `trust=False`, the file cannot be read here, or names what could run.
    """
    try:
        contents = read(file, trust=True)
    except CheckpointError:
        if runs_nothing():
            raise
        return None
    if runs_nothing():
        _refuse_unsafe(file)
    elif contents.unexpected and current().trust is None:
        logging.getLogger("ds_frozen_patch").warning(  # not `warnings`, which `-W error` makes raise on one rank
            "%s names %s, not expected in a checkpoint, and this load runs what it names. patch(trust=False) refuses"
            " such files; patch(trust=True) takes them without this warning.",
            printable(str(file)),
            named(contents.unexpected),
        )
    return contents


def _refuse_unsafe(file: Path) -> None:
    import torch

    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise CheckpointError(
            f"{file} names {named(unsafe)}, and patch(trust=False) loads nothing that could run. Nothing was run. If"
            " you know these classes and where the file is from, declare them with"
            " torch.serialization.add_safe_globals, or load without trust=False."
        )

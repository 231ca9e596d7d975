"""Whether a load may run code that a checkpoint names: `patch(weights_only=...)`.

torch unpickles the files that DeepSpeed and Lightning load, and calls whatever a pickle names. Under this option it
reads tensors, plain values and a few classes of DeepSpeed's, and nothing else: each file is inspected before it is
loaded, and every `torch.load`, whoever calls it, gets `weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..checkpoint.zero.layout import read_tag
from ..common.errors import CheckpointError, named
from ..common.overrides import overridden
from ..settings import current


@contextmanager
def trust() -> Iterator[None]:
    """While this lasts, `torch.load` runs no more than `patch(weights_only=...)` allows."""
    if not current().weights_only:
        yield
        return
    import torch

    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        raise CheckpointError(
            f"patch(weights_only=True) needs torch 2.6 or newer, better 2.10: torch {torch.__version__} cannot list"
            " what a file names. Update torch, or load without weights_only=True."
        )
    original = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "weights_only": True})

    with torch.serialization.safe_globals(_safe()), overridden([(torch, "load", load)]):
        yield


def _safe() -> list[Any]:
    """What DeepSpeed's optimizer files name beyond torch's own safe list; none of it runs anything."""
    return [resolve_name(f"deepspeed.{name}") for name in _OF_DEEPSPEED]


_OF_DEEPSPEED = (
    "runtime.fp16.loss_scaler.LossScaler",
    "runtime.fp16.loss_scaler.DynamicLossScaler",
    "runtime.zero.config.ZeroStageEnum",
    "utils.tensor_fragment.fragment_address",
)
"""The classes of objects that DeepSpeed's optimizers save: each contains only numbers."""


def refuse_unsafe_in(root: Path, tag: str | None, note: str) -> None:
    """Call `refuse_unsafe` for each file in the folder of a tag, since any of them may be loaded.

    Args:
        root: the directory that has the folder.
        tag: the name of the folder, or None for the one that the file `note` names.
        note: "latest" or "latest_universal".
    """
    if tag is None and (root / note).is_file():
        tag = read_tag(root / note)
    for file in sorted((root / str(tag)).rglob("*.pt")) if tag else ():
        refuse_unsafe(file)


def refuse_unsafe(file: Path) -> None:
    """With `weights_only=True`, raise CheckpointError for a file that torch cannot read, or that names what could run.

    Call it within `trust()`.
    """
    if not current().weights_only:
        return
    import torch

    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"{file} is damaged, or has what torch does not read with weights_only=True ({type(error).__name__}:"
            f" {error}), and patch(weights_only=True) loads nothing else. Nothing was run."
        ) from None
    if unsafe:
        raise CheckpointError(
            f"{file} names {named(unsafe)}, and patch(weights_only=True) loads nothing that could run. Nothing was run."
            " If you know these classes and trust the origin of the file, declare them with"
            " torch.serialization.add_safe_globals, or load without weights_only=True."
        )

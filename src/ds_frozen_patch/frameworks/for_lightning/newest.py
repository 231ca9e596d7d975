"""Where Lightning looks for a checkpoint by itself, one that is not whole is passed over: wrappers of that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...publish import in_flight
from ...publish.durable import entries
from ...publish.journal import is_not_whole
from ...publish.publication import is_local
from ..newest import last_whole

_REQUEUED = "hpc_ckpt_"


def find_last(wrapped: Callable[..., set[str]], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._find_last_checkpoints`, for `ckpt_path="last"`."""
    in_flight.wait()
    paths = wrapped(*args, **kwargs)
    return {path for path in paths if not is_local(path) or last_whole([Path(path)], _is_whole, _logger(wrapped))}


def find_requeued(wrapped: Callable[..., int | None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of the newest `hpc_ckpt_N.ckpt`, from which Lightning resumes in Slurm."""
    highest = wrapped(*args, **kwargs)
    folder, *prefix = *args, *kwargs.values()
    if highest is None or prefix != [_REQUEUED] or not is_local(folder):
        return highest  # it is about to choose the name of the next
    numbers = {int(number): item for item in entries(Path(folder)) if (number := _number(item)).isdecimal()}
    newest = last_whole([numbers[number] for number in sorted(numbers)], _is_whole, _logger(wrapped))
    return int(_number(newest)) if newest is not None else None


def _number(item: Path) -> str:
    return item.name.removeprefix(_REQUEUED).removesuffix(".ckpt")


def _is_whole(path: Path) -> bool:
    return not is_not_whole(path)


def _logger(wrapped: Callable[..., Any]) -> logging.Logger:
    package = "lightning.pytorch" if wrapped.__module__.startswith("lightning.") else "pytorch_lightning"
    return logging.getLogger(f"{package}.ds_frozen_patch")

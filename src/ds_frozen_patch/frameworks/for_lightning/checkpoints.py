"""Checkpoints that Lightning looks for, converts or removes by itself: wrappers of that, and what a load forgets."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection
from os.path import realpath
from pathlib import Path
from typing import Any

from ...common.errors import named
from ...common.overrides import overridden
from ...publish import in_flight
from ...publish.journal import is_not_whole
from ...publish.publication import is_local
from ..plain import last_whole, logger_of, numbered
from . import uses

_REQUEUED = "hpc_ckpt_"


@uses("callbacks", "_fs?", "_ModelCheckpoint__resolve_ckpt_dir?")
def find_last(wrapped: Callable[..., set[str]], callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._find_last_checkpoints`, for `ckpt_path="last"`.

    In a bucket Lightning loses the beginning of the addresses, and asks when each was modified, which is known of
    objects alone: it gets that of `latest`, which a load takes for its checkpoint.
    """
    in_flight.wait()
    folder = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", lambda _: "")(*args, *kwargs.values())
    if is_local(folder):
        return {path for path in wrapped(*args, **kwargs) if last_whole([Path(path)], _is_whole, _logger(wrapped))}
    from ...buckets import file_system

    with overridden([(callback, "_fs", file_system(folder)[0])]):
        names = [path.rpartition("/")[2] for path in wrapped(*args, **kwargs)]
    return objects_of(folder, names)


def find_requeued(wrapped: Callable[..., int | None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of the newest `hpc_ckpt_N.ckpt`, from which Lightning resumes in Slurm."""
    highest = wrapped(*args, **kwargs)
    folder, *prefix = *args, *kwargs.values()
    if highest is None or prefix != [_REQUEUED]:
        return highest  # it is about to choose the name of the next
    if not is_local(folder):
        numbers = range(highest, -1, -1)
        return next((number for number in numbers if objects_of(folder, [f"{_REQUEUED}{number}.ckpt"])), None)
    newest = last_whole(numbered(Path(folder), rf"{_REQUEUED}(\d+)\.ckpt"), _is_whole, _logger(wrapped))
    return int(newest.stem.removeprefix(_REQUEUED)) if newest is not None else None


def objects_of(folder: str | os.PathLike[str], names: Collection[str]) -> set[str]:
    """Of the checkpoints with these names, the address of `latest` of each that is whole, or of its single file."""
    from ...buckets import address_of, size_of

    places = [(Path(folder, name, "latest"), Path(folder, name)) for name in names]
    items = (next((item for item in both if size_of(item) is not None), None) for both in places)
    return {address_of(item) for item in items if item is not None}


def _is_whole(path: Path) -> bool:
    return not is_not_whole(path)


def _logger(wrapped: Callable[..., Any]) -> logging.Logger:
    package = "lightning.pytorch" if wrapped.__module__.startswith("lightning.") else "pytorch_lightning"
    return logger_of(package)


def convert(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_file, tag=None)`: `consolidate` does its work.

    The original loads with the default of `torch.load`, which torch 2.6 changed (fixed in Lightning 2.6.0). It also
    keeps DeepSpeed's second copy of the frozen weights in its output, loses those of ZeRO-1, and ignores the tag in one
    look-up.

    Like the original, it replaces an existing file and returns what it has written. The tensors returned are mapped
    from the file, and objects of classes are stand-ins.
    """
    from ...checkpoint.format.archive import UnreadableError
    from ...tools.consolidate import consolidate_over

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    try:
        return consolidate_over(**call.arguments)
    except UnreadableError as error:
        logging.getLogger("ds_frozen_patch").warning("%s Lightning's own converter is used.", error)
        return dict(wrapped(*args, **kwargs))


_OF_MODEL_CHECKPOINT = ("best_model_path", "kth_best_model_path", "last_model_path")


def forget_paths_outside(checkpoint: Any, folders: Collection[str]) -> str | None:
    """Remove from the states of callbacks each path that does not lead into a folder of the run, links followed.

    With `weights_only=True`, a checkpoint does not decide which folders Lightning's retention removes.
    ModelCheckpoint restores the paths of older checkpoints from a loaded one, and later removes what is there; other
    callbacks may do the same.

    Args:
        checkpoint: what was loaded.
        folders: those that the callbacks of this run save to.

    Returns:
        A warning, or None if there is no such path.
    """
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, dict) else None
    states = callbacks if isinstance(callbacks, dict) else {}
    outside: list[str] = []

    def is_outside(value: Any, is_path: bool) -> bool:
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
        if not path or not (is_path or _looks_like_path(path)) or any(_leads_into(path, item) for item in folders):
            return False
        outside.append(path)
        return True

    def inside(value: Any, is_path: bool = False) -> Any:
        """A part of a state without paths outside; `is_path`: whether a string is one in any case, by its key."""
        if isinstance(value, dict):
            for key in [key for key in value if is_outside(key, is_path)]:
                del value[key]
            for key in value.keys() - {"dirpath"}:  # which ModelCheckpoint compares with its own
                value[key] = inside(value[key], is_path or "path" in str(key) or key == "best_k_models")
        elif type(value) in (list, tuple, set):
            return type(value)(inside(item, is_path) for item in value if not is_outside(item, is_path))
        return "" if is_outside(value, is_path) else value

    for name, state in states.items():
        before = len(outside)
        states[name] = inside(state)
        if len(outside) > before and isinstance(state, dict) and "best_k_models" in state:  # which fits the others
            state.update(best_k_models={}, **dict.fromkeys(_OF_MODEL_CHECKPOINT, ""))
    if not outside:
        return None
    return (
        f"The checkpoint names paths that are not in a folder that this run saves to: {named(outside, 3)}. With"
        " weights_only=True they are ignored, and ModelCheckpoint starts with no older checkpoints to keep or remove."
    )


def _looks_like_path(text: str) -> bool:
    return "://" in text or text.startswith(("/", "~")) or ".." in text.split("/") or os.path.lexists(text)


def _leads_into(path: str, folder: str) -> bool:
    if "://" in folder:  # an address, as fsspec has it
        return path.startswith(folder.rstrip("/") + "/") and ".." not in path
    try:
        return Path(realpath(folder)) in Path(realpath(path)).parents
    except ValueError:  # no path can contain that
        return False

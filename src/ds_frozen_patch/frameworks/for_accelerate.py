"""Accelerate as the owner of engines: the wrappers of methods of `Accelerator`.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError
from ..common.names import Names
from ..common.overrides import Attributes, overridden
from ..common.probing import Finding, Target
from ..engine.served import ServedEngine, attached, is_first
from ..publish import in_flight
from ..publish.journal import is_not_whole
from ..publish.notes import notes
from ..publish.publication import is_local
from .around import Around
from .plain import last_whole, logger_of, numbered

_WRITERS = ("save_accelerator_state", "save_custom_state")
"""The functions that `save_state` calls once the engines are saved, each by a path; no rank waits in them."""
_PREFIX, _LAST = "checkpoint_", "random_states_0.pkl"


NAMES = Names()
_uses = NAMES.uses


@_uses("Accelerator", "_models")
def _served(accelerator: Any) -> ServedEngine | None:
    return attached(next(iter(getattr(accelerator, "_models", ())), None))


@_uses("Accelerator", "project_configuration", "project_dir", "save_iteration")
@_uses("ProjectConfiguration", "automatic_checkpoint_naming", "total_limit")
@_uses("accelerate.accelerator", *_WRITERS)
def save_state(wrapped: Callable[..., Any], accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Accelerator.save_state`: an error of one rank is raised on all, and what it writes is synced.

    With `ProjectConfiguration(automatic_checkpoint_naming=True)`, what exceeds its `total_limit` is removed after that;
    Accelerate would remove it before, even if it has the number of this save, which then goes into the same folder. It
    would also refuse a folder that an interrupted save has left, and that `load_state` passes over; here the save goes
    into it.
    """
    served = _served(accelerator)
    if served is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    project = accelerator.project_configuration
    folder = call.arguments.get("output_dir")
    is_numbered = project.automatic_checkpoint_naming and accelerator.project_dir is not None
    if is_numbered:
        folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    if folder is None:
        return wrapped(*args, **kwargs)
    with Around(served.owner, Path(folder), _LAST) as around:
        outdated, is_reused = _look_beside(around, project.total_limit) if is_numbered else ([], False)
        if around.is_remote or is_reused:
            call.arguments["output_dir"] = str(around.folder)
        writers = [(sys.modules["accelerate.accelerator"], name) for name in _WRITERS]
        changes: Attributes = [(owner, name, around.ranks.deferring(getattr(owner, name))) for owner, name in writers]
        changes += [(project, "total_limit", None)]
        changes += [(project, "automatic_checkpoint_naming", False)] if is_reused else []
        with overridden(changes):
            saved = wrapped(*call.args, **call.kwargs)
        around.end(served)
    for item in outdated if is_first(served.owner) else ():
        in_flight.afterwards(partial(around.remove, item))
    return around.shown if around.is_remote else saved


def _look_beside(around: Around, limit: int | None) -> tuple[list[Path], bool]:
    """Which other numbered checkpoints a save makes outdated, and whether it goes into one, or an incomplete one."""
    in_flight.wait()  # since the save before removes some when it has ended
    place, outdated = Path(around.shown), list[Path]()

    def look() -> list[int]:
        outdated.extend(_outdated(place, limit))
        return [place in outdated or _was_interrupted(place)]

    is_reused = any(map(any, around.ranks.step("look for an interrupted save", look, 1)))
    if around.is_remote and not is_reused:
        raise CheckpointError(f"{around.shown} exists. Set `project_configuration.iteration` to go on.")
    return [item for item in outdated if item != place], is_reused


@_uses("Accelerator", "project_configuration", "project_dir")
@_uses("ProjectConfiguration", "automatic_checkpoint_naming")
def load_state(wrapped: Callable[..., Any], accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Accelerator.load_state`: of the numbered checkpoints, it loads the newest one that is whole."""
    in_flight.wait()
    served = _served(accelerator)
    if served is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    path = call.arguments.get("input_dir")
    is_numbered = path is None and accelerator.project_configuration.automatic_checkpoint_naming
    folder = f"{accelerator.project_dir or '.'}/checkpoints" if is_numbered else str(path)
    if not is_local(folder):
        from .remote import Readers

        device = served.owner.device
        address = Readers(device, folder).newest(_PREFIX, _LAST, "accelerate") if is_numbered else folder
        with Readers(device, address).brought() as place:
            call.arguments["input_dir"] = place
            return wrapped(*call.args, **call.kwargs)
    if is_numbered:
        folders = _numbered(Path(folder))
        newest = last_whole(folders, _is_whole, logger_of("accelerate"))
        if folders and newest is not None and newest != folders[-1]:
            call.arguments["input_dir"] = str(newest)
    return wrapped(*call.args, **call.kwargs)


def _is_whole(folder: Path) -> bool:
    """Whether all files of a checkpoint are there: Accelerate writes the random states and custom objects last."""
    last = [*folder.glob("random_states_*.pkl"), *folder.glob("custom_checkpoint_*.pkl")]
    return not is_not_whole(folder) and bool(last) and all(map(zipfile.is_zipfile, last))


def _was_interrupted(folder: Path) -> bool:
    """Whether an incomplete checkpoint is there that no running process writes; at an address, or none."""
    if not is_local(folder):
        from .remote import is_whole

        return not is_whole(folder, _LAST)
    runs = any(note.is_running() for note in notes(folder).values())
    return folder.is_dir() and not _is_whole(folder) and not runs


def _numbered(folder: Path) -> list[Path]:
    return numbered(folder, r"(?:.*_)?(\d+)")


def _outdated(place: Path, limit: int | None) -> list[Path]:
    """The checkpoints that Accelerate would remove before it saves to a place beside them: those of the lowest numbers.

    After a resume that counts from 0 again, the numbers of new checkpoints may be the lowest.
    """
    there = [item for item in _numbered(place.parent) if item != place or not _was_interrupted(place)]
    return there[: max(len(there) + 1 - limit, 0)] if limit is not None else []


TARGET = Target(
    "accelerate",
    "accelerate.accelerator",
    "Accelerator",
    {"save_state": save_state, "load_state": load_state},
    lambda *_: Finding("patchable", "does not pass the flag; tied aliases, strict load need patch()"),
    ("accelerate",),
    "install a tested release of accelerate, or uninstall it if nothing uses it",
    names=NAMES,
    kinds={
        "Accelerator": "accelerate.accelerator:Accelerator",
        "ProjectConfiguration": "accelerate.utils:ProjectConfiguration",
    },
    is_optional=True,
)

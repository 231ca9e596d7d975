"""Accelerate as the owner of engines: the wrappers of methods of `Accelerator`.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..common.overrides import overridden
from ..common.probing import Finding, Seen, Target
from ..common.work_folder import entries
from ..engine import handshake, in_flight
from ..engine.attached import attached
from ..engine.owner import is_first
from ..engine.serving import begin_serving
from ..save.saving import saving
from ..settings import FLAG
from .engine import EngineOwner

_WRITERS = ("save_accelerator_state", "save_custom_state")
"""The functions that `save_state` calls once the engines are saved, each by a path; no rank waits in them."""


def judge(version: str | None, seen: Seen) -> Finding:
    """It must keep its engines in `_models`, and write what is not the engine's by functions that can be replaced."""
    refused = TARGET.refused_without(version, seen, {"_prepare_deepspeed": ["_models"], "save_state": _WRITERS})
    return refused or Finding("patchable", version, "passes no flag on; tied aliases and a strict load need the shim")


TARGET = Target(
    "accelerate",
    "accelerate.accelerator",
    "Accelerator",
    ("_prepare_deepspeed", "save_state", "load_state"),
    ("accelerate",),
    judge,
    "install a tested release of accelerate, or leave it out of patch(targets=[...])",
    "accelerate",
)


def prepare(wrapped: Callable[..., Any], accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Accelerator._prepare_deepspeed`, which creates an engine, for Trainer too."""
    before = list(accelerator._models)
    handshake.announce(accelerator.process_index)
    result = wrapped(*args, **kwargs)
    engines = [model for model in accelerator._models if not any(model is other for other in before)]
    if engines:
        handshake.check(accelerator.process_index)
    for engine in engines:
        begin_serving(engine, EngineOwner(engine, "accelerate"))
    return result


def save_state(wrapped: Callable[..., Any], accelerator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Accelerator.save_state`: the folder gets its name once all of it is written.

    With `ProjectConfiguration(automatic_checkpoint_naming=True)`, what exceeds its `total_limit` is removed after that;
    Accelerate would remove it before.
    """
    engine = next(iter(accelerator._models), None)
    known = attached(engine) if engine is not None else None
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    project = accelerator.project_configuration
    path, place = call.arguments.get("output_dir"), None
    if project.automatic_checkpoint_naming and accelerator.project_dir is not None:
        # A listing of its folder must not show the work folder.
        place = Path(accelerator.project_dir)
        path = str(place / "checkpoints" / f"checkpoint_{accelerator.save_iteration}")
    if known is None or path is None or (place and Path(path).exists()):
        return wrapped(*args, **kwargs)
    exclude = known.owner.excludes(kwargs.get(FLAG))
    target = Path(path).resolve() if Path(path).is_symlink() else path
    how: dict[str, Any] = {"keeps_others": True, "place": place, "goes_on_after_engine": True}
    with saving(engine, known, target, "accelerator.save_state()", exclude, **how) as save:
        writers = [(sys.modules[TARGET.module], name) for name in _WRITERS]
        changes = [(module, name, save.deferring(getattr(module, name))) for module, name in writers]
        with overridden([*changes, (project, "automatic_checkpoint_naming", False)]):
            call.arguments["output_dir"] = str(save.destination)
            wrapped(*call.args, **call.kwargs)
    if place is not None and is_first(known.owner):
        in_flight.afterwards(partial(_remove_oldest, Path(path).parent, project.total_limit))
    return Path(path)


def _remove_oldest(folder: Path, limit: int | None) -> None:
    """Remove the checkpoints with the lowest numbers, down to a limit, but never the newest."""
    if limit is None:
        return
    numbered = [(int(number), item) for item in entries(folder) if (number := item.name.rpartition("_")[2]).isdecimal()]
    for _, item in sorted(numbered)[: -max(limit, 1)]:
        shutil.rmtree(item)

"""An engine whose owner no strategy describes, read from the engine itself; and the newest of several checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import process
from ..common.names import resolved
from ..common.probing import Target, probe
from ..engine.batch import batches, warn_of_another_batch
from ..engine.served import Owner
from ..internals import config_of
from ..publish.publication import is_local
from ..ranks import rank


def logger_of(package: str) -> logging.Logger:
    """Ours, as a child of a framework's."""
    return logging.getLogger(f"{package}.ds_frozen_patch" if package else "ds_frozen_patch")


def owner_of(engine: Any, *frameworks: Target) -> Owner:
    """The owner of an engine that these frameworks have made, one within the other, or a program itself."""
    package = frameworks[0].name if frameworks else ""
    return Owner(
        rank=int(engine.global_rank),
        local_rank=int(engine.local_rank),
        device=engine.device,
        logger=logger_of(package),
        config=config_of(engine),
        names_each_save=bool(package),
        leaves_out=lambda: True,
        after_load=_after_load,
        unserved=next(filter(None, map(lacking, frameworks)), ""),
    )


def lacking(what: Target) -> str:
    """Why a framework is left as it is, as messages name it; empty if it is not. Called once all of it is imported."""
    left = process.state.left
    if what.name not in left:
        finding = probe(what, is_imported=True)
        lacks = what.names.missing({kind: [resolved(path)] for kind, path in what.kinds.items()})
        reason = finding.reason if finding.verdict == "refused" else lacks and f"it lacks {lacks}"
        left[what.name] = f"{what.name} {finding.version}: {reason}" if reason else ""
    return left[what.name]


def _after_load(owner: Owner, engine: Any, state: Mapping[str, Any], _: dict[str, Any]) -> None:
    """The program, or Trainer, counts its own batches; DeepSpeed divides the loss."""
    warn_of_another_batch(owner, *batches(engine, state))


def numbered(folder: Path, pattern: str) -> list[Path]:
    """What a folder has with names such as the pattern, whose group is a number, in the order of these numbers."""
    if is_local(folder):
        items = [*folder.iterdir()] if folder.is_dir() else []  # a program that is told of none may begin anew
    else:
        from ..buckets import look

        there = look(folder, "ls", detail=True) or ()
        items = [folder / Path(item["name"]).name for item in there if item["type"] == "directory"]
    found = [(int(match[1]), item) for item in items if (match := re.fullmatch(pattern, item.name))]
    return [item for _, item in sorted(found)]


def last_whole(folders: Sequence[Path], is_whole: Callable[[Path], bool], logger: logging.Logger) -> Path | None:
    """The last of some folders that is whole, or None; rank 0 logs each that is passed over.

    Args:
        folders: of checkpoints, the newest last.
        is_whole: whether a folder has everything that the framework writes.
        logger: of the framework.
    """
    for folder in reversed(folders):
        if is_whole(folder):
            return folder
        if rank() == 0:
            logger.warning("%s is passed over: the save that wrote it was interrupted, or still runs.", folder)
    return None

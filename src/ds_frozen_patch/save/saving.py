"""From the request for a save to its end: the agreement of the ranks, the folder to write to, and the final name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..common.collectives import default_store, digest, gather, gather_numbers, world_size
from ..common.errors import CheckpointError, CheckpointMismatchError, named
from ..common.overrides import set_to
from ..core import base as frozen
from ..engine.origins import origins
from ..engine.owner import is_first, warn
from ..engine.served import ServedEngine
from ..fingerprint import process_memory
from ..publish import in_flight
from ..publish.publication import UNCHANGED
from ..publish.ways import Way
from ..publish.work_folder import identity
from ..settings import FLAG
from ..settings import current as settings
from .background import Votes, publish
from .recording import Recorder
from .save import Save, current, place_of

_MUST_BE_EQUAL = ("keep", "leave_out", "export", "fp32_weights", "sync", "whole_model", "async_save")
"""The settings that change what the ranks do together in a save."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@contextmanager
def saving(engine: Any, known: ServedEngine, folder: Path, tag: str, exclude: bool) -> Iterator[Save]:
    """Save an engine by what is called meanwhile; every rank must enter it.

    Args:
        engine, known, exclude: see `begin`.
        folder: that the program has named.
        tag: the name of the folder in it that DeepSpeed writes.

    Yields:
        The save. What is written to its `destination` is at its `target` afterwards, on every disk or on none.

    Raises:
        CheckpointError: on every rank, if one has recorded an error.
    """
    target = folder / tag
    shown = folder if known.owner.names_each_save else target
    with explaining_errors(shown) as saves:
        is_managed = is_local(target) and writes_before_it_returns(engine)
        where: dict[str, Any] = {"shown": shown, "folder": folder, "is_managed": is_managed}
        save = begin(engine, known, target, "a checkpoint", exclude, **where)
        saves.append(save)
        if is_managed and settings().async_save and (default_store() is not None or world_size() == 1):
            known.recorder = save.recorder = known.recorder or Recorder()
            save.recorder.begin()
        try:
            with set_to(current, save):
                yield save
        except BaseException:
            save.discard()
            raise
        if save.recorder is not None:
            save.agree()  # and every rank has recorded its files
            save.place.use_absolute_paths()  # the program may change its current folder
            in_flight.start(partial(publish, save, Votes(save)), known.log_once)
        elif save.place.way is Way.UNMANAGED:
            save.agree()
        else:
            save.publish()


def begin(
    engine: Any,
    known: ServedEngine,
    path: Path,
    what: str,
    exclude: bool,
    *,
    shown: Path,
    folder: Path | None = None,
    is_managed: bool = True,
) -> Save:
    """Let the ranks agree on a save, and prepare where it is written.

    Args:
        engine: to be saved.
        known: what is known of it.
        path: of the folder of the tag, or of a file.
        what: the kind of save, as messages name it.
        exclude: whether frozen parameters are left out.
        shown: what messages name.
        folder: that the program has named, if the path is one of a tag.
        is_managed: whether we give the files their names; else whoever writes them does.

    Raises:
        CheckpointError: on every rank, if the save before was still in flight, and has failed.
        CheckpointMismatchError: on every rank, if the ranks differ in what they save.
    """
    in_flight.wait()
    if engine.global_steps and not known.is_sampled:
        frozen.sample_now(engine, known)  # the program has called `engine.forward` by itself
    now = settings()
    options = {name: getattr(now, name) for name in _MUST_BE_EQUAL}
    known_values = origins(engine.module) if exclude else {}
    candidates = frozen.to_leave_out(engine, known_values) if exclude else None
    changed = frozen.changed_since_start(known_values, candidates or ())
    paths = path, folder or path.parent, shown
    place = place_of(known.owner, engine, known, paths, is_managed, now.sync)
    save = Save(known.owner, engine, known, place, candidates)
    if is_managed and is_first(known.owner):
        save.open(is_tag=folder is not None)
    try:
        agree(save, {"what is saved": what, FLAG: exclude, **options}, bool(changed))
    except BaseException:
        save.discard()
        raise
    save.place.before = identity(save.place.target)
    if is_managed and known.owner.local_rank == 0 and not is_first(known.owner) and save.is_on_own_disk():
        save.open()
    if candidates and save.base_has_changed:
        keep_changed(save, frozen.on_all_ranks(changed, candidates, engine.device))
    return save


def agree(save: Save, request: Mapping[str, Any], base_has_changed: bool) -> None:
    """Let the ranks agree on a save, in one collective; every rank must call it. What rank 0 says of it counts.

    Args:
        save: of this rank.
        request: what this rank is to save, which must be the same on every rank.
        base_has_changed: whether this rank has seen training change some of what is left out.

    Raises:
        CheckpointMismatchError: the requests differ.
    """
    place = save.place
    base_is_known = all(process_memory().holds(one.tensor) for one in save.left_out or ())
    own = [digest(sorted(request.items())), digest(str(place.target)), int(place.id, 16), base_is_known]
    numbers = gather_numbers([*own, base_has_changed, place.way, save.owner.local_rank], save.owner.device)
    if len({one[0] for one in numbers}) > 1:
        raise CheckpointMismatchError(f"{place.shown} was not saved. {_difference(gather(dict(request)))}")
    targets, nodes = {one[1] for one in numbers}, [one[6] for one in numbers].count(0)
    if len(targets) > 1:
        place.target, place.folder, place.shown = map(Path, gather(tuple(map(str, place.paths)))[0])
    save.is_in_one_place = len(targets) == nodes == 1
    place.id, place.way = f"{numbers[0][2]:012x}", Way(numbers[0][5])
    save.base_is_known = all(one[3] for one in numbers)
    save.base_has_changed = any(one[4] for one in numbers)


def _difference(requests: list[dict[str, Any]]) -> str:
    """Which ranks got which request, where they differ."""
    lines = []
    for key in sorted({key for request in requests for key in request}):
        ranks: dict[str, list[str]] = {}
        for rank, request in enumerate(requests):
            ranks.setdefault(repr(request.get(key)), []).append(str(rank))
        if len(ranks) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} on rank {_shortened(who)}" for value, who in ranks.items()))
    return (
        f"The ranks requested different saves ({'; '.join(lines)}). Call patch(), full_checkpoint() and"
        " save_checkpoint() with the same arguments on every rank."
    )


def _shortened(ranks: list[str]) -> str:
    return ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


@contextmanager
def explaining_errors(path: Any) -> Iterator[list[Save]]:
    """Add to an error of torch's, such as after the death of another rank, what was not saved and what is there.

    Append the save to the yielded list as soon as the ranks have agreed on it.
    """
    saves: list[Save] = []
    try:
        yield saves
    except (CheckpointError, CheckpointMismatchError):
        raise
    except RuntimeError as error:
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            raise
        state, is_saved = saves[0].place.state_of_target() if saves else (UNCHANGED, False)
        outcome = "was saved, but not every rank has confirmed it" if is_saved else "was not saved"
        raise CheckpointError(
            f"{path} {outcome} ({error}). If this says that another rank is gone, restart the run from its last"
            f" checkpoint. {state}"
        ) from error


def keep_changed(save: Save, changed: set[str]) -> None:
    """Save these groups from now on, since no base has their values."""
    assert save.left_out is not None
    overruled = {one.group for one in save.left_out if settings().leaves_out(one.names)}
    if changed := changed - overruled:
        known = origins(save.engine.module)
        for name in changed & known.keys():
            known[name].is_changed = True
        save.left_out = [one for one in save.left_out if one.group not in changed]
        warn(
            save.owner,
            "Frozen parameters differ from what the program built, because training has changed them or a checkpoint"
            f" has replaced them: {named(sorted(changed))}. No base has these values, so checkpoints contain them from"
            " now on. To leave them out all the same, name them in patch(leave_out=[...]).",
        )


def is_local(path: Any) -> bool:
    """Whether a path is one of a mounted file system, and not an address such as s3://bucket/name, a `Path` or not."""
    return _ADDRESS.match(str(path)) is None


def writes_before_it_returns(engine: Any) -> bool:
    """Whether DeepSpeed has written all files when its save returns; asynchronous checkpoint engines have not."""
    writer: Any = getattr(engine, "checkpoint_engine", None)
    if hasattr(writer, "is_decoupled"):  # since DeepSpeed 0.17.1; Nebula, which is asynchronous, does not override it
        return not writer.is_decoupled() and not hasattr(writer, "enable_nebula_load")
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    return isinstance(writer, TorchCheckpointEngine)

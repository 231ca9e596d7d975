"""From the request for a save to its end: the agreement of the ranks, the folder to write to, and the final name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..common.collectives import default_store, world_size
from ..common.errors import named
from ..common.overrides import set_to
from ..engine import frozen, in_flight
from ..engine.attached import Attached
from ..engine.owner import is_first, warn
from ..settings import FLAG
from ..settings import current as settings
from .agreement import agree, explaining_errors
from .background import Votes, publish
from .recording import Recorder
from .save import Save, current

_MUST_BE_EQUAL = ("keep", "leave_out", "export", "fp32_weights", "sync", "whole_model", "async_save")
"""The settings that change what the ranks do together in a save."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@contextmanager
def saving(
    engine: Any,
    known: Attached,
    path: Any,
    what: str,
    exclude: bool,
    *,
    keeps_others: bool = False,
    in_place: bool = False,
    place: Path | None = None,
    goes_on_after_engine: bool = False,
    finish: Callable[[Save], None] | None = None,
) -> Iterator[Save]:
    """Save an engine, and what its framework adds, by what is called meanwhile; every rank must enter it.

    Args:
        engine, known, path, what, exclude: see `begin`.
        keeps_others, place, goes_on_after_engine: see `Save`.
        in_place: write to the path itself, as to an address.
        finish: see `Save.publish`.

    Yields:
        The save. What is written to its `destination` is at `path` afterwards, on every disk or on none.

    Raises:
        CheckpointError: on every rank, if one has recorded an error.
    """
    with explaining_errors(path) as saves:
        save = begin(engine, known, path, what, exclude)
        saves.append(save)
        save.keeps_others, save.place, save.goes_on_after_engine = keeps_others, place, goes_on_after_engine
        if is_local(path) and not in_place:
            _choose_destination(save)
        else:
            save.is_in_place = True
        if settings().async_save and not save.is_in_place and (default_store() is not None or world_size() == 1):
            known.recorder = save.recorder = known.recorder or Recorder()
            save.recorder.begin()
        try:
            with set_to(current, save):
                yield save
        except BaseException:
            save.discard()
            raise
        if save.recorder is not None:
            save.raise_on_all_ranks()  # and every rank has recorded its files
            in_flight.start(partial(publish, save, finish, Votes(save)), known)
        elif save.is_in_place:
            save.raise_on_all_ranks()
        else:
            save.publish(finish)


def begin(engine: Any, known: Attached, path: Any, what: str, exclude: bool) -> Save:
    """Let the ranks agree on a save.

    Args:
        engine: to be saved.
        known: what is known of it.
        path: of the checkpoint.
        what: the kind of save, as messages name it.
        exclude: whether frozen parameters are left out.

    Raises:
        CheckpointError: on every rank, if the save before was still in flight, and has failed.
        CheckpointMismatchError: on every rank, if the ranks differ in what they save.
    """
    in_flight.wait()
    now = settings()
    options = {name: getattr(now, name) for name in _MUST_BE_EQUAL}
    candidates = frozen.to_leave_out(known, engine) if exclude else None
    changed = frozen.changed_since_start(known, candidates or ())
    request = {"what is saved": what, FLAG: exclude, **options}
    save = agree(engine, known, path, request, candidates, bool(changed))
    if candidates and save.base_has_changed:
        keep_changed(save, frozen.on_all_ranks(changed, candidates, engine.device))
    return save


def keep_changed(save: Save, changed: set[str]) -> None:
    """Save these groups from now on, since no base has their values."""
    assert save.left_out is not None
    overruled = {one.group for one in save.left_out if settings().leaves_out(one.names)}
    if changed := changed - overruled:
        save.attached.changed |= changed
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


def _choose_destination(save: Save) -> None:
    if not writes_before_it_returns(save.engine):
        save.is_in_place = True
        save.attached.warn_once(
            f"DeepSpeed's {type(save.engine.checkpoint_engine).__name__} writes after a save has returned. So a"
            f" checkpoint is written to {save.target.parent} in place: a save that is killed or fails leaves an"
            " incomplete one. Use DeepSpeed's default checkpoint engine to prevent that."
        )
        return
    save.begin()
    if is_first(save.owner) and (other := save.other_job()):
        warn(save.owner, other)
    assert save.disks is not None
    if save.disks.are_several and not save.engine.use_node_local_storage():
        save.attached.warn_once(
            f"The nodes write {save.target.parent} to disks of their own, but DeepSpeed is configured for a shared"
            ' one: it will not find all files at a resume. Set "checkpoint": {"use_node_local_storage": true} in its'
            " configuration, or save to a disk that all nodes share.",
        )


def writes_before_it_returns(engine: Any) -> bool:
    """Whether DeepSpeed has written all files when its save returns; asynchronous checkpoint engines have not."""
    writer: Any = getattr(engine, "checkpoint_engine", None)
    if hasattr(writer, "is_decoupled"):  # since DeepSpeed 0.17.1; Nebula, which is asynchronous, does not override it
        return not writer.is_decoupled() and not hasattr(writer, "enable_nebula_load")
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    return isinstance(writer, TorchCheckpointEngine)

"""Whether what DeepSpeed reads on all ranks is of one save: by the labels in the files, or by what a save has alike.

Files that have a record were verified before. For those that have none, this is the only check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.names import RECORD
from ..checkpoint.zero.labels import get_label
from ..checkpoint.zero.layout import latest_tag
from ..checkpoint.zero.states import FileDigests, check_digests_agree
from ..common.collectives import digest, gather, gather_numbers
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.overrides import Attributes
from ..engine.owner import warn
from ..internals import checkpoint_engine, states_file
from ..manifest import KEY, Manifest, digest_of
from .agreement import raise_on_all_ranks
from .files import check_save
from .running import Load

_KINDS = {"model": "module", "optimizer": "optimizer_state_dict"}
"""The key that the state in a file of each kind has."""


def sharing_reads(load: Load) -> Attributes:
    """Lets the engine's reader raise on all ranks what one of them cannot read, or has read of another save."""
    reader = checkpoint_engine(load.engine)
    if reader is None:  # an engine for inference: `check_model` checks what it has read
        return []
    read = reader.load

    def read_and_agree(path: Any, *args: Any, **kwargs: Any) -> Any:
        state = problem = None
        try:
            state = read(path, *args, **kwargs)
            _note(load, Path(path), state)
        except CheckpointError as error:
            problem = error
        except Exception as error:
            problem = CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).")
            problem.__cause__ = error
        _agree(load, problem)
        return state

    return [(reader, "load", read_and_agree)]


def check_model(load: Load, state: Mapping[str, Any]) -> None:
    """Check the file of model states, where the engine has no reader; every rank must call it.

    Raises:
        CheckpointError: on every rank, if one has read a file of another save.
    """
    if not load.read:
        problem = None
        try:
            _note(load, states_file(load.engine, load.source, load.tag or latest_tag(Path(load.source))), state)
        except CheckpointError as error:
            problem = error
        _agree(load, problem)


def _note(load: Load, file: Path, state: Any) -> None:
    """Note what a file says of its save; raises CheckpointError if the record contradicts it."""
    if isinstance(state, Mapping):
        kinds = [kind for kind, key in _KINDS.items() if key in state]
        load.read += [_describe(file, kind, state) for kind in kinds]
        if kinds and load.record is not None:
            check_save(load.record, file, state)


def _describe(file: Path, kind: str, state: Mapping[str, Any]) -> FileDigests:
    keys = ["global_steps", "ds_version", "dp_world_size"]
    alike = {key: repr(state.get(key)) for key in keys}
    if kind == "model":
        alike["the manifest"] = repr(digest_of(state.get(KEY)))
    else:
        alike["the number of steps"] = repr(sorted(_steps(state["optimizer_state_dict"])))
    label = get_label(state)
    return FileDigests(file, kind, alike, label.get("save"), label.get("file"), bool(label.get("record")))


def _steps(state: Any) -> Iterator[float]:
    """The step counts in an optimizer's state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key == "step" and (isinstance(value, int | float) or getattr(value, "shape", None) == ()):
                yield float(value)
            yield from _steps(value)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _steps(item)


def manifest_of(load: Load, checkpoint: Mapping[str, Any]) -> Manifest | None:
    """The manifest of a checkpoint without a record; every rank must call it.

    In ZeRO-3, where each rank has read a file of its own, one of them has the manifest for all.

    Raises:
        CheckpointMismatchError: on every rank, if one has no manifest that fits its file, or a damaged one.
    """
    state: Any = checkpoint.get(KEY)
    manifest: Manifest | None = None
    problem: Exception | None = None
    if load.engine.zero_optimization_partition_weights():
        states = [candidate for candidate in gather(state) if isinstance(candidate, dict) and "left_out" in candidate]
    else:
        states = [state]
    try:
        if state is not None:
            manifest = Manifest.from_state(
                next((candidate for candidate in states if digest_of(candidate) == digest_of(state)), state)
            )
    except CheckpointMismatchError as error:
        problem = error
    _agree(load, problem)
    if any(digests.has_record for digests in load.read):
        warn(
            load.owner,
            f"{load.source} has no {RECORD} beside its files, so it cannot be verified that they are the ones that were"
            " saved. Copy it too.",
        )
    return manifest


def _problem(load: Load) -> CheckpointError | None:
    """What is wrong with the files that this rank has read."""
    try:
        check_digests_agree(load.read)
    except CheckpointError as error:
        return error
    return None


def _agree(load: Load, problem: Exception | None = None) -> None:
    """Raise on every rank this problem, or what is wrong with what the ranks have read; every rank must call it."""
    problem = problem or _problem(load)
    kinds = {digests.kind: digest((digests.save, sorted(digests.alike.items()))) for digests in load.read}
    everyone = gather_numbers([problem is not None, *(kinds.get(kind, 0) for kind in _KINDS)], load.owner.device)
    if any(numbers[0] for numbers in everyone):
        raise_on_all_ranks(load, problem)
    if any(len({numbers[column] for numbers in everyone} - {0}) > 1 for column in (1, 2)):
        try:
            check_digests_agree([digests for share in gather(load.read) for digests in share])
        except CheckpointError as error:  # the same on every rank
            raise_on_all_ranks(load, error)

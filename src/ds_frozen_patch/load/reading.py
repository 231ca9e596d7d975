"""Whether what DeepSpeed reads on all ranks is of one save: each file of model states has its id, or its record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.zero.layout import latest_tag
from ..common.errors import CheckpointError
from ..common.overrides import Attributes
from ..internals import checkpoint_engine, states_file
from ..ranks import digest
from ..record import UNKNOWN, carried
from ..settings import current as settings
from .agreement import LoadRanks
from .running import Load


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
    """Note the save that a file of model states is of; raises CheckpointError if the record contradicts a file."""
    record = load.record
    if isinstance(state, Mapping) and "module" in state:
        here = carried(state, file)
        load.read = digest(here.save)
        if record is not None:
            record.check_state(file, state)
        elif here.kind != UNKNOWN:
            load.record = here
    elif record is not None and file.name in record.files and settings().verify_files:
        record.check_content(file)  # it has no id, and may have been replaced since it was verified


def _agree(load: Load, problem: CheckpointError | None) -> None:
    """Raise on every rank this problem, or that the ranks have read files of several saves; every rank must call it."""
    ranks = LoadRanks(load.owner.device, load)
    if problem is not None:
        ranks.errors.append(problem)
    everyone = ranks.step("read a file", lambda: [load.read], 1)

    def refuse() -> None:
        raise CheckpointError(f"{load.source} has files of more than one save. Take all files from one checkpoint.")

    if len({read for (read,) in everyone} - {0}) > 1:
        ranks.step("compare what all ranks have read", refuse)

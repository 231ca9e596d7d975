"""Whether what DeepSpeed reads on all ranks is of one save: each file of model states has its id, or its record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.zero.layout import latest_tag
from ..common.collectives import digest, gather_numbers
from ..common.errors import CheckpointError
from ..common.overrides import Attributes
from ..record import UNKNOWN, carried
from ..settings import current as settings
from .agreement import raise_on_all_ranks
from .running import Load


def sharing_reads(load: Load) -> Attributes:
    """Lets the engine's reader raise on all ranks what one of them cannot read, or has read of another save."""
    reader = load.engine.checkpoint_engine
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
            _note(load, Path(load.engine._get_ckpt_name(load.source, load.tag or latest_tag(Path(load.source)))), state)
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
    everyone = gather_numbers([problem is not None, load.read], load.owner.device)
    if problem is None and len({read for _, read in everyone} - {0}) > 1:
        problem = CheckpointError(f"{load.source} has files of more than one save. Take all files from one checkpoint.")
    if problem is not None or any(failed for failed, _ in everyone):
        raise_on_all_ranks(load, problem)

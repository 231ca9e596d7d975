"""Open a checkpoint: read its states, check that its files belong together, and locate its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...record import Record
from .states import States, check_same_save, read_states
from .weights import Weights, check_masters_match, locate_weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been checked: the states in them, and where its weights are."""

    states: States
    weights: Weights


def open_checkpoint(
    path: str | Path,
    tag: str | None = None,
    *,
    trainable: Sequence[str] = ("*",),
    as_base: bool = False,
    record: Record | None = None,
) -> Checkpoint:
    """Read a checkpoint's pickles, and of its tensors at most samples.

    Args:
        path: the directory.
        tag: the subdirectory; by default the one named in `latest`.
        trainable: as for `locate_weights`; by default every parameter that could have been trained.
        as_base: the checkpoint is used as a base: parameters that no optimizer contains count as frozen, and the
            masters, which are not used, are not compared with the model's weights.
        record: as for `read_states`.

    Raises:
        CheckpointError: a file is missing, damaged or unexpected, or the files are not from one save.
    """
    states = read_states(path, tag, record)
    check_same_save(states)
    if as_base:
        trainable = () if states.zero_stage else ("*",)  # stage 0 may not tell what was trained
    weights = locate_weights(states, trainable)
    if not as_base:
        check_masters_match(weights.trained, weights.halves)
    return Checkpoint(states, weights)

"""Open a checkpoint: read its states, check that its files belong together, and locate its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError
from ...common.files import WEIGHTS_FILE
from ...parameters import is_name
from ...record import Record, carried
from ..format.archive import Contents, read_archive
from .layout import Layout, located
from .states import DEEPSPEEDS_OWN, States, check_same_save, read_states
from .weights import Weights, check_masters_match, locate_weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been checked.

    Attributes:
        states: the states in its files.
        weights: where its weights are.
        client_state: what it contains beside the weights and DeepSpeed's own state.
    """

    states: States
    weights: Weights
    client_state: Mapping[str, Any]

    @property
    def record(self) -> Record:
        """The record of the checkpoint."""
        return self.states.record


def open_checkpoint(
    path: str | Path,
    tag: str | None = None,
    *,
    trainable: Sequence[str] = ("*",),
    record: Record | None = None,
) -> Checkpoint:
    """Read a checkpoint's pickles, and of its tensors at most samples.

    Args:
        path: the directory.
        tag: the subdirectory; by default the one named in `latest`.
        trainable: as for `locate_weights`; by default every parameter that could have been trained.
        record: as for `read_states`.

    Raises:
        CheckpointError: a file is missing, damaged or unexpected, or the files are not from one save.
    """
    states = read_states(path, tag, record)
    check_same_save(states)
    weights = locate_weights(states, trainable)
    check_masters_match(weights.trained, weights.halves)
    client_state = {key: value for key, value in states.models[0].items() if key not in DEEPSPEEDS_OWN}
    return Checkpoint(states, weights, client_state)


def open_any(path: str | Path, tag: str | None = None) -> Checkpoint:
    """Read a checkpoint, or the single file of a weights-only save, which does not tell what was trained.

    Raises:
        CheckpointError: as `open_checkpoint`, or the file is another one.
    """
    file = located(path, tag)
    if file.is_dir() and not (file / "latest").exists() and (file / WEIGHTS_FILE).is_file():
        file /= WEIGHTS_FILE
    if not file.is_file():
        return open_checkpoint(file, tag)
    if tag is not None:
        raise CheckpointError(f"{file} is a single file, and has no tags. Do not pass one.")
    state: Any = read_archive(file).state
    saved = state.get("state_dict") if isinstance(state, dict) else None
    if not isinstance(saved, dict) or not all(map(is_name, saved)):
        raise CheckpointError(
            f"{file} is neither the directory of a DeepSpeed checkpoint nor a weights-only file of Lightning, which has"
            " a `state_dict`. Check the path."
        )
    model = {"module": saved, "buffer_names": [name for name in saved if name.endswith("_extra_state")]}
    states = States(Layout(file, "", (file,), ()), (Contents(model, 0),), carried(state, file))
    client_state = {key: value for key, value in state.items() if key != "state_dict"}
    return Checkpoint(states, locate_weights(states, ("*",)), client_state)

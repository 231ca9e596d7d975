"""What `consolidate` reads: the directory of a checkpoint, or the single file of a weights-only save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import read_archive
from ..checkpoint.format.records import from_stored
from ..checkpoint.zero.entries import read_entries, storage_place
from ..checkpoint.zero.opening import open_checkpoint
from ..checkpoint.zero.states import DEEPSPEEDS_OWN
from ..checkpoint.zero.weights import Weights, check_total_size
from ..common.errors import CheckpointError
from ..common.files import WEIGHTS_FILE
from ..parameters import compiled_modules, is_name, plain
from ..record import Record, carried


@dataclass(frozen=True)
class Source:
    """A checkpoint to consolidate.

    Attributes:
        path: its directory or file.
        content: what it contains beside the weights and DeepSpeed's own state.
        weights: where its weights are.
        record: of the checkpoint.
        lacks_frozen: whether frozen parameters were left out.
        compiled: the names of compiled modules, as `compiled_modules` returns them.
    """

    path: Path
    content: Mapping[str, Any]
    weights: Weights
    record: Record
    lacks_frozen: bool
    compiled: frozenset[str]


def open_source(path: str | Path, tag: str | None) -> Source:
    """Read a checkpoint's pickles, and of its tensors at most samples.

    Raises:
        CheckpointError: a file is missing, damaged or unexpected, or the files are not from one save.
    """
    file = Path(path)
    if file.is_dir() and not (file / "latest").exists() and (file / WEIGHTS_FILE).is_file():
        file /= WEIGHTS_FILE
    if file.is_file():
        if tag is not None:
            raise CheckpointError(f"{file} is a single file, and has no tags. Do not pass one.")
        return _open_file(file)
    checkpoint = open_checkpoint(path, tag)
    states = checkpoint.states
    return Source(
        path=states.layout.root,
        content={key: value for key, value in states.models[0].items() if key not in DEEPSPEEDS_OWN},
        weights=checkpoint.weights,
        record=states.record,
        lacks_frozen=bool(states.record.left_out) if states.record.is_trainable_only else states.leaves_out_frozen,
        compiled=states.compiled,
    )


def _open_file(file: Path) -> Source:
    """A file that Lightning has saved: it does not tell which of its weights were trained."""
    state: Any = read_archive(file).state
    saved = state.get("state_dict") if isinstance(state, dict) else None
    if not isinstance(saved, Mapping) or not all(map(is_name, saved)):
        raise CheckpointError(
            f"{file} is neither the directory of a DeepSpeed checkpoint nor a weights-only file of Lightning, which has"
            " a `state_dict`. Check the path."
        )
    record = carried(state, file)
    entries = read_entries({"module": {plain(name): item for name, item in saved.items()}}, record)
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in entries.tensors.items():
        if tensor.numel and (original := first.setdefault(storage_place(tensor), name)) != name:
            aliases[name] = original
    sources = {name: from_stored(tensor) for name, tensor in entries.tensors.items() if name not in aliases}
    check_total_size(sum(item.nbytes for item in sources.values()), file)
    weights = Weights(
        trained={name: item for name, item in sources.items() if name not in entries.owners},
        frozen={},
        buffers={},
        aliases=aliases,
        halves={},
        parts={name: item for name, item in sources.items() if name in entries.owners},
        owners={name: owner for name, owner in entries.owners.items() if name in sources},
        packed={},
        subclasses=entries.subclasses,
    )
    content = {key: value for key, value in state.items() if key != "state_dict"}
    return Source(file, content, weights, record, bool(record.left_out), compiled_modules(saved) | record.compiled)

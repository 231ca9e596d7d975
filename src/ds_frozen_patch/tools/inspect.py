"""Show what takes up space in a checkpoint, from its pickles, without reading tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import Contents
from ..checkpoint.format.stored import Storage, StoredTensor, iter_tensors
from ..checkpoint.zero.entries import read_entries, with_plain_names
from ..checkpoint.zero.states import as_integer, configured_stage, parameter_groups, read_states
from ..common.files import shown
from ..common.text import human_bytes, printable_lines
from ..record import UNKNOWN, Record

TRAINABLE, FROZEN, SECOND_COPY = "trainable weights", "frozen weights", "frozen weights, second copy"
EITHER = "weights, trainable or frozen"
MASTER, OPTIMIZER = "fp32 master weights", "optimizer state"
BUFFERS, CLIENT_STATE, FORMAT = "buffers", "client state", "file format"
KINDS = (TRAINABLE, FROZEN, SECOND_COPY, EITHER, MASTER, OPTIMIZER, BUFFERS, CLIENT_STATE, FORMAT)
"""The kinds of content. `EITHER`: a full checkpoint of ZeRO stage 0 does not tell which weights were trained."""


@dataclass(frozen=True)
class Inspection:
    """The contents of a checkpoint. All sizes are in bytes.

    Attributes:
        path: the path of the checkpoint, as passed.
        tag: the subdirectory that was read.
        zero_stage: 0 to 3.
        world_size: the number of ranks that saved it.
        global_step: the number of optimizer steps; None if the checkpoint does not record it.
        epoch: the epoch, from 0 on; None if the checkpoint does not record it.
        versions: the release of each package that the checkpoint records.
        files: by file name, the size of each kind of `KINDS` in the file; together they are the file's size.
        record: what ds_frozen_patch has recorded at the save; None if it has not.
    """

    path: str
    tag: str
    zero_stage: int
    world_size: int
    global_step: int | None
    epoch: int | None
    versions: dict[str, str]
    files: dict[str, dict[str, int]]
    record: Record | None

    @property
    def kinds(self) -> dict[str, int]:
        """The size of each kind in all files."""
        total: Counter[str] = Counter()
        for kinds in self.files.values():
            total.update(kinds)
        return {kind: total[kind] for kind in KINDS if total[kind]}

    @property
    def size(self) -> int:
        """The size of all files."""
        return sum(self.kinds.values())

    @property
    def prunable(self) -> int:
        """How much smaller the checkpoint would be without its frozen weights."""
        return self.kinds.get(FROZEN, 0) + self.kinds.get(SECOND_COPY, 0)

    def __str__(self) -> str:
        counters = (("epoch", self.epoch), ("step", self.global_step))
        progress = [f"{name} {value}" for name, value in counters if value is not None]
        lines = [
            f"{self.path}, {self.tag}: {human_bytes(self.size)}",
            ", ".join([f"ZeRO stage {self.zero_stage}", f"ranks: {self.world_size}", *progress]),
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "",
            *(f"{human_bytes(size):>8}  {size / self.size:4.0%}  {kind}" for kind, size in self.kinds.items()),
            "",
            *(f"{human_bytes(sum(kinds.values())):>8}  {name}" for name, kinds in self.files.items()),
            "",
        ]
        if self.record and self.record.is_trainable_only:
            lines.append(f"Trainable-only: {self.record} were left out.")
        elif self.prunable:
            lines.append(f"Without its frozen weights it would be {human_bytes(self.size - self.prunable)}.")
        else:
            lines.append("It has no weights that are known to be frozen.")
        return printable_lines(lines)


def inspect(path: str | Path, tag: str | None = None) -> Inspection:
    """Show what takes up space in a checkpoint; it reads no tensors, so the checkpoint's size does not matter.

    Args:
        path: the directory of a DeepSpeed checkpoint, saved by Lightning or by DeepSpeed alone.
        tag: the subdirectory to read; by default the one named in `latest`.

    Returns:
        The sizes, and what the checkpoint records about its run.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, truncated, damaged or unexpected.
    """
    states = read_states(path, tag)
    files: dict[str, dict[str, int]] = {}
    record = states.record
    for file, contents in zip(states.layout.files, states.contents, strict=True):
        is_model = file not in states.layout.optimizer
        kinds_of = _model_kinds(contents.state, record) if is_model else _optimizer_kinds(contents.state)
        files[file.name] = _sum_sizes(contents, kinds_of, file.stat().st_size)
    model = states.models[0]
    return Inspection(
        path=shown(states.layout.root),
        tag=states.layout.tag,
        zero_stage=states.zero_stage,
        world_size=states.world_size,
        global_step=as_integer(model.get("global_step", model.get("global_steps"))),
        epoch=as_integer(model.get("epoch")),
        versions=states.versions,
        files=files,
        record=None if record.kind == UNKNOWN else record,
    )


def _sum_sizes(file: Contents, kinds: Iterator[tuple[str, StoredTensor]], size: int) -> dict[str, int]:
    """The size of each kind in a file. A storage counts once, as the kind of its first tensor."""
    sizes: Counter[str] = Counter()
    seen: set[str] = set()
    for kind, tensor in kinds:
        if tensor.storage.key not in seen:
            seen.add(tensor.storage.key)
            sizes[kind] += tensor.storage.nbytes
    sizes[CLIENT_STATE] += file.pickle_bytes
    sizes[FORMAT] = size - sizes.total()
    return {kind: sizes[kind] for kind in KINDS if sizes[kind]}


def _model_kinds(state: Mapping[str, Any], record: Record) -> Iterator[tuple[str, StoredTensor]]:
    """The kind of each tensor of a `*model_states.pt`."""
    state = with_plain_names(state)
    trained = {name for group in parameter_groups(state) for name in group}
    entries = read_entries(state, record)
    module, parts, buffers = entries.tensors, entries.owners, entries.buffers
    listed: dict[tuple[Storage, int], str] = {}
    for name, tensor in module.items():
        if name in trained or name in buffers or name in parts:
            listed[tensor.storage, tensor.offset] = (
                TRAINABLE if name in trained else BUFFERS if name in buffers - entries.packed else FROZEN
            )
    unlisted = FROZEN if trained else TRAINABLE if record.is_trainable_only else EITHER
    for tensor in module.values():
        # A tied alias of a trainable parameter is not listed, but it is the same memory.
        yield listed.get((tensor.storage, tensor.offset), unlisted), tensor
    others = {"frozen_param_fragments": FROZEN if configured_stage(state) == 3 else SECOND_COPY, "optimizer": OPTIMIZER}
    for key, value in state.items():
        for _, tensor in iter_tensors(value):
            yield others.get(key, CLIENT_STATE), tensor


def _optimizer_kinds(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """The kind of each tensor of a `*optim_states.pt`."""
    for path, tensor in iter_tensors(state):
        yield MASTER if any("fp32" in str(key) for key in path) else OPTIMIZER, tensor

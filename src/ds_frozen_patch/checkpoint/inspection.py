"""What the bytes of a checkpoint are: read from its pickles, without reading a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from ..manifest import KEY, Manifest
from .archive import Contents, StandIn, Storage, StoredTensor, read, tensors
from .layout import find

TRAINABLE, FROZEN, SECOND_COPY = "trainable weights", "frozen weights", "frozen weights, second copy"
EITHER = "weights, trainable or frozen"
MASTER, OPTIMIZER = "fp32 master weights", "optimizer state"
BUFFERS, CLIENT_STATE, FORMAT = "buffers", "client state", "file format"
KINDS = (TRAINABLE, FROZEN, SECOND_COPY, EITHER, MASTER, OPTIMIZER, BUFFERS, CLIENT_STATE, FORMAT)
"""What bytes can be. `EITHER`: a full checkpoint of ZeRO stage 0 does not say which of its weights were trained."""


@dataclass(frozen=True)
class Inspection:
    """What was found in a checkpoint. All sizes are in bytes.

    `files` gives, by file name, the size of each kind of `KINDS` that the file has; together they are the size of the
    file. `global_step` and `epoch` are None where the checkpoint does not say them. `manifest` is None in a checkpoint
    that ds_frozen_patch did not make trainable-only.
    """

    path: str
    tag: str
    zero_stage: int
    world_size: int
    global_step: int | None
    epoch: int | None
    versions: dict[str, str]
    files: dict[str, dict[str, int]]
    manifest: Manifest | None

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
        """What the checkpoint would be smaller by without its frozen weights."""
        return self.kinds.get(FROZEN, 0) + self.kinds.get(SECOND_COPY, 0)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        own = {name: value for name, value in vars(self).items() if name != "manifest"}
        totals = {"kinds": self.kinds, "size": self.size, "prunable": self.prunable}
        return {**own, **totals, "manifest": self.manifest.to_state() if self.manifest else None}


def inspect(path: str | Path, tag: str | None = None, *, trust: bool = False) -> Inspection:
    """Say what a checkpoint's bytes are; no tensor is read, so that its size does not matter.

    Args:
        path: the directory of a DeepSpeed checkpoint, saved by Lightning or by DeepSpeed alone.
        tag: the folder in it; without one, what its file `latest` says.
        trust: also read files that name classes which do not belong in a checkpoint. Nothing of them is run.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, cut, damaged or not expected.
        CheckpointMismatchError: its manifest is of a format that this release does not know.
    """
    layout = find(path, tag)
    files: dict[str, dict[str, int]] = {}
    states: list[Mapping[str, Any]] = []
    for file in layout.files:
        contents = read(file, trust=trust)
        part, kinds = _OPTIMIZER if file in layout.optimizer else _MODEL
        if not isinstance(contents.state, dict) or not isinstance(contents.state.get(part), dict):
            raise CheckpointError(f"{file} is no file of a DeepSpeed checkpoint: it has no {part!r}. Check the path.")
        files[file.name] = _sizes(contents, kinds(contents.state), file.stat().st_size)
        states.append(contents.state)
    model, optimizers = states[0], states[len(layout.model) :]
    manifest = Manifest.from_checkpoint(model)
    return Inspection(
        path=str(layout.root),
        tag=layout.tag,
        zero_stage=_zero_stage(model, optimizers),
        world_size=_number(model.get("dp_world_size")) or len(layout.optimizer) or 1,
        global_step=_number(model.get("global_step", model.get("global_steps"))),
        epoch=_number(model.get("epoch")),
        versions=_versions(model, manifest),
        files=files,
        manifest=manifest,
    )


def _sizes(contents: Contents, kinds: Iterator[tuple[str, StoredTensor]], size: int) -> dict[str, int]:
    """The size of each kind in a file. A storage counts once, as what its first tensor is."""
    found: Counter[str] = Counter()
    seen: set[str] = set()
    for kind, tensor in kinds:
        if tensor.storage.key not in seen:
            seen.add(tensor.storage.key)
            found[kind] += tensor.storage.nbytes
    found[CLIENT_STATE] += contents.pickle_bytes
    found[FORMAT] = size - found.total()
    return {kind: found[kind] for kind in KINDS if found[kind]}


def _model_kinds(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """What each tensor of a `*model_states.pt` is."""
    trained = {name for group in _items(state.get("param_shapes")) for name in _names(group)}
    buffers = _names(state.get("buffer_names"))
    module = {name: item for name, item in state["module"].items() if isinstance(item, StoredTensor)}
    listed: dict[tuple[Storage, int], str] = {}
    for name, tensor in module.items():
        if name in trained or name in buffers:
            listed[tensor.storage, tensor.offset] = BUFFERS if name in buffers else TRAINABLE
    unlisted = FROZEN if trained else TRAINABLE if KEY in state else EITHER
    for tensor in module.values():
        # A tied alias of a trainable parameter is in no list, but it is the same memory.
        yield listed.get((tensor.storage, tensor.offset), unlisted), tensor
    others = {"frozen_param_fragments": FROZEN if _stage_of(state) == 3 else SECOND_COPY, "optimizer": OPTIMIZER}
    for key, value in state.items():
        for _, tensor in tensors(value):
            yield others.get(key, CLIENT_STATE), tensor


def _optimizer_kinds(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """What each tensor of a `*optim_states.pt` is."""
    for path, tensor in tensors(state):
        yield MASTER if any("fp32" in str(key) for key in path) else OPTIMIZER, tensor


# What each kind of file must have, and what its tensors are.
_MODEL, _OPTIMIZER = ("module", _model_kinds), ("optimizer_state_dict", _optimizer_kinds)


def _zero_stage(model: Mapping[str, Any], optimizers: list[Mapping[str, Any]]) -> int:
    for state in optimizers:
        said = state["optimizer_state_dict"].get("zero_stage")
        said = said.arguments[0] if isinstance(said, StandIn) and said.arguments else said  # an enum of DeepSpeed's
        if isinstance(said, int):
            return said
    return _stage_of(model)


def _stage_of(model: Mapping[str, Any]) -> int:
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return (_number(zero.get("stage")) or 0) if isinstance(zero, Mapping) else 0


def _items(value: Any) -> list[Any]:
    """The items of a list, or the keys of a mapping; nothing of what a checkpoint has not got, or has otherwise."""
    return list(value) if isinstance(value, list | tuple | Mapping) else []


def _names(value: Any) -> set[str]:
    return {item for item in _items(value) if isinstance(item, str)}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _versions(model: Mapping[str, Any], manifest: Manifest | None) -> dict[str, str]:
    said = {"deepspeed": model.get("ds_version"), "pytorch-lightning": model.get("pytorch-lightning_version")}
    found = {name: version for name, version in said.items() if isinstance(version, str)}
    return {**found, **(manifest.versions if manifest else {})}

"""What the bytes of a checkpoint are: read from its pickles, without reading a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.text import human_bytes, printable_lines
from ...manifest import KEY, Manifest
from ..format.archive import Contents
from ..format.stored import Storage, StoredTensor, tensors
from ..quantization import kinds as kinds_of_base
from ..quantization import of_base
from ..zero.states import configured_stage, load, names_of_groups, number
from ..zero.weights import contents, plain_names

TRAINABLE, FROZEN, SECOND_COPY = "trainable weights", "frozen weights", "frozen weights, second copy"
EITHER = "weights, trainable or frozen"
MASTER, OPTIMIZER = "fp32 master weights", "optimizer state"
BUFFERS, CLIENT_STATE, FORMAT = "buffers", "client state", "file format"
KINDS = (TRAINABLE, FROZEN, SECOND_COPY, EITHER, MASTER, OPTIMIZER, BUFFERS, CLIENT_STATE, FORMAT)
"""What bytes can be. `EITHER`: a full checkpoint of ZeRO stage 0 does not say which of its weights were trained."""


@dataclass(frozen=True)
class Inspection:
    """What was found in a checkpoint. All sizes are in bytes.

    Attributes:
        path: the checkpoint's path, as it was given.
        tag: the folder in it that was read.
        zero_stage: 0 to 3, of the run that saved.
        world_size: the ranks of the run that saved.
        global_step: the steps of the optimizer before the save; None where the checkpoint does not say it.
        epoch: that of the save, from 0 on; None where the checkpoint does not say it.
        versions: by package, the releases that the checkpoint names.
        files: by file name, the size of each kind of `KINDS` that the file has; together they are the file's size.
        base: what the base is quantized with, in words; empty where it is not.
        manifest: what was left out; None in a checkpoint that ds_frozen_patch did not make trainable-only.
    """

    path: str
    tag: str
    zero_stage: int
    world_size: int
    global_step: int | None
    epoch: int | None
    versions: dict[str, str]
    files: dict[str, dict[str, int]]
    base: tuple[str, ...]
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

    def __str__(self) -> str:
        counters = (("epoch", self.epoch), ("step", self.global_step))
        progress = [f"{name} {value}" for name, value in counters if value is not None]
        lines = [
            f"{self.path}, {self.tag}: {human_bytes(self.size)}",
            ", ".join([f"ZeRO stage {self.zero_stage}", f"ranks: {self.world_size}", *progress]),
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            *(f"base: {kind}" for kind in self.base),
            "",
            *(f"{human_bytes(size):>8}  {size / self.size:4.0%}  {kind}" for kind, size in self.kinds.items()),
            "",
            *(f"{human_bytes(sum(kinds.values())):>8}  {name}" for name, kinds in self.files.items()),
            "",
        ]
        if self.manifest:
            lines.append(f"Trainable-only: {self.manifest} were left out.")
        elif self.prunable:
            lines.append(f"Without its frozen weights it would be {human_bytes(self.size - self.prunable)}.")
        else:
            lines.append("It has no manifest, and no weights that are known to be frozen.")
        return printable_lines(lines)


def inspect(path: str | Path, tag: str | None = None, *, trust: bool = False) -> Inspection:
    """Say what a checkpoint's bytes are; no tensor is read, so that its size does not matter.

    Args:
        path: the directory of a DeepSpeed checkpoint, saved by Lightning or by DeepSpeed alone.
        tag: the folder in it; without one, what its file `latest` says.
        trust: also read files that name classes which do not belong in a checkpoint, and follow links out of it. None
            of them is run.

    Returns:
        The sizes, and what the checkpoint says of its run.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, cut, damaged or not expected.
        CheckpointMismatchError: its manifest is damaged, or of a format that this release does not know.
    """
    states = load(path, tag, trust)
    files: dict[str, dict[str, int]] = {}
    manifest = states.manifest
    for file, found in zip(states.layout.files, states.contents, strict=True):
        is_model = file not in states.layout.optimizer
        kinds_of = _model_kinds(found.state, manifest) if is_model else _optimizer_kinds(found.state)
        files[file.name] = _sizes(found, kinds_of, file.stat().st_size)
    model = states.models[0]
    return Inspection(
        path=str(states.layout.root),
        tag=states.layout.tag,
        zero_stage=states.zero_stage,
        world_size=states.world_size,
        global_step=number(model.get("global_step", model.get("global_steps"))),
        epoch=number(model.get("epoch")),
        versions=states.versions,
        files=files,
        base=kinds_of_base(_dtypes(plain_names(model), manifest)),
        manifest=manifest,
    )


def _dtypes(model: Mapping[str, Any], manifest: Manifest | None) -> dict[str, str]:
    """The dtype of all that is there, and of what was left out, by name; of a tensor subclass its class's name."""
    module, subclasses, _, _ = contents(model, manifest)
    left_out = manifest.left_out if manifest else ()
    return {
        **{name: tensor.dtype for name, tensor in module.items()},
        **{name: one.name for name, one in subclasses.items()},
        **{name: one.dtype for one in left_out for name in one.names},
    }


def _sizes(file: Contents, kinds: Iterator[tuple[str, StoredTensor]], size: int) -> dict[str, int]:
    """The size of each kind in a file. A storage counts once, as what its first tensor is."""
    found: Counter[str] = Counter()
    seen: set[str] = set()
    for kind, tensor in kinds:
        if tensor.storage.key not in seen:
            seen.add(tensor.storage.key)
            found[kind] += tensor.storage.nbytes
    found[CLIENT_STATE] += file.pickle_bytes
    found[FORMAT] = size - found.total()
    return {kind: found[kind] for kind in KINDS if found[kind]}


def _model_kinds(state: Mapping[str, Any], manifest: Manifest | None) -> Iterator[tuple[str, StoredTensor]]:
    """What each tensor of a `*model_states.pt` is."""
    state = plain_names(state)
    trained = {name for group in names_of_groups(state) for name in group}
    module, _, parts, buffers = contents(state, manifest)
    packed = of_base(buffers, parts)
    listed: dict[tuple[Storage, int], str] = {}
    for name, tensor in module.items():
        if name in trained or name in buffers or name in parts:
            listed[tensor.storage, tensor.offset] = (
                TRAINABLE if name in trained else BUFFERS if name in buffers - packed else FROZEN
            )
    unlisted = FROZEN if trained else TRAINABLE if KEY in state else EITHER
    for tensor in module.values():
        # A tied alias of a trainable parameter is in no list, but it is the same memory.
        yield listed.get((tensor.storage, tensor.offset), unlisted), tensor
    others = {"frozen_param_fragments": FROZEN if configured_stage(state) == 3 else SECOND_COPY, "optimizer": OPTIMIZER}
    for key, value in state.items():
        for _, tensor in tensors(value):
            yield others.get(key, CLIENT_STATE), tensor


def _optimizer_kinds(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    """What each tensor of a `*optim_states.pt` is."""
    for path, tensor in tensors(state):
        yield MASTER if any("fp32" in str(key) for key in path) else OPTIMIZER, tensor

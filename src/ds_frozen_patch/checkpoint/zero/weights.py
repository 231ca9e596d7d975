"""The weights of a checkpoint by name, assembled from the shards of its ranks: where they are, not their values."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

from ...common.errors import CheckpointError, named
from ...parameters import plain
from ..dtypes import FLOATING
from ..format.records import Piece, Records, TensorSource, from_stored
from ..format.stored import StoredTensor, iter_tensors
from ..quantization import Subclass, parse_subclass
from .entries import read_entries, storage_place, with_plain_names
from .groups import locate_masters
from .partitions import parameter_shard_size
from .states import States, parameter_groups


@dataclass(frozen=True)
class Weights:
    """All weights of a checkpoint by plain name; tied weights are listed under their first name only.

    Attributes:
        trained: the trained weights, from the fp32 masters if there are any.
        frozen: the frozen parameters.
        buffers: the buffers, without those in `packed`.
        aliases: the first name of each tied alias.
        halves: the weights that the model computed with, of those that are in `trained` as masters; not in ZeRO-3.
        parts: of a quantized base, what its parameters need besides their values, such as scales.
        owners: the parameter that each part belongs to.
        packed: the buffers of a quantized base.
        subclasses: frozen parameters that consist of other tensors; these are in `parts`, and not in `frozen`.
    """

    trained: dict[str, TensorSource]
    frozen: dict[str, TensorSource]
    buffers: dict[str, TensorSource]
    aliases: dict[str, str]
    halves: dict[str, TensorSource]
    parts: dict[str, TensorSource]
    owners: dict[str, str]
    packed: dict[str, TensorSource]
    subclasses: dict[str, Subclass]

    @property
    def base(self) -> dict[str, TensorSource]:
        """Everything that a trainable-only checkpoint leaves out."""
        return {**self.frozen, **self.parts, **self.packed}

    @property
    def all(self) -> dict[str, TensorSource]:
        """All weights."""
        return {**self.base, **self.trained, **self.buffers}

    @property
    def by_any_name(self) -> dict[str, TensorSource]:
        """All weights, tied ones under each of their names."""
        tensors = self.all
        return tensors | {alias: tensors[first] for alias, first in self.aliases.items() if first in tensors}

    @property
    def quantized(self) -> frozenset[str]:
        """The names of tensors that must keep their dtype, because other tensors say what they mean."""
        return frozenset((*self.parts, *self.owners.values(), *self.packed))

    def names_of(self, name: str) -> tuple[str, ...]:
        """A parameter's name and its tied aliases."""
        return (name, *self._aliases_by_name.get(name, ()))

    @cached_property
    def _aliases_by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for alias, first in self.aliases.items():
            found.setdefault(first, []).append(alias)
        return found


def locate_weights(states: States, trainable: Sequence[str] = ()) -> Weights:
    """Find where the weights of a checkpoint are.

    Args:
        states: the states of its files.
        trainable: patterns (as in `fnmatch`) of the names of trained parameters, for a full checkpoint of ZeRO stage 0
            that does not tell; and in stage 1, of those that no optimizer contains and that are not frozen.

    Raises:
        CheckpointError: a part of a weight is missing, or the checkpoint does not tell what was trained.
    """
    model = with_plain_names(states.models[0])
    # In stage 0, an optimizer made of all parameters of a module lists those that are frozen, too.
    left_out = states.record.names
    listed = [name for group in parameter_groups(model) for name in group if name not in left_out]
    entries = read_entries(model, states.record)
    module, parts, buffers, packed = entries.tensors, entries.owners, entries.buffers, entries.packed
    first = _first_names(module, model, states.zero_stage)
    masters = locate_masters(states, parameter_groups(model))
    lists_frozen = isinstance(model.get("frozen_param_fragments"), dict)
    frozen = _locate_frozen(states, module) if lists_frozen else {}
    if missing := [name for name in listed if name not in module and name not in masters and name not in frozen]:
        raise CheckpointError(
            f"{states.layout.model[0]} lacks the weights of {named(missing)}. Get a complete copy of it."
        )
    # A module whose own `state_dict` lacks trained parameters: we save them where DeepSpeed has frozen ones.
    trained = masters or {name: from_stored(module[name]) if name in module else frozen.pop(name) for name in listed}
    candidates = [
        name
        for name in module
        if name == first[name] and name not in buffers and name not in parts and not name.endswith("_extra_state")
    ]
    if not trained and not states.record.is_trainable_only and not lists_frozen:
        trained = {name: from_stored(module[name]) for name in _infer_trained(candidates, module, model, trainable)}
    trained, unclear = dict(trained), set(() if masters else trained)
    for name in candidates:
        if name in trained:
            frozen.pop(name, None)
        elif name not in frozen and (module[name].numel or states.zero_stage < 3):
            # Neither trained nor known to be frozen: a parameter that no optimizer contains.
            kept = states.record.is_trainable_only or lists_frozen or _matches(name, trainable)
            (trained if kept else frozen)[name] = from_stored(module[name])
            unclear |= set() if states.record.is_trainable_only or lists_frozen else {name}
    asked = [name for name in module if first[name] in unclear]
    if idle := [p for p in trainable if p != "*" and not any(_matches(name, [p]) for name in asked)]:
        raise CheckpointError(
            f"The patterns of trained parameters have no effect: {named(idle)} match nothing, or only parameters for"
            f" which {states.layout.root} itself records this. Remove them. For prune, name frozen parameters that no"
            " base has with --keep."
        )
    # A tied parameter has its parts under each of its names.
    same = {n: first.get(o, o) + n.removeprefix(o) for n, o in parts.items() if n.startswith(f"{o}.")}
    same = {name: to for name, to in same.items() if name != to and to in parts}
    ours = {*trained, *frozen, *entries.subclasses}
    return Weights(
        trained=trained,
        frozen=frozen,
        buffers={name: from_stored(module[name]) for name in module if name in buffers and name not in packed},
        aliases={name: to for name, to in first.items() if name != to and to in ours} | same,
        halves={
            name: from_stored(module[name])
            for name in masters
            if name in module and module[name].numel and module[name].is_contiguous and module[name].dtype in FLOATING
        },
        parts={name: from_stored(module[name]) for name in module if name in parts and name not in same},
        owners={name: first.get(owner, owner) for name, owner in parts.items() if name not in same},
        packed={name: from_stored(module[name]) for name in module if name in packed},
        subclasses=entries.subclasses,
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(plain(name), pattern) for pattern in patterns)


def _first_names(module: Mapping[str, StoredTensor], model: Mapping[str, Any], stage: int) -> dict[str, str]:
    """For each name, the first name of the same tensor, in the module's order."""
    shared = model.get("shared_params")
    first = {}
    for alias, to in (shared if isinstance(shared, dict) else {}).items():
        # Except in ZeRO-3, DeepSpeed compares addresses, and a tensor without elements has no address of its own.
        if alias in module and (module[alias].numel or stage == 3):
            first[alias] = to
    places: dict[Any, str] = {}
    for name, tensor in module.items():
        place = storage_place(tensor) if tensor.numel else name
        first.setdefault(name, places.setdefault(place, name))
    return {name: first[name] for name in module}


def _locate_frozen(states: States, module: Mapping[str, StoredTensor]) -> dict[str, TensorSource]:
    """The frozen parameters that DeepSpeed lists, from ZeRO-2 on."""
    models = [with_plain_names(model) for model in states.models]
    shapes = models[0].get("frozen_param_shapes") or {}
    if states.zero_stage < 3:
        tensors = {**(models[0].get("frozen_param_fragments") or {}), **module}
        return {name: from_stored(tensors[name]) for name in shapes if isinstance(tensors.get(name), StoredTensor)}
    sources = {}
    for name, shape in shapes.items():
        shards: list[Any] = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if parse_subclass(shards[0]) is not None:
            continue
        for file, shard in zip(states.layout.model, shards, strict=True):
            if not isinstance(shard, StoredTensor) or not shard.is_contiguous:
                raise CheckpointError(f"{file} lacks its shard of {name!r}. Get a complete copy of it.")
        if sum(shard.numel for shard in shards) < prod(shape):
            size = parameter_shard_size(shape, len(shards))
            file = next(file for file, tensors in zip(states.layout.model, shards, strict=True) if tensors.numel < size)
            raise CheckpointError(f"{file} lacks elements of its shard of {name!r}. Get a complete copy of it.")
        pieces, left = list[Piece](), prod(shape)
        for shard in shards:  # the last ones have padding
            if count := min(shard.numel, left):
                pieces.append(Piece(shard.storage, shard.offset, count))
            left -= count
        sources[name] = TensorSource(shards[0].dtype, tuple(shape), tuple(pieces))
    return sources


def _infer_trained(
    candidates: Sequence[str], module: Mapping[str, StoredTensor], model: Mapping[str, Any], trainable: Sequence[str]
) -> list[str]:
    """The trained parameters of a full stage 0 checkpoint, from the shapes of the moments in the optimizer's state.

    If all parameters of a shape were trained, or none, the shape is enough to tell.
    """
    optimizer = model.get("optimizer")
    state = optimizer.get("state", optimizer) if isinstance(optimizer, dict) else {}
    trained = Counter(_shape_text(tensor) for path, tensor in iter_tensors(state) if path[-1:] == ("exp_avg",))
    if trainable:
        chosen = [name for name in candidates if _matches(name, trainable)]
        left = trained - Counter(_shape_text(module[name]) for name in chosen)
        if left:
            raise CheckpointError(
                f"The optimizer has trained {left.total()} parameters that the patterns do not match, of shape"
                f" {named(left)}. Pass patterns that match all trained parameters."
            )
        return chosen
    there = Counter(_shape_text(module[name]) for name in candidates)
    unclear = [
        name for name in candidates if trained[_shape_text(module[name])] not in (0, there[_shape_text(module[name])])
    ]
    if unclear or not trained:
        raise CheckpointError(
            "A full checkpoint of ZeRO stage 0 does not list its trained parameters, and the optimizer's state cannot"
            f" tell which were trained ({named(unclear or list(candidates), 3)}). Pass --trainable, such as"
            " --trainable '*lora_*'."
        )
    return [name for name in candidates if trained[_shape_text(module[name])]]


def _shape_text(tensor: StoredTensor) -> str:
    return str(list(tensor.shape))


SAMPLE = 64
"""How many elements of each rank's shard of a master `check_masters_match` compares."""


def check_masters_match(masters: Mapping[str, TensorSource], halves: Mapping[str, TensorSource]) -> None:
    """Raise CheckpointError if the masters are not those of the model's weights: a file is from another run.

    The first elements of each rank's shard are compared; most of them must agree, except for rounding. ZeRO-3 does not
    save the weights that this needs.

    Args:
        masters: the trained weights from the optimizer.
        halves: the weights that the model computed with.
    """
    different: dict[str, set[str]] = {}
    with Records(check=False) as records:
        for name, half in halves.items():
            begin, (place,) = 0, half.pieces
            for piece in masters[name].pieces:
                count = min(piece.count, SAMPLE)
                samples = (
                    (masters[name].dtype, Piece(piece.storage, piece.begin, count)),
                    (half.dtype, Piece(place.storage, place.begin + begin, count)),
                )
                master, weight = (
                    _unpack_numbers(records.read(TensorSource(dtype, (count,), (sample,))), dtype)
                    for dtype, sample in samples
                )
                agree = sum(abs(m - w) <= 0.01 * abs(m) + 1e-6 for m, w in zip(master, weight, strict=True))
                if 2 * agree < count:
                    files = (piece.storage.path.name, place.storage.path.name)
                    different.setdefault(name, set()).update(files)
                begin += piece.count
    if different:
        raise CheckpointError(
            f"{' and '.join(sorted(set().union(*different.values())))} are not from one run: the optimizer's masters"
            f" differ from the model's weights: {named(list(different), 3)}. Take all files from one checkpoint."
        )


def _unpack_numbers(content: bytes | memoryview, dtype: str) -> Sequence[float]:
    if dtype == "bfloat16":  # the upper half of an fp32
        content = b"".join(b"\0\0" + bytes(content[i : i + 2]) for i in range(0, len(content), 2))
    code, width = {"float16": ("e", 2), "float64": ("d", 8)}.get(dtype, ("f", 4))
    return struct.unpack(f"<{len(content) // width}{code}", content)

"""The optimizer's state of a checkpoint as named tensors, whatever ZeRO stage, world size and optimizer saved it.

`read` returns the parameter groups: of each trained parameter the fp32 master and the moments, as ranges of the files.
Every stage keeps them in flat tensors, see `_Flat`; `shards` is the inverse.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...cures import ignores_round_robin
from ...parameters import plain
from ..dtypes import FLOATING
from ..format.records import Piece, TensorSource, from_stored
from ..format.stored import StoredTensor, iter_tensors
from .partitions import Range, Shapes, group_shard_size, numel, ranges, sub_group_shard_size, undo_round_robin
from .states import FLAT_MASTERS, States, groups_in_memory, masters_key, parameter_groups, zero_setting

BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""The key of the wrapped optimizer's state in that of ZeRO's optimizer, by stage."""
MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""The key of the masters there."""
MASTERS_ALONE = (
    "The masters alone can be resharded, for a fresh optimizer: patch(restart_optimizer=True), or reshard"
    " --restart-optimizer."
)
"""What to do about an optimizer's state that cannot be resharded."""
BLOCK = 256
"""How many elements an 8-bit optimizer of bitsandbytes has one scale for, as in its releases 0.46 and 0.50."""
_NEST = "__bnb_optimizer_quant_state__"
"""The key of the dict in which 0.50 saves what belongs to a parameter's 8 bits; here its keys follow this and a dot."""
_SCALES, _MAPS = (
    {f"{prefix}{name}{number}" for prefix in ("", f"{_NEST}.") for number in (1, 2)} for name in ("absmax", "qmap")
)
"""The keys of these scales, and of the tables of the 256 values that they scale."""


class SharedBlockError(Exception):
    """A parameter or a shard, of the checkpoint or of the target, begins within a block that has one scale."""


@dataclass(frozen=True)
class Values:
    """The elements of a tensor, flattened: where they are, and a tensor whose dtype and kind they have.

    `per` is the number of elements of the parameter for each: 1, or that of a block that has one scale.
    """

    pieces: tuple[Piece, ...]
    like: StoredTensor
    per: int = 1

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate((piece.count for piece in self.pieces), initial=0))

    def part(self, begin: int, count: int) -> Iterator[Piece]:
        """The pieces for `count` elements of the parameter from `begin` on, which is where a block begins."""
        begin, count = begin // self.per, blocks_in(count, self.per)
        index = bisect_right(self._begins, begin) - 1
        while count > 0:
            piece, skipped = self.pieces[index], begin - self._begins[index]
            taken = min(count, piece.count - skipped)
            yield Piece(piece.storage, piece.begin + skipped, taken)
            begin, count, index = begin + taken, count - taken, index + 1


@dataclass(frozen=True)
class Trained:
    """A trained parameter: its shape, its value in full precision, and the optimizer's state of it by key.

    The state has `Values` with one element for each of the parameter's, and single values, such as a step counter.
    """

    shape: tuple[int, ...]
    master: Values
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer: its settings, and its parameters by name in the order of the optimizer."""

    settings: Mapping[str, Any]
    parameters: Mapping[str, Trained]

    @property
    def shapes(self) -> Shapes:
        """The shapes of its parameters."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}


@dataclass(frozen=True)
class _Flat:
    """A flat tensor of parameters, and the optimizer's state of it: the shards that the ranks have.

    Stage 0 has one "shard" for each parameter, or with FusedAdam for each group. In ZeRO 1 and 2 a flat tensor is a
    group, cut into one shard for each rank. In ZeRO-3 it is a sub-group, and each rank has a part of every parameter.

    Attributes:
        stage: of ZeRO.
        shapes: of the parameters, in the order of the optimizer.
        in_memory: the same in the order of the flat tensor, with the gaps there.
        shape: of a shard.
        masters, states: of each rank.
    """

    stage: int
    shapes: Shapes
    in_memory: Shapes
    shape: tuple[int, ...]
    masters: Sequence[Any]
    states: Sequence[Mapping[str, Any]] = ()

    def read(self, states: States) -> dict[str, Trained]:
        """The parameters by name."""
        if not self.shapes:
            return {}
        masters = self.values([contiguous(states, master, next(iter(self.shapes))) for master in self.masters])
        values: dict[str, Any] = {}
        for key, value in self.states[0].items():
            per = BLOCK if key in _SCALES else 1
            shape = self.shape if per == 1 else (blocks_in(prod(self.shape), per),)
            if isinstance(value, StoredTensor) and value.shape == shape and key not in (*_MAPS, "step"):
                shards = [_require_shard(states, state.get(key), shape, key) for state in self.states]
                values[key] = self.values(shards, per)
            elif max((tensor.numel for _, tensor in iter_tensors(value)), default=0) > 1 and key not in _MAPS:
                raise CheckpointError(
                    f"{states.layout.root} cannot be resharded: how {key!r} in the optimizer's state corresponds to the"
                    f" {prod(self.shape)} weights is unknown. {MASTERS_ALONE}"
                )
        return {
            name: Trained(
                shape,
                masters[name],
                {key: values[key][name] if key in values else value for key, value in self.states[0].items()},
            )
            for name, shape in self.shapes.items()
        }

    def values(self, shards: Sequence[StoredTensor], per: int = 1) -> dict[str, Values]:
        """The elements of each parameter in these shards; raises SharedBlockError."""
        pieces: dict[str, list[Piece]] = {name: [] for name in self.in_memory}
        for shard, own in zip(shards, self._ranges, strict=True):
            for part in own:
                if part.offset % per or part.begin % per:
                    raise SharedBlockError
                if part.count:
                    begin, count = shard.offset + part.offset // per, blocks_in(part.count, per)
                    pieces[part.name].append(Piece(shard.storage, begin, count))
        return {name: Values(tuple(pieces[name]), shards[0], per) for name in self.shapes}

    @cached_property
    def _ranges(self) -> list[list[Range]]:
        ranks = len(self.masters)
        return [list(ranges(self.in_memory, self.stage, ranks, rank)) for rank in range(ranks)]


def read(states: States, with_state: bool = True) -> list[Group]:
    """The parameter groups of a checkpoint's optimizer.

    Args:
        states: of the checkpoint.
        with_state: False for the masters alone.

    Raises:
        CheckpointError: they are inconsistent, or the optimizer's state is not one value for each element.
    """
    flats = list(_flats(states, parameter_groups(states.models[0])))
    saved = states.optimizers or [states.models[0]["optimizer"]]
    key = BASE_STATE[states.zero_stage if states.optimizers else 3]
    bases = [own[key] if states.optimizers or masters_key(own) else own for own in saved]
    if sorted(index for group in bases[0]["param_groups"] for index in group["params"]) != list(range(len(flats))):
        raise ValueError("the groups of the optimizer are not those of the parameters")
    groups = []
    for settings in bases[0]["param_groups"]:
        parameters: dict[str, Trained] = {}
        for index in settings["params"]:
            kept = [_unnested(base["state"].get(index, {})) if with_state else {} for base in bases]
            parameters |= replace(flats[index], states=kept).read(states)
        groups.append(Group(settings, parameters))
    if with_state and any(group.settings.get("use_muon") for group in groups):
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: with Muon, each rank keeps the momentum of whole parameters."
            f" {MASTERS_ALONE}"
        )
    return groups


def _flats(states: States, groups: Sequence[Shapes]) -> Iterator[_Flat]:
    """The flat tensors in the order of the optimizer that is wrapped, with their masters, and without its state."""
    return _flats_in_zero(states, groups) if states.optimizers else _flats_in_stage_0(states, groups)


def _flats_in_stage_0(states: States, groups: Sequence[Shapes]) -> Iterator[_Flat]:
    (model,) = states.models
    optimizer = model["optimizer"]
    if (key := masters_key(optimizer)) == FLAT_MASTERS:
        for shapes, flat in zip(groups, optimizer[key], strict=True):
            size = (numel(shapes),)
            yield _Flat(0, shapes, shapes, size, [_require_shard(states, flat, size, key)])
        return
    weights = {plain(n): item for n, item in {**(model.get("frozen_param_fragments") or {}), **model["module"]}.items()}
    of_groups = optimizer[key] if key else [[weights.get(plain(name)) for name in shapes] for shapes in groups]
    for shapes, masters in zip(groups, of_groups, strict=True):
        for (name, shape), master in zip(shapes.items(), masters, strict=True):
            # An optimizer over all parameters has the frozen ones too.
            own = {name: shape} if plain(name) not in states.record.names else {}
            yield _Flat(0, own, own, shape, [master])


def _flats_in_zero(states: States, groups: Sequence[Shapes]) -> Iterator[_Flat]:
    """Raises CheckpointError if a rank lacks some of the masters."""
    stage, ranks = states.zero_stage, len(states.optimizers)
    masters = [list(optimizer.get(MASTERS[stage]) or ()) for optimizer in states.optimizers]
    if not all(masters) or not all(isinstance(m, StoredTensor) and m.dtype in FLOATING for own in masters for m in own):
        raise CheckpointError(
            f"{states.layout.root} has no fp32 master weights among its optimizer states; they may be on NVMe."
        )
    for index, (shapes, group) in enumerate(zip(groups, groups_in_memory(states, groups), strict=True)):
        size = sub_group_shard_size(group, ranks) if stage == 3 else group_shard_size(group, ranks)
        files = list(zip(states.layout.optimizer, masters, strict=True))
        if short := next((file for file, own in files if len(own) <= index), None):
            raise CheckpointError(f"{short} lacks the masters of parameter group {index}. Get a complete copy of it.")
        for rank, (file, own) in enumerate(files):
            # In ZeRO 1 and 2, DeepSpeed does not save the padding at the end.
            least = size if stage == 3 else min(max(numel(group) - rank * size, 0), size)
            if not least <= contiguous(states, own[index], MASTERS[stage]).numel <= size:
                raise CheckpointError(
                    f"{file} does not fit the model's states: the masters have {own[index].numel} elements instead of"
                    f" {least}. It is from another run, or they are on NVMe; take all files from one checkpoint."
                )
        ordered = undo_round_robin(shapes, ranks) if uses_round_robin(states) else shapes
        yield _Flat(stage, ordered, group, (size,), [own[index] for own in masters])


def locate_masters(states: States, groups: Sequence[Shapes]) -> dict[str, TensorSource]:
    """The fp32 masters by name, in the order of these groups; none if the optimizer has none of its own.

    Raises:
        CheckpointError: a file has no masters, or too few or too many elements of them.
    """
    if not groups or not (states.optimizers or masters_key(states.models[0].get("optimizer"))):
        return {}
    masters: dict[str, TensorSource] = {}
    try:
        for flat in _flats(states, groups):
            values, first = flat.values(flat.masters), flat.masters[0]
            for name, shape in flat.shapes.items():
                if states.optimizers or flat.shape != tuple(shape):
                    masters[name] = TensorSource(first.dtype, tuple(shape), values[name].pieces)
                elif first.shape == flat.shape:
                    masters[name] = from_stored(first)  # it need not be contiguous
                else:
                    return {}
    except (AttributeError, LookupError, TypeError, ValueError):
        if states.optimizers:
            raise
        return {}  # in stage 0, they are not those of the parameters
    trained = [name for group in groups for name in group if plain(name) not in states.record.names]
    return {name: masters[name] for name in trained}


def blocks_in(elements: int, per: int) -> int:
    """The number of blocks of `per` elements, the last of which may be shorter."""
    return -(-elements // per)


def _unnested(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without the dict for 8 bits in it."""
    inner = state.get(_NEST)
    if not isinstance(inner, Mapping):
        return dict(state)
    outer = {key: value for key, value in state.items() if key != _NEST}
    return outer | {f"{_NEST}.{key}": value for key, value in inner.items()}


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as the optimizer saves it: the inverse of how this module reads it."""
    inner = {key: value for key, value in state.items() if key.startswith(f"{_NEST}.")}
    outer = {key: value for key, value in state.items() if key not in inner}
    return outer | ({_NEST: {key.removeprefix(f"{_NEST}."): value for key, value in inner.items()}} if inner else {})


def contiguous(states: States, value: Any, what: str) -> StoredTensor:
    """One stored tensor; raises CheckpointError if its elements are not contiguous."""
    if not isinstance(value, StoredTensor) or not value.is_contiguous:
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: {what!r} is not a contiguous tensor, and only ZeRO stage 0 can"
            " save and load such a one."
        )
    return value


def _require_shard(states: States, flat: Any, shape: tuple[int, ...], what: str) -> StoredTensor:
    """A rank's shard; raises CheckpointError if it does not have this shape."""
    if not isinstance(flat, StoredTensor) or flat.numel != prod(shape):
        raise CheckpointError(
            f"{states.layout.root} is inconsistent: a rank's shard of {what!r} does not have {prod(shape)} elements. It"
            " is from another run, or on NVMe; take all files from one checkpoint."
        )
    return contiguous(states, flat, what)


def uses_round_robin(states: States) -> bool:
    """Whether groups have the order of `round_robin_gradients`."""
    saved_with = states.versions.get("deepspeed", "")
    return (
        states.zero_stage in (1, 2)
        and bool(zero_setting(states, "round_robin_gradients"))
        and not ignores_round_robin(saved_with, states.zero_stage)
    )

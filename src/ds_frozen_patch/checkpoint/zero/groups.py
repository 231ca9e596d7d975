"""The optimizer's state of a checkpoint as named tensors, whatever ZeRO stage, world size and optimizer saved it.

`read` returns the parameter groups: of each trained parameter the fp32 master and the moments, as ranges of the files.
Every stage keeps them in flat tensors, see `_Flat`; `shards` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...cures import ignores_round_robin
from ...parameters import plain
from ..dtypes import FLOATING
from ..format.records import Piece, TensorSource, from_stored
from ..format.stored import StoredTensor, iter_tensors
from .partitions import Shapes, group_shard_size, numel, ranges, sub_group_shard_size, undo_round_robin
from .states import FLAT_MASTERS, States, groups_in_memory, masters_key, parameter_groups, zero_setting

BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""The key of the wrapped optimizer's state in that of ZeRO's optimizer, by stage."""
MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""The key of the masters there."""
MASTER = ""
"""The key of the master in a `Group`."""
_MASTERS_ALONE = (
    "The masters alone can be resharded, for a fresh optimizer: patch(restart_optimizer=True), or reshard"
    " --restart-optimizer"
)
_BLOCK = 256
"""How many elements an 8-bit optimizer of bitsandbytes has one scale for, as in its releases 0.46 and 0.50."""
_NEST = "__bnb_optimizer_quant_state__"
"""The key of the dict in which 0.50 saves what belongs to a parameter's 8 bits; here its keys follow this and a dot."""
_SCALES, _MAPS = (
    {f"{prefix}{name}{number}" for prefix in ("", f"{_NEST}.") for number in (1, 2)} for name in ("absmax", "qmap")
)
"""The keys of these scales, and of the tables of the 256 values that they scale."""


class UnsupportedError(ValueError):
    """Why a checkpoint cannot be resharded."""


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer, in its order.

    Attributes:
        settings: of the group.
        parameters: for each parameter its master, under `MASTER`, and the optimizer's state by key: tensors of an
            element for each of the parameter's or for each block, and single values, such as a step counter.
    """

    settings: Mapping[str, Any]
    parameters: Mapping[str, Mapping[str, Any]]

    @property
    def shapes(self) -> Shapes:
        """The shapes of its parameters."""
        return {name: values[MASTER].shape for name, values in self.parameters.items()}


def blocks_in(elements: int, key: str) -> int:
    """How many elements the optimizer has under a key for so many of a parameter; raises UnsupportedError."""
    return -(-elements // _BLOCK) if key in _SCALES else elements


def check_blocks(begins: Iterator[int], key: str) -> None:
    """Raise UnsupportedError if the parts of a shard that begin there do not begin where blocks do."""
    if key in _SCALES and any(begin % _BLOCK for begin in begins):
        raise UnsupportedError(
            f"its 8-bit optimizer has a scale for each {_BLOCK} elements, and a parameter or a shard, then or now, does"
            f" not begin at a multiple of them. {_MASTERS_ALONE}"
        )


@dataclass(frozen=True)
class _Flat:
    """A flat tensor of parameters: the shards that the ranks have.

    Stage 0 has one "shard" for each parameter, or with FusedAdam for each group. In ZeRO 1 and 2 a flat tensor is a
    group, cut into one shard for each rank. In ZeRO-3 it is a sub-group, and each rank has a part of every parameter.

    Attributes:
        stage: of ZeRO.
        shapes: of the parameters, in the order of the optimizer.
        in_memory: the same in the order of the flat tensor, with the gaps there.
        shape: of a shard.
        masters: of each rank.
    """

    stage: int
    shapes: Shapes
    in_memory: Shapes
    shape: tuple[int, ...]
    masters: Sequence[Any]

    def read(self, states: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The parameters of a `Group`, given the optimizer's state of each rank."""
        if not self.shapes:
            return {}
        found: dict[str, dict[str, Any]] = {name: {MASTER: value} for name, value in self.tensors(self.masters).items()}
        for key, value in states[0].items():
            size = blocks_in(prod(self.shape), key)
            tensors: Mapping[str, Any] = dict.fromkeys(self.shapes, value)
            is_single = key in (*_MAPS, "step")
            if isinstance(value, StoredTensor) and value.shape in (self.shape, (size,)) and not is_single:
                tensors = self.tensors([state[key] for state in states], key)
            elif max((tensor.numel for _, tensor in iter_tensors(value)), default=0) > 1 and not is_single:
                raise UnsupportedError(
                    f"how {key!r} in the optimizer's state corresponds to the {prod(self.shape)} weights is unknown."
                    f" {_MASTERS_ALONE}"
                )
            for name in self.shapes:
                found[name][key] = tensors[name]
        return found

    def tensors(self, shards: Sequence[StoredTensor], key: str = MASTER) -> dict[str, TensorSource]:
        """The elements of each parameter in these shards, of what the optimizer has under a key."""
        first, size = shards[0], blocks_in(prod(self.shape), key)
        if not self.stage and [first.shape] == [*self.shapes.values()]:
            return dict.fromkeys(self.shapes, from_stored(first))  # which need not be contiguous
        # In ZeRO 1 and 2, DeepSpeed does not save the padding at the end of the masters.
        is_exact = key != MASTER or not self.stage
        if any(not shard.is_contiguous or (is_exact and shard.shape != (size,)) for shard in shards):
            raise UnsupportedError(
                f"a rank's shard of {key or 'the masters'!r} does not have {size} consecutive elements. It is from"
                " another run, or on NVMe; take all files from one checkpoint"
            )
        pieces: dict[str, list[Piece]] = {name: [] for name in self.in_memory}
        for rank, shard in enumerate(shards):
            parts = list(ranges(self.in_memory, self.stage, len(shards), rank))
            check_blocks((at for part in parts for at in (part.offset, part.begin)), key)
            for part in parts:
                begin, count = shard.offset + blocks_in(part.offset, key), blocks_in(part.count, key)
                pieces[part.name] += [Piece(shard.storage, begin, count)] if count else []
        return {name: TensorSource(first.dtype, shape, tuple(pieces[name])) for name, shape in self.shapes.items()}


def read(states: States, with_state: bool = True) -> list[Group]:
    """The parameter groups of a checkpoint's optimizer.

    Args:
        states: of the checkpoint.
        with_state: False for the masters alone.

    Raises:
        UnsupportedError: the optimizer's state is not one value for each element.
        CheckpointError: the masters are inconsistent.
    """
    flats = list(_flats(states, parameter_groups(states.models[0])))
    saved = states.optimizers or [states.models[0]["optimizer"]]
    key = BASE_STATE[states.zero_stage if states.optimizers else 3]
    bases = [own[key] if states.optimizers or masters_key(own) else own for own in saved]
    if sorted(index for group in bases[0]["param_groups"] for index in group["params"]) != list(range(len(flats))):
        raise UnsupportedError("the groups of the optimizer are not those of the parameters")
    if with_state and any(settings.get("use_muon") for settings in bases[0]["param_groups"]):
        raise UnsupportedError(f"with Muon, each rank keeps the momentum of whole parameters. {_MASTERS_ALONE}")
    groups = []
    for settings in bases[0]["param_groups"]:
        parameters: dict[str, Any] = {}
        for index in settings["params"]:
            parameters |= flats[index].read(
                [_unnested(base["state"].get(index, {})) if with_state else {} for base in bases]
            )
        groups.append(Group(settings, parameters))
    return groups


def _flats(states: States, groups: Sequence[Shapes]) -> Iterator[_Flat]:
    """The flat tensors in the order of the optimizer that is wrapped; raises CheckpointError if masters lack."""
    if states.optimizers:
        yield from _flats_in_zero(states, groups)
        return
    model = states.models[0]
    optimizer = model["optimizer"]
    key = masters_key(optimizer)
    weights = {plain(n): item for n, item in {**(model.get("frozen_param_fragments") or {}), **model["module"]}.items()}
    of_groups = optimizer[key] if key else [[weights.get(plain(name)) for name in shapes] for shapes in groups]
    for shapes, masters in zip(groups, of_groups, strict=True):
        if key == FLAT_MASTERS:
            yield _Flat(0, shapes, shapes, (numel(shapes),), [masters])
            continue
        for (name, shape), master in zip(shapes.items(), masters, strict=True):
            # An optimizer over all parameters has the frozen ones too.
            own = {name: tuple(shape)} if plain(name) not in states.record.names else {}
            yield _Flat(0, own, own, tuple(shape), [master])


def _flats_in_zero(states: States, groups: Sequence[Shapes]) -> Iterator[_Flat]:
    stage, ranks = states.zero_stage, len(states.optimizers)
    masters = [list(optimizer.get(MASTERS[stage]) or ()) for optimizer in states.optimizers]
    if not all(masters) or not all(isinstance(m, StoredTensor) and m.dtype in FLOATING for own in masters for m in own):
        raise CheckpointError(
            f"{states.layout.root} has no fp32 master weights among its optimizer states; they may be on NVMe."
        )
    for index, (shapes, group) in enumerate(zip(groups, groups_in_memory(states, groups), strict=True)):
        size = sub_group_shard_size(group, ranks) if stage == 3 else group_shard_size(group, ranks)
        for rank, (file, own) in enumerate(zip(states.layout.optimizer, masters, strict=True)):
            least = size if stage == 3 else min(max(numel(group) - rank * size, 0), size)
            count = own[index].numel if index < len(own) else 0
            if index >= len(own) or not least <= count <= size or not own[index].is_contiguous:
                raise CheckpointError(
                    f"{file} does not fit the model's states: the masters have {count} elements"
                    f" instead of {least}. It is from another run, or they are on NVMe; take all files from one"
                    " checkpoint."
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
            masters |= flat.tensors(flat.masters) if flat.shapes else {}
    except (AttributeError, LookupError, TypeError, ValueError):
        if states.optimizers:
            raise
        return {}  # in stage 0, they are not those of the parameters
    trained = [name for group in groups for name in group if plain(name) not in states.record.names]
    return {name: masters[name] for name in trained}


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


def uses_round_robin(states: States) -> bool:
    """Whether groups have the order of `round_robin_gradients`."""
    saved_with = states.versions.get("deepspeed", "")
    return (
        states.zero_stage in (1, 2)
        and bool(zero_setting(states, "round_robin_gradients"))
        and not ignores_round_robin(saved_with, states.zero_stage)
    )

"""The trained parameters of a checkpoint, each with its master and the optimizer's state, from any ZeRO stage.

Only places are read, not values. Stage 0 has a state for each parameter; in ZeRO 1 and 2 that of a parameter group is
one flat tensor, and in ZeRO-3 that of a sub-group is the shards of its parameters (see `partitions`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...parameters import plain
from ...workarounds.old_deepspeed import ignores_round_robin
from ..format.records import Piece, pieces_of_range
from ..format.stored import StoredTensor, iter_tensors
from .masters import without_padding
from .partitions import (
    Shapes,
    group_shard_size,
    numel,
    parameter_offsets,
    parameter_shard_size,
    sub_group_shard_size,
    undo_round_robin,
)
from .states import FLAT_MASTERS, States, groups_in_memory, masters_key, parameter_groups, zero_setting

BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""The key of the wrapped optimizer's state in that of ZeRO's optimizer, by stage."""
MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
"""The key of the masters there."""


Flats = Sequence[StoredTensor]
"""The flat tensors of all ranks."""


BLOCK = 256
"""How many elements an 8-bit optimizer of bitsandbytes has one scale for, as in its releases 0.46 and 0.50."""
_NEST = "__bnb_optimizer_quant_state__"
"""The key of the dict in which 0.50 saves what belongs to a parameter's 8 bits; here its keys follow this and a dot."""
_SCALES, _MAPS = (
    {f"{prefix}{name}{number}" for prefix in ("", f"{_NEST}.") for number in (1, 2)} for name in ("absmax", "qmap")
)
"""The keys of these scales, and of the tables of the 256 values that they scale."""


def blocks_in(elements: int, per: int) -> int:
    """The number of blocks of `per` elements, the last of which may be shorter."""
    return -(-elements // per)


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
    """One trained parameter.

    Attributes:
        shape: of the parameter.
        master: its value in full precision.
        state: the optimizer's, by key: `Values` with one element for each of the parameter's, and single values, such
            as a step counter.
    """

    shape: tuple[int, ...]
    master: Values
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer: its settings, and its parameters by name in the order of the optimizer."""

    settings: Mapping[str, Any]
    parameters: Mapping[str, Trained]

    @property
    def shapes(self) -> Shapes:
        """The shapes of its parameters."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}


def by_plain_name(groups: Iterable[Group]) -> dict[str, Trained]:
    """Return the parameters of all groups."""
    return {plain(name): parameter for group in groups for name, parameter in group.parameters.items()}


def locate_trained(states: States, with_state: bool = True) -> list[Group]:
    """Find the masters and the optimizer's state of each trained parameter.

    Args:
        states: of the checkpoint.
        with_state: False for the masters alone.

    Raises:
        CheckpointError: they are inconsistent, or the optimizer's state is not one value for each element.
    """
    if not states.optimizers:
        groups = _in_stage_0(states, with_state)
    else:
        groups = _in_sub_groups(states, with_state) if states.zero_stage == 3 else _in_groups(states, with_state)
    if with_state and any(group.settings.get("use_muon") for group in groups):
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: with Muon, each rank keeps the momentum of whole parameters."
            f" {MASTERS_ALONE}"
        )
    return groups


MASTERS_ALONE = (
    "The masters alone can be resharded, for a fresh optimizer: patch(restart_optimizer=True), or reshard"
    " --restart-optimizer."
)
"""What to do about an optimizer's state that cannot be resharded."""


def _in_stage_0(states: States, with_state: bool) -> list[Group]:
    (model,) = states.models
    fragments = model.get("frozen_param_fragments")
    whole_ones = {**(fragments if isinstance(fragments, dict) else {}), **model["module"]}
    weights = {plain(name): value for name, value in whole_ones.items()}
    in_masters = masters_key(model["optimizer"])
    optimizer = model["optimizer"][BASE_STATE[3]] if in_masters else model["optimizer"]
    kept = optimizer["state"] if with_state else {}
    groups = []
    for number, (settings, shapes) in enumerate(zip(optimizer["param_groups"], parameter_groups(model), strict=True)):
        if in_masters == FLAT_MASTERS:
            flat = model["optimizer"][in_masters][number]
            groups.append(Group(settings, _in_flat_group(states, shapes, flat, kept.get(settings["params"][0], {}))))
            continue
        masters = model["optimizer"][in_masters][number] if in_masters else [weights[plain(name)] for name in shapes]
        parameters = {}
        for index, master, (name, shape) in zip(settings["params"], masters, shapes.items(), strict=True):
            state = {
                key: _per_element(states, value, shape, key) for key, value in _unnested(kept.get(index, {})).items()
            }
            parameters[name] = Trained(shape, whole(states, master, name), state)
        groups.append(Group(settings, parameters))
    return groups


def _in_flat_group(states: States, shapes: Shapes, flat: Any, kept: Mapping[str, Any]) -> dict[str, Trained]:
    """The parameters of a group whose master is one flat tensor, without padding."""
    size = numel(shapes)
    master = whole(states, require_shard(states, flat, size, FLAT_MASTERS), FLAT_MASTERS)
    state = {key: _per_element(states, value, (size,), key) for key, value in _unnested(kept).items()}
    parameters = {}
    for name, begin in parameter_offsets(shapes).items():

        def cut(values: Any, begin: int = begin, count: int = prod(shapes[name])) -> Any:
            return replace(values, pieces=tuple(values.part(begin, count))) if isinstance(values, Values) else values

        parameters[name] = Trained(shapes[name], cut(master), {key: cut(value) for key, value in state.items()})
    return parameters


def _per_element(states: States, value: Any, shape: tuple[int, ...], key: str) -> Any:
    if key in _SCALES and isinstance(value, StoredTensor) and value.shape == (blocks_in(prod(shape), BLOCK),):
        return replace(whole(states, value, key), per=BLOCK)
    if isinstance(value, StoredTensor) and value.shape == shape and key != "step":
        return whole(states, value, key)
    return _for_all_elements(states, value, prod(shape), key)


def _for_all_elements(states: States, value: Any, size: int, key: str) -> Any:
    """A value that stands for all elements, such as a step counter; raises CheckpointError for what holds more."""
    largest = max((tensor.numel for _, tensor in iter_tensors(value)), default=0)
    if largest > 1 and key not in _MAPS:
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: {key!r} in the optimizer's state has {largest} elements for"
            f" {size} of the weights; how they correspond is unknown. {MASTERS_ALONE}"
        )
    return value


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


def whole(states: States, value: Any, what: str) -> Values:
    """The elements of one stored tensor; raises CheckpointError if they are not contiguous."""
    if not isinstance(value, StoredTensor) or not value.is_contiguous:
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: {what!r} is not a contiguous tensor, and only ZeRO stage 0 can"
            " save and load such a one."
        )
    return Values((Piece(value.storage, value.offset, value.numel),), value)


def _in_groups(states: States, with_state: bool) -> list[Group]:
    """In ZeRO 1 and 2."""
    shards = _Shards(states, group_shard_size, with_state)
    groups = []
    for index, (settings, group) in enumerate(zip(shards.settings, shards.groups, strict=True)):
        begins = parameter_offsets(shards.in_memory[index])
        parameters = {}
        for name, shape in shards.in_order(group).items():
            parameters[name] = shards.trained(index, shape, begins[name], prod(shape), pieces_of_range)
        groups.append(Group(settings, parameters))
    return groups


def _in_sub_groups(states: States, with_state: bool) -> list[Group]:
    """In ZeRO-3."""
    shards = _Shards(states, sub_group_shard_size, with_state)
    groups = []
    for settings in shards.settings:
        parameters = {}
        for index in settings["params"]:
            group = shards.groups[index]
            for name, begin in parameter_offsets(group, shards.ranks).items():
                size = parameter_shard_size(group[name], shards.ranks)
                parameters[name] = shards.trained(index, group[name], begin, size, _pieces_of_each)
        groups.append(Group(settings, parameters))
    return groups


def _pieces_of_each(flats: Flats, begin: int, count: int) -> list[Piece]:
    """The pieces of `count` elements of each flat tensor from `begin` on."""
    return [piece for flat in flats for piece in pieces_of_range([flat], begin, count)]


class _Shards:
    """The ranks' shards of masters and optimizer state for each group, or in ZeRO-3 for each sub-group.

    Args:
        states: the states of the checkpoint.
        size: the number of elements in a rank's shard of a group.
        with_state: whether to locate more than the masters.
    """

    def __init__(self, states: States, size: Callable[[Shapes, int], int], with_state: bool) -> None:
        stage = states.zero_stage
        self.checkpoint, self.ranks = states, len(states.optimizers)
        self.groups = parameter_groups(states.models[0])
        self.in_memory = groups_in_memory(states, self.groups)
        self.sizes = [size(group, self.ranks) for group in self.in_memory]
        self.bases = [optimizer[BASE_STATE[stage]]["state"] for optimizer in states.optimizers]
        self.settings = states.optimizers[0][BASE_STATE[stage]]["param_groups"]
        if sorted(index for group in self.settings for index in group["params"]) != list(range(len(self.groups))):
            raise ValueError("the groups of the optimizer are not those of the parameters")
        masters = [list(optimizer.get(MASTERS[stage]) or []) for optimizer in states.optimizers]
        if any(
            len(flats) != len(self.groups) or not all(isinstance(flat, StoredTensor) for flat in flats)
            for flats in masters
        ):
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded: it lacks master weights; they may be on NVMe."
            )
        self.masters = list(zip(*masters, strict=True))
        self.states = [self._states(index) if with_state else {} for index in range(len(self.groups))]

    def in_order(self, group: Shapes) -> Shapes:
        """A group in the order of the optimizer."""
        return undo_round_robin(group, self.ranks) if uses_round_robin(self.checkpoint) else group

    def trained(
        self,
        index: int,
        shape: tuple[int, ...],
        begin: int,
        size: int,
        cut: Callable[[Flats, int, int], Sequence[Piece]],
    ) -> Trained:
        """A parameter of a group: the pieces that `cut` returns of the ranks' shards, `size` elements from `begin`."""

        def values(flats: Flats, per: int = 1) -> Values:
            pieces = cut(flats, begin // per, blocks_in(size, per))
            return Values(without_padding(pieces, blocks_in(prod(shape), per)), flats[0], per)

        state = {
            key: values(value, BLOCK if key in _SCALES else 1) if isinstance(value, tuple) else value
            for key, value in self.states[index].items()
        }
        return Trained(shape, values(self.masters[index]), state)

    def _states(self, index: int) -> dict[str, Any]:
        """A group's state: the shards of all ranks for what has a value for each element, else that of rank 0."""
        found: dict[str, Any] = {}
        states = [_unnested(base.get(index, {})) for base in self.bases]
        for key, value in states[0].items():
            size = self._scales(index) if key in _SCALES else self.sizes[index]
            if isinstance(value, StoredTensor) and value.shape == (size,) and key not in _MAPS:
                found[key] = tuple(require_shard(self.checkpoint, state.get(key), size, key) for state in states)
            else:
                found[key] = _for_all_elements(self.checkpoint, value, self.sizes[index], key)
        return found

    def _scales(self, index: int) -> int:
        """The number of scales in a rank's shard of a group; raises SharedBlockError if parameters share one."""
        stage, group = self.checkpoint.zero_stage, self.in_memory[index]
        begins = [*parameter_offsets(group, self.ranks if stage == 3 else 0).values()]
        if any(begin % BLOCK for begin in begins) or (self.ranks > 1 and self.sizes[index] % BLOCK):
            raise SharedBlockError
        return blocks_in(self.sizes[index], BLOCK)


def require_shard(states: States, flat: Any, size: int, what: str) -> StoredTensor:
    """A rank's shard; raises CheckpointError if it does not have `size` elements."""
    if not isinstance(flat, StoredTensor) or flat.numel != size or not flat.is_contiguous:
        raise CheckpointError(
            f"{states.layout.root} is inconsistent: a rank's shard of {what!r} does not have {size} elements. It is"
            " from another run, or on NVMe; take all files from one checkpoint."
        )
    return flat


def uses_round_robin(states: States) -> bool:
    """Whether groups have the order of `round_robin_gradients`."""
    saved_with = states.versions.get("deepspeed", "")
    return (
        states.zero_stage in (1, 2)
        and bool(zero_setting(states, "round_robin_gradients"))
        and not ignores_round_robin(saved_with, states.zero_stage)
    )

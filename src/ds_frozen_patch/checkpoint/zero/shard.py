"""Shard trained parameters as the optimizer of a ZeRO stage saves them: the inverse of `trained`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from ..format.records import Piece
from ..format.stored import StoredTensor, stand_in
from .new_tensors import NewTensors
from .partitions import (
    Shapes,
    group_shard_size,
    parameter_shard_size,
    parameter_slices,
    round_robin_order,
    split_into_sub_groups,
)
from .states import FLAT_MASTERS, as_integer, masters_key
from .trained import BASE_STATE, MASTERS, Group, SharedBlockError, Trained, Values, blocks_in, nested


@dataclass(frozen=True)
class Slice:
    """`count` elements of a parameter from `begin` on, then `padding` zeros."""

    of: Trained
    begin: int
    count: int
    padding: int = 0

    def pieces(self, values: Values | None, per: int = 1) -> Iterator[Piece | int]:
        """Those of the master or of the optimizer's state; zeros where the optimizer has none yet.

        Each value is for `per` elements, at whose multiples the slice begins.
        """
        count = blocks_in(self.count, per)
        if values is None:
            yield count
        else:
            yield from values.part(self.begin, self.count)
        if self.padding:
            yield blocks_in(self.count + self.padding, per) - count


@dataclass(frozen=True)
class Sharded:
    """The optimizer's states of all ranks, and what the model's file says of its parameters."""

    groups: list[Shapes]
    optimizers: list[dict[str, Any]]


def in_stage_0(groups: Sequence[Group], like: Mapping[str, Any], tensors: NewTensors) -> dict[str, Any]:
    """The state of the optimizer in stage 0, which is not sharded.

    Args:
        groups: of the optimizer.
        like: in 16 bits, the state of the optimizer that has the masters, see `Target.optimizer`.
        tensors: the new ones.
    """
    in_masters = masters_key(like)
    if not in_masters:
        return _for_each_parameter(groups, tensors)
    if in_masters == FLAT_MASTERS:
        cuts = [
            [Slice(parameter, 0, prod(parameter.shape)) for parameter in group.parameters.values()] for group in groups
        ]
        states = [_state(group, cut, 0, tensors) for group, cut in zip(groups, cuts, strict=True)]
        base = {
            "state": {index: kept for index, kept in enumerate(states) if kept},
            "param_groups": [{**group.settings, "params": [index]} for index, group in enumerate(groups)],
        }
        masters: list[Any] = [_flat(group, cut, None, 0, tensors) for group, cut in zip(groups, cuts, strict=True)]
    else:
        base = _for_each_parameter(groups, tensors)
        masters = [
            [
                tensors.whole_like(
                    parameter.master.like, parameter.master.part(0, prod(parameter.shape)), parameter.shape
                )
                for parameter in group.parameters.values()
            ]
            for group in groups
        ]
    return {**like, BASE_STATE[3]: base, in_masters: masters}


def _for_each_parameter(groups: Sequence[Group], tensors: NewTensors) -> dict[str, Any]:
    """The state of an optimizer of torch."""
    state: dict[int, Any] = {}
    settings = []
    for group in groups:
        first = len(state)
        kept = keys_of(group.parameters.values())
        for parameter in group.parameters.values():
            # Where each parameter has a step counter of its own, one without state begins with its first gradient.
            is_fresh = not parameter.state and isinstance(kept.get("step"), StoredTensor)
            values = {
                key: tensors.whole_like(value.like, _all(parameter, key, value), _shape(parameter, value))
                if isinstance(value, Values)
                else tensors.copy(parameter.state.get(key, value) if isinstance(value, StoredTensor) else value)
                for key, value in ({} if is_fresh else kept).items()
            }
            state[len(state)] = nested(values)
        settings.append({**group.settings, "params": list(range(first, len(state)))})
    return {"state": {index: item for index, item in state.items() if item}, "param_groups": settings}


def _all(parameter: Trained, key: str, value: Values) -> Iterator[Piece | int]:
    return Slice(parameter, 0, prod(parameter.shape)).pieces(parameter.state.get(key), value.per)


def _shape(parameter: Trained, value: Values) -> tuple[int, ...]:
    return parameter.shape if value.per == 1 else (blocks_in(prod(parameter.shape), value.per),)


def in_groups(
    groups: Sequence[Group], ranks: int, round_robin: bool, like: Mapping[str, Any], tensors: NewTensors
) -> Sharded:
    """In ZeRO 1 and 2: each group is one flat tensor.

    Args:
        groups: of the optimizer.
        ranks: the world size.
        round_robin: whether parameters are ordered by `round_robin_gradients`.
        like: a rank's state, whose other entries are kept.
        tensors: the new ones.
    """
    shapes = [round_robin_order(group.shapes, ranks) if round_robin else group.shapes for group in groups]
    optimizers = []
    for rank in range(ranks):
        masters, states, paddings = [], {}, []
        for index, (group, order) in enumerate(zip(groups, shapes, strict=True)):
            cut = [Slice(group.parameters[n], at, count) for n, at, _, count in parameter_slices(order, ranks, rank)]
            padding = group_shard_size(order, ranks) - sum(item.count for item in cut)
            masters.append(_flat(group, cut, None, 0, tensors))  # masters are saved without padding
            states[index] = _state(group, cut, padding, tensors)
            paddings.append(padding)
        changed = {
            BASE_STATE[2]: {
                **like[BASE_STATE[2]],
                "state": {index: kept for index, kept in states.items() if kept},
                "param_groups": [{**group.settings, "params": [index]} for index, group in enumerate(groups)],
            },
            MASTERS[2]: masters,
            "group_paddings": paddings,
            "partition_count": [ranks] * len(groups),
            "param_slice_mappings": [_fragment_addresses(group.shapes, ranks, rank) for group in groups],
        }
        optimizers.append({**like, **{key: value for key, value in changed.items() if key in like}})
    return Sharded(shapes, optimizers)


def in_sub_groups(
    groups: Sequence[Group], ranks: int, size: float, like: Mapping[str, Any], tensors: NewTensors
) -> Sharded:
    """In ZeRO-3: each parameter is sharded, and the shards of some are a sub-group.

    Args:
        groups: of the optimizer.
        ranks: the world size.
        size: the size of a sub-group.
        like: a rank's state, whose other entries are kept.
        tensors: the new ones.
    """
    shapes: list[Shapes] = []
    homes: list[Group] = []
    settings = []
    for group in groups:
        parts = split_into_sub_groups(group.shapes, ranks, size) if group.parameters else []
        settings.append({**group.settings, "params": list(range(len(shapes), len(shapes) + len(parts)))})
        shapes += parts
        homes += [group] * len(parts)
    optimizers = []
    for rank in range(ranks):
        cuts = [
            [shard_of(group.parameters[name], ranks, rank) for name in part]
            for group, part in zip(homes, shapes, strict=True)
        ]
        states = [_state(group, cut, 0, tensors) for group, cut in zip(homes, cuts, strict=True)]
        optimizers.append(
            {
                **like,
                BASE_STATE[3]: {
                    **like[BASE_STATE[3]],
                    "state": {index: kept for index, kept in enumerate(states) if kept},
                    "param_groups": settings,
                },
                MASTERS[3]: [_flat(group, cut, None, 0, tensors) for group, cut in zip(homes, cuts, strict=True)],
                "partition_count": ranks,
            }
        )
    return Sharded(shapes, optimizers)


def shard_of(parameter: Trained, ranks: int, rank: int) -> Slice:
    """A rank's shard of a parameter in ZeRO-3."""
    size, count = parameter_shard_size(parameter.shape, ranks), prod(parameter.shape)
    first, last = (min(edge * size, count) for edge in (rank, rank + 1))
    return Slice(parameter, first, last - first, size - (last - first))


def keys_of(parameters: Iterable[Trained]) -> Mapping[str, Any]:
    """The optimizer's state of the parameter with most steps: in stage 0, one without gradients has no state.

    There, DeepSpeed's FusedAdam counts the steps of a group's last parameter alone, as numbers.
    """
    states = [parameter.state for parameter in parameters if parameter.state]
    return max(states, key=lambda state: as_integer(state.get("step")) or 0, default={})


def _state(group: Group, cut: Sequence[Slice], padding: int, tensors: NewTensors) -> dict[str, Any]:
    """The state of a flat tensor that consists of slices."""
    kept = keys_of(group.parameters.values())  # not of the slices: the ranks' step counters must be the same
    values = {
        key: _flat(group, cut, key, padding, tensors) if isinstance(value, Values) else tensors.copy(value)
        for key, value in kept.items()
    }
    return nested(values)


def _flat(group: Group, cut: Sequence[Slice], key: str | None, padding: int, tensors: NewTensors) -> Any:
    """A flat tensor of slices of masters, or of what the optimizer's state has under a key."""

    def values(parameter: Trained) -> Values | None:
        return parameter.master if key is None else parameter.state.get(key)

    present = [value for value in map(values, group.parameters.values()) if value is not None]
    like, per = present[0].like, present[0].per
    if any(value.like.dtype != like.dtype for value in present):
        raise TypeError(f"some of {key!r} is in {like.dtype}, and some is not")
    *offsets, size = accumulate((item.count + item.padding for item in cut), initial=0)
    if any(at % per or item.begin % per for at, item in zip(offsets, cut, strict=True)):
        raise SharedBlockError
    pieces = [piece for item in cut for piece in item.pieces(values(item.of), per)]
    more = blocks_in(size + padding, per) - blocks_in(size, per)
    return tensors.flat_like(like, [*pieces, more] if key is not None else pieces)


def _fragment_addresses(group: Shapes, ranks: int, rank: int) -> dict[str, Any]:
    """The places of parameters in a rank's shard of a group; DeepSpeed ignores `round_robin_gradients` in them."""
    address = stand_in("deepspeed.utils.tensor_fragment.fragment_address")
    return OrderedDict((name, address(count, begin)) for name, _, begin, count in parameter_slices(group, ranks, rank))

"""How ZeRO shards an optimizer's state, as in DeepSpeed 0.10.1 to 0.19.8.

ZeRO 1 and 2: each parameter group is one flat tensor, padded with zeros to a multiple of the world size; each rank has
one shard of it. ZeRO-3: each parameter is flattened, padded and sharded; a sub-group is the shards of some parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in their order in memory."""

ALIGNMENT = 2
"""In ZeRO 1 and 2, a shard of a group begins at a multiple of this many elements (`nccl_start_alignment_factor`)."""
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default for `sub_group_size` in ZeRO-3, in elements."""


def group_shard_size(group: Shapes, ranks: int) -> int:
    """The number of elements in each rank's shard of a group in ZeRO 1 and 2, including padding."""
    return -(-numel(group) // (ALIGNMENT * ranks)) * ALIGNMENT


def parameter_shard_size(shape: Sequence[int], ranks: int) -> int:
    """The number of elements in each rank's shard of a parameter in ZeRO-3, including padding."""
    return -(-prod(shape) // ranks)


def sub_group_shard_size(group: Shapes, ranks: int) -> int:
    """The number of elements in each rank's shard of a sub-group in ZeRO-3, including padding."""
    return sum(parameter_shard_size(shape, ranks) for shape in group.values())


def with_gaps(group: Shapes, gaps: Sequence[int]) -> Shapes:
    """A group in ZeRO 1 and 2 as it is in memory: with the gap after each parameter, if any, as an entry of its own."""
    if not any(gaps):
        return group
    items = zip(group.items(), gaps, strict=True)
    return dict(entry for item, gap in items for entry in (item, (f"{item[0]} (gap)", (gap,))))


def numel(group: Shapes) -> int:
    """The number of elements in the parameters of a group."""
    return sum(map(prod, group.values()))


@dataclass(frozen=True)
class Range:
    """A part of a shard: `count` elements of a parameter from `begin` on, then `padding` zeros; at an offset there."""

    name: str
    begin: int
    offset: int
    count: int
    padding: int = 0


def ranges(group: Shapes, stage: int, ranks: int, rank: int) -> Iterator[Range]:
    """What a rank's shard of a group or sub-group consists of; in stage 0 there is one for all ranks."""
    ranks = ranks if stage else 1
    offset, size = 0, group_shard_size(group, ranks)
    for name, shape in group.items():
        if stage == 3:
            own, numel = parameter_shard_size(shape, ranks), prod(shape)
            begin, end = min(rank * own, numel), min((rank + 1) * own, numel)
            yield Range(name, begin, offset, end - begin, own - (end - begin))
            offset += own
        else:
            begin, end = max(rank * size, offset), min((rank + 1) * size, offset + prod(shape))
            if begin < end or not stage:
                yield Range(name, begin - offset, begin - rank * size, end - begin)
            offset += prod(shape)


def round_robin_order(group: Shapes, ranks: int) -> Shapes:
    """A group in the order of `round_robin_gradients`: DeepSpeed assigns its parameters to the ranks in turn."""
    items = list(group.items())
    return dict(item for rank in range(ranks) for item in items[rank::ranks])


def undo_round_robin(group: Shapes, ranks: int) -> Shapes:
    """Undo `round_robin_order`."""
    order = round_robin_order({str(place): () for place in range(len(group))}, ranks)
    return dict(item for _, item in sorted(zip(map(int, order), group.items(), strict=True)))


def split_into_sub_groups(group: Shapes, ranks: int, size: float) -> list[Shapes]:
    """Split a group into sub-groups as ZeRO-3 does: one is full when a rank's shards of it have `size` elements."""
    if size >= sub_group_shard_size(group, ranks):
        return [group]
    found: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in group.items():
        if sub_group_shard_size(found[-1], ranks) >= size:
            found.append({})
        found[-1][name] = shape
    return list(found)

"""How ZeRO cuts what an optimizer holds into parts for the ranks, as DeepSpeed 0.10.1 to 0.19.8 do it.

ZeRO 1 and 2: each group of parameters is one flat tensor, filled up with zeros to a multiple of the ranks, and each
rank has a part of it. ZeRO-3: each parameter is flat, filled up and cut so, and a sub-group is the parts of some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in the order in which they follow on each other."""

ALIGNMENT = 2
"""Elements: a rank's part of a group begins at a multiple of it in ZeRO 1 and 2 (`nccl_start_alignment_factor`)."""
SUB_GROUP_SIZE = 1_000_000_000
"""Elements: DeepSpeed's default for ZeRO-3's `sub_group_size`."""


@dataclass(frozen=True)
class Range:
    """Some elements of a rank's part of a group: `count` of them, from `begin` on."""

    rank: int
    group: int
    begin: int
    count: int


def part_of_group(group: Shapes, ranks: int) -> int:
    """How many elements of a group each rank has in ZeRO 1 and 2, the zeros at its end included."""
    return -(-numel(group) // (ALIGNMENT * ranks)) * ALIGNMENT


def part_of_parameter(shape: Sequence[int], ranks: int) -> int:
    """How many elements of a parameter each rank has in ZeRO-3, the zeros at its end included."""
    return -(-prod(shape) // ranks)


def part_of_sub_group(group: Shapes, ranks: int) -> int:
    """How many elements of a sub-group each rank has in ZeRO-3, the zeros in it included."""
    return sum(part_of_parameter(shape, ranks) for shape in group.values())


def numel(group: Shapes) -> int:
    """How many elements the parameters of a group have."""
    return sum(map(prod, group.values()))


def offsets(group: Shapes, ranks: int = 0) -> dict[str, int]:
    """Where each parameter begins in a group, or with `ranks` where its part begins in a rank's part of a sub-group."""
    sizes = [part_of_parameter(shape, ranks) if ranks else prod(shape) for shape in group.values()]
    return dict(zip(group, accumulate(sizes, initial=0), strict=False))


def slices(group: Shapes, ranks: int, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """What a rank has of each parameter of a group in ZeRO 1 and 2.

    Yields the parameter's name, where in it that begins, where in the rank's part, and how many elements it is.
    """
    part = part_of_group(group, ranks)
    for name, offset in offsets(group).items():
        begin, end = max(rank * part, offset), min((rank + 1) * part, offset + prod(group[name]))
        if begin < end:
            yield name, begin - offset, begin - rank * part, end - begin


def recut_group(old: Shapes, new: Shapes, index: int, before: int, ranks: int, rank: int) -> list[Range | int]:
    """Where a rank's part of a group is now, in ZeRO 1 and 2, and how many zeros are at its end.

    Args:
        old: the group, in the order that it has now.
        new: the same, in the order that it is to have.
        index: of the group.
        before: how many ranks it is cut for now.
        ranks: how many it is to be cut for.
        rank: one of these.
    """
    begins, part = offsets(old), part_of_group(old, before)
    found: list[Range | int] = []
    zeros = part_of_group(new, ranks)
    for name, at, _, count in slices(new, ranks, rank):
        begin, end = begins[name] + at, begins[name] + at + count
        while begin < end:
            taken = min(end, (begin // part + 1) * part) - begin
            found.append(Range(begin // part, index, begin % part, taken))
            begin += taken
        zeros -= count
    return [*found, zeros]


def recut_parameter(
    shape: Sequence[int], before: int, ranks: int, rank: int, group: int = 0, offset: int = 0
) -> list[Range | int]:
    """Where a rank's part of a parameter is now, in ZeRO-3, and how many zeros are at its end.

    Args:
        shape: the parameter's.
        before: how many ranks it is cut for now.
        ranks: how many it is to be cut for.
        rank: one of these.
        group: the sub-group that it is in now.
        offset: where its part begins in a rank's part of that.
    """
    old, new = part_of_parameter(shape, before), part_of_parameter(shape, ranks)
    first, last = (min(edge * new, prod(shape)) for edge in (rank, rank + 1))
    found: list[Range | int] = []
    begin = first
    while begin < last:
        taken = min(last, (begin // old + 1) * old) - begin
        found.append(Range(begin // old, group, offset + begin % old, taken))
        begin += taken
    return [*found, new - (last - first)]


def dealt(group: Shapes, ranks: int) -> Shapes:
    """A group in the order that DeepSpeed gives it for `round_robin_gradients`: dealt out to the ranks in turn."""
    items = list(group.items())
    return dict(item for rank in range(ranks) for item in items[rank::ranks])


def gathered(group: Shapes, ranks: int) -> Shapes:
    """The order of a group before it was `dealt`."""
    order = dealt({str(place): () for place in range(len(group))}, ranks)
    return dict(item for _, item in sorted(zip(map(int, order), group.items(), strict=True)))


def sub_groups(group: Shapes, ranks: int, size: float) -> list[Shapes]:
    """The sub-groups that ZeRO-3 makes of a group: each is full once a rank's parts of it have `size` elements."""
    if size >= part_of_sub_group(group, ranks):
        return [group]
    found: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in group.items():
        if part_of_sub_group(found[-1], ranks) >= size:
            found.append({})
        found[-1][name] = shape
    return list(found)

"""One rank's shard of the optimizer's state, as any ZeRO stage and world size saves it: the inverse of `groups`.

Nothing is copied: a shard consists of tensors that are not in a file yet, each of ranges of the files of a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

from ..format.archive import CHUNK_BYTES
from ..format.records import Piece, Records, TensorSource
from ..format.stored import ITEM_SIZES, Storage, StoredTensor, stand_in
from .groups import BASE_STATE, MASTERS, Group, SharedBlockError, Trained, Values, blocks_in, nested
from .partitions import Range, Shapes, group_shard_size, ranges, round_robin_order, split_into_sub_groups
from .states import FLAT_MASTERS, as_integer, masters_key


@dataclass(frozen=True)
class Target:
    """What a checkpoint is resharded for.

    Attributes:
        ranks: the world size.
        stage: of ZeRO, 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        sub_group_size: in ZeRO-3.
        round_robin: whether ZeRO 1 and 2 order parameters by `round_robin_gradients`.
        has_state: whether the optimizer's state is wanted, besides the masters.
        like: what the state of DeepSpeed's optimizer has besides the shards; empty in stage 0 in fp32.
    """

    ranks: int
    stage: int
    precision: str
    sub_group_size: float
    round_robin: bool
    has_state: bool = True
    like: Mapping[str, Any] = field(default_factory=dict)


class NewTensors:
    """Tensors that are in no file yet: each consists of pieces of others, and of zeros."""

    def __init__(self) -> None:
        self.pieces: dict[Storage, list[Piece | int]] = {}
        self.values: dict[Piece, memoryview] = {}
        """The bytes of pieces whose storage is in no file."""

    def make(
        self, like: StoredTensor, pieces: Iterable[Piece | int], shape: Sequence[int] | None = None
    ) -> StoredTensor:
        """A tensor of pieces, of the dtype and kind of another; flat without a shape. A number stands for zeros."""
        pieces = list(pieces)
        count = sum(piece if isinstance(piece, int) else piece.count for piece in pieces)
        storage = Storage(None, str(len(self.pieces)), like.dtype, count)
        self.pieces[storage] = pieces
        shape = (count,) if shape is None else tuple(shape)
        stride = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
        return replace(like, storage=storage, offset=0, shape=shape, stride=stride)

    def copy(self, value: Any) -> Any:
        """Copy a single value: ranks that shared one step counter would each count the other's steps."""
        if not isinstance(value, StoredTensor):
            return value
        copied = self.make(value, [Piece(value.storage, value.offset, value.extent)])
        return replace(value, storage=copied.storage, offset=0)

    def content(self, records: Records, storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        """The bytes of a new storage, or of one in a file."""
        if storage not in self.pieces:
            yield from records.chunks(TensorSource("uint8", (count,), (Piece(storage, begin, count),)))
            return
        for piece in self.pieces[storage]:
            if isinstance(piece, int):
                size = piece * ITEM_SIZES[storage.dtype]
                yield from (bytes(min(CHUNK_BYTES, size - begin)) for begin in range(0, size, CHUNK_BYTES))
            elif piece in self.values:
                yield self.values[piece]
            else:
                yield from records.chunks(TensorSource(storage.dtype, (piece.count,), (piece,)))


def pieces_of(part: Range, values: Values | None, per: int = 1) -> Iterator[Piece | int]:
    """The pieces of a part of a shard; zeros where the optimizer has no values yet."""
    count = blocks_in(part.count, per)
    if values is None:
        yield count
    else:
        yield from values.part(part.begin, part.count)
    if part.padding:
        yield blocks_in(part.count + part.padding, per) - count


def flat_shapes(groups: Sequence[Group], target: Target) -> list[list[Shapes]]:
    """The shapes of the parameters of each group's flat tensors, in their order in memory."""
    if target.stage == 3:
        return [
            split_into_sub_groups(group.shapes, target.ranks, target.sub_group_size) if group.parameters else []
            for group in groups
        ]
    is_turned = target.round_robin and target.stage
    return [[round_robin_order(group.shapes, target.ranks) if is_turned else group.shapes] for group in groups]


def shard(groups: Sequence[Group], target: Target, rank: int, tensors: NewTensors) -> dict[str, Any]:
    """What the optimizer of a rank saves and loads.

    Args:
        groups: as `read` returns them.
        target: what it is for.
        rank: whose shard is wanted; in stage 0 that of all.
        tensors: the new ones.

    Raises:
        SharedBlockError: see there.
    """
    masters: list[Any] = []
    settings = []
    paddings: list[int] = []
    state: dict[int, Any] = {}
    is_flat = target.stage or masters_key(target.like) == FLAT_MASTERS
    for group, flats in zip(groups, flat_shapes(groups, target), strict=True):
        first = len(paddings)
        for shapes in flats if is_flat else [{name: shape} for name, shape in flats[0].items()]:
            parts = list(ranges(shapes, target.stage, target.ranks, rank))
            is_padded = target.stage in (1, 2)
            padding = group_shard_size(shapes, target.ranks) - sum(part.count for part in parts) if is_padded else 0
            shape = None if is_flat else group.parameters[parts[0].name].shape
            masters.append(_join(group, parts, None, 0, tensors, shape))  # without the padding at the end
            if kept := _state(group, parts, padding, tensors, shape):
                state[len(paddings)] = nested(kept)
            paddings.append(padding)
        settings.append({**group.settings, "params": list(range(first, len(paddings)))})
    base = {**(target.like.get(BASE_STATE[target.stage or 3]) or {}), "state": state, "param_groups": settings}
    if not target.stage:
        own = iter(masters)
        shared = masters if is_flat else [[next(own) for _ in group.parameters] for group in groups]
        key = masters_key(target.like)
        return {**target.like, BASE_STATE[3]: base, key: shared} if key else base
    changed = {
        BASE_STATE[target.stage]: base,
        MASTERS[target.stage]: masters,
        "partition_count": target.ranks if target.stage == 3 else [target.ranks] * len(groups),
        "group_paddings": paddings,
        "param_slice_mappings": [_addresses(group.shapes, target.ranks, rank) for group in groups],
    }
    return {**target.like, **{key: value for key, value in changed.items() if key in target.like}}


def _state(
    group: Group, parts: Sequence[Range], padding: int, tensors: NewTensors, shape: tuple[int, ...] | None
) -> dict[str, Any]:
    """The state of a flat tensor.

    DeepSpeed's FusedAdam counts the steps of a group's last parameter alone, and in stage 0 one without gradients has
    no state: the state with most steps says what there is. It is not that of the parts, since all ranks count alike.
    """
    states = [parameter.state for parameter in group.parameters.values() if parameter.state]
    most: Mapping[str, Any] = max(states, key=lambda state: as_integer(state.get("step")) or 0, default={})
    own = most if shape is None else group.parameters[parts[0].name].state
    if not own and isinstance(most.get("step"), StoredTensor):
        return {}  # each parameter counts its own steps, and this one has had no gradients yet
    return {
        key: _join(group, parts, key, padding, tensors, shape)
        if isinstance(value, Values)
        else tensors.copy(own.get(key, value) if isinstance(value, StoredTensor) else value)
        for key, value in most.items()
    }


def _join(
    group: Group,
    parts: Sequence[Range],
    key: str | None,
    padding: int,
    tensors: NewTensors,
    shape: tuple[int, ...] | None,
) -> StoredTensor:
    """A tensor of parts of masters, or of what the optimizer's state has under a key."""

    def values(parameter: Trained) -> Values | None:
        return parameter.master if key is None else parameter.state.get(key)

    present = [value for value in map(values, group.parameters.values()) if value is not None]
    own = values(group.parameters[parts[0].name]) if shape is not None else None
    like, per = (own or present[0]).like, present[0].per
    if shape is None and any(value.like.dtype != like.dtype for value in present):
        raise TypeError(f"some of {key!r} is in {like.dtype}, and some is not")
    if any(part.offset % per or part.begin % per for part in parts):
        raise SharedBlockError
    pieces = [piece for part in parts for piece in pieces_of(part, values(group.parameters[part.name]), per)]
    if key is not None and shape is None:
        size = sum(part.count + part.padding for part in parts)
        pieces.append(blocks_in(size + padding, per) - blocks_in(size, per))
    return tensors.make(like, pieces, shape if per == 1 else None)


def _addresses(group: Shapes, ranks: int, rank: int) -> dict[str, Any]:
    """The places of parameters in a rank's shard of a group; DeepSpeed ignores `round_robin_gradients` in them."""
    address = stand_in("deepspeed.utils.tensor_fragment.fragment_address")
    return OrderedDict((part.name, address(part.count, part.offset)) for part in ranges(group, 1, ranks, rank))

"""One rank's shard of the optimizer's state, as any ZeRO stage and world size saves it: the inverse of `groups`.

Nothing is copied: a shard consists of tensors that are not in a file yet, each of ranges of the files of a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...common.errors import named
from ..format.archive import CHUNK_BYTES
from ..format.records import Piece, Records, TensorSource
from ..format.stored import ITEM_SIZES, Storage, StoredTensor, stand_in, whole_tensor
from .groups import BASE_STATE, MASTER, MASTERS, Group, UnsupportedError, blocks_in, check_blocks, nested
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


@dataclass(frozen=True)
class Part:
    """`count` elements, from `begin` on, of a tensor that is not contiguous in its storage."""

    source: TensorSource
    begin: int
    count: int


class NewTensors:
    """Tensors that are in no file yet: each consists of pieces of others, of any dtype, and of zeros."""

    def __init__(self) -> None:
        self.pieces: dict[Storage, list[Piece | Part | int]] = {}
        self.values: dict[Piece, memoryview] = {}
        """The bytes of pieces whose storage is in no file."""

    def make(
        self, dtype: str, pieces: Iterable[Piece | Part | int], shape: Sequence[int] | None = None
    ) -> StoredTensor:
        """A tensor of pieces; flat without a shape. A number stands for zeros."""
        pieces = list(pieces)
        count = sum(piece if isinstance(piece, int) else piece.count for piece in pieces)
        tensor = whole_tensor(str(len(self.pieces)), dtype, (count,) if shape is None else tuple(shape))
        self.pieces[tensor.storage] = pieces
        return tensor

    def copy(self, value: Any) -> Any:
        """Copy a single value: ranks that shared one step counter would each count the other's steps."""
        if not isinstance(value, StoredTensor):
            return value
        copied = self.make(value.dtype, [Piece(value.storage, value.offset, value.extent)])
        return replace(value, storage=copied.storage, offset=0)

    def content(self, records: Records, storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        """The bytes of a new storage, or of one in a file."""
        if storage not in self.pieces:
            yield from records.content(storage, begin, count)
            return
        for piece in self.pieces[storage]:
            if isinstance(piece, int):
                size = piece * ITEM_SIZES[storage.dtype]
                yield from (bytes(min(CHUNK_BYTES, size - begin)) for begin in range(0, size, CHUNK_BYTES))
            elif isinstance(piece, Piece) and piece in self.values:
                yield self.values[piece]
            elif isinstance(piece, Piece) and piece.storage.dtype == storage.dtype:
                yield from records.chunks(TensorSource(storage.dtype, (piece.count,), (piece,)))
            else:
                import torch

                if isinstance(piece, Piece):
                    piece = Part(TensorSource(piece.storage.dtype, (piece.count,), (piece,)), 0, piece.count)
                values = torch.frombuffer(records.read(piece.source), dtype=getattr(torch, piece.source.dtype))
                values = values[piece.begin : piece.begin + piece.count].to(getattr(torch, storage.dtype))
                yield values.view(torch.uint8).numpy().data


def cut(source: TensorSource, begin: int, count: int) -> Iterator[Piece | Part]:
    """The pieces of `count` elements of a tensor from `begin` on."""
    if source.view is not None:
        yield Part(source, begin, count)
        return
    for piece in source.pieces:
        first, end = max(begin, 0), min(begin + count, piece.count)
        if first < end:
            yield Piece(piece.storage, piece.begin + first, end - first)
        begin -= piece.count


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
        UnsupportedError: it cannot be made of what was saved.
    """
    masters: list[Any] = []
    settings = []
    paddings: list[int] = []
    state: dict[int, Any] = {}
    key = masters_key(target.like)
    is_flat = target.stage or key == FLAT_MASTERS
    for group, flats in zip(groups, flat_shapes(groups, target), strict=True):
        first = len(paddings)
        for shapes in flats if is_flat else [{name: shape} for name, shape in flats[0].items()]:
            parts = list(ranges(shapes, target.stage, target.ranks, rank))
            is_padded = target.stage in (1, 2)
            padding = group_shard_size(shapes, target.ranks) - sum(part.count for part in parts) if is_padded else 0
            own = group.parameters if is_flat else {name: group.parameters[name] for name in shapes}
            shape = None if is_flat else shapes[parts[0].name]
            masters.append(_join(own, parts, MASTER, "float32", 0, tensors, shape))  # without the padding at the end
            if kept := _state(group, own, parts, padding, tensors, shape):
                state[len(paddings)] = nested(kept)
            paddings.append(padding)
        settings.append({**group.settings, "params": list(range(first, len(paddings)))})
    base = {**(target.like.get(BASE_STATE[target.stage or 3]) or {}), "state": state, "param_groups": settings}
    if not target.stage:
        each = iter(masters)
        shared = masters if is_flat else [[next(each) for _ in group.parameters] for group in groups]
        return {**target.like, BASE_STATE[3]: base, key: shared} if key else base
    changed = {
        BASE_STATE[target.stage]: base,
        MASTERS[target.stage]: masters,
        "partition_count": target.ranks if target.stage == 3 else [target.ranks] * len(groups),
        "group_paddings": paddings,
        "param_slice_mappings": [_addresses(group.shapes, target.ranks, rank) for group in groups],
    }
    return {**target.like, **{key: value for key, value in changed.items() if key in target.like}}


_Parameters = Mapping[str, Mapping[str, Any]]


def _state(
    group: Group, own: _Parameters, parts: Sequence[Range], padding: int, tensors: NewTensors, shape: Any
) -> dict[str, Any]:
    """The state of a flat tensor.

    DeepSpeed's FusedAdam counts the steps of a group's last parameter alone, and in stage 0 one without gradients has
    no state: the state with most steps says what there is. It is not that of the parts, since all ranks count alike.
    """
    steps = ((len(values) > 1, as_integer(values.get("step")) or 0, values) for values in group.parameters.values())
    *_, most = max(steps, key=lambda item: item[:2], default=({},))
    single = most if shape is None else own[parts[0].name]
    if len(single) == 1 and isinstance(most.get("step"), StoredTensor):
        return {}  # each parameter counts its own steps, and this one has had no gradients yet
    return {
        key: _join(own, parts, key, value.dtype, padding, tensors, shape)
        if isinstance(value, TensorSource)
        else tensors.copy(single.get(key, value) if isinstance(value, StoredTensor) else value)
        for key, value in most.items()
        if key != MASTER
    }


def _join(
    parameters: _Parameters,
    parts: Sequence[Range],
    key: str,
    dtype: str,
    padding: int,
    tensors: NewTensors,
    shape: tuple[int, ...] | None,
) -> StoredTensor:
    """A tensor of parts of masters, or of what the optimizer's state has under a key; zeros where that is nothing."""
    dtype, *others = {values[key].dtype for values in parameters.values() if key in values} or {dtype}
    if others:
        raise UnsupportedError(f"some of {key or 'the masters'!r} is in {dtype}, and some in {named(others)}")
    check_blocks((at for part in parts for at in (part.offset, part.begin)), key)
    pieces: list[Piece | Part | int] = []
    for part in parts:
        source, count = parameters[part.name].get(key), blocks_in(part.count, key)
        pieces += [count] if source is None else cut(source, blocks_in(part.begin, key), count)
        pieces.append(blocks_in(part.count + part.padding, key) - count)
    size = sum(part.count + part.padding for part in parts)
    pieces.append(blocks_in(size + padding, key) - blocks_in(size, key))
    tensor = tensors.make(dtype, pieces, shape if blocks_in(size, key) == size else None)
    return replace(tensor, more=(key == MASTER, *tensor.more[1:]))  # masters require gradients


def _addresses(group: Shapes, ranks: int, rank: int) -> dict[str, Any]:
    """The places of parameters in a rank's shard of a group; DeepSpeed ignores `round_robin_gradients` in them."""
    address = stand_in("deepspeed.utils.tensor_fragment.fragment_address")
    return OrderedDict((part.name, address(part.count, part.offset)) for part in ranges(group, 1, ranks, rank))

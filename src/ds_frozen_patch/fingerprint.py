"""The fingerprint: a digest of one parameter's content that does not depend on ZeRO stage, world size or device.

A parameter's values, in order, are divided into blocks of 256 KiB. A block's sum is linear in its bits, so each rank
computes a partial sum from its shard, and the ranks add these up. BLAKE2b then digests the sums of all blocks in order.

A block's sum is the total of those of its 16 rows of 16 KiB. Each rank keeps the sums of the rows that it has read
(`Content`), and later compares them with the values again: all rows, or one of 16.

**The sum of a block.** Read the block as 64-bit words x_j (the last one padded with zeros), each of two 32-bit
lanes: x_j = 2^32 h_j + l_j. The sum is

    S = sum_j (W_j x_j + U_j h_j)  =  sum_j (W_j l_j + (2^32 W_j + U_j) h_j)   modulo 2^64,

so every lane has a weight of its own: W_j for l_j, and 2^32 W_j + U_j for h_j. The weights are fixed; they are odd,
no two agree in their lower 32 bits, and their upper 32 bits are pseudo-random (splitmix64).

**What it detects.** Two contents whose blocks differ in some sum have different fingerprints, except for a collision of
BLAKE2b. Within a block, let d_i be the differences of the lanes, |d_i| < 2^32:

- One changed lane, so any one changed element: S changes by d w with w odd, and d w = 0 modulo 2^64 only for d = 0.
- Two elements of up to 32 bits swapped: S changes by d (2^a w_i - 2^b w_j), a and b being their places in their
  lanes. If a = b, w_i - w_j has fewer than 32 factors of 2, as has 2^a d, so the product is not 0 modulo 2^64;
  if not, the factor in brackets is 2^min(a,b) times an odd number, and again it is not.
- Any other change is caught unless the sum of d_i w_i happens to be 0. With weights drawn at random that has a
  probability of 2^-(63-k), k being the least number of factors of 2 among the d_i: 2^-63 as a rule, never above 2^-32.
  (The multilinear family; see Lemire and Kaser, "Strongly universal string hashing is fast", 2014.)

It does not protect against a base that is crafted to collide: the weights are public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

from .common.collectives import add_up, rank, world_size
from .internals import is_in_memory, numel_of, partition_of, range_of_partition, shape_of
from .parameters import inner_tensors

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = 8 * BLOCK_WORDS
SHARES = 16
"""How many rows a block has. A comparison of one share reads one of them."""
ROW_WORDS = BLOCK_WORDS // SHARES
ROW_BYTES = 8 * ROW_WORDS
COPIED_BYTES = 1 << 24
"""At most so much of a tensor that is not contiguous is copied at once."""
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class Shard:
    """What a rank has of a parameter that is divided among ranks, each with a tensor of its own of the same shape.

    The fingerprint of such a parameter is that of all its shards, in order.

    Attributes:
        index: of the shard.
        count: of the shards.
        copy: which copy of the shard this rank has.
        copies: how many ranks have the same shard.
    """

    index: int
    count: int
    copy: int
    copies: int


@dataclass
class Content:
    """What a rank has read of a tensor: its partition, or its share of the blocks.

    Attributes:
        layout: what of the tensor that is; a content is comparable only with another of the same layout.
        first: the index of its first row in the whole tensor.
        sums: of its rows, on the CPU.
        some: a few of the values that this process has, if they are floating-point numbers.
        fingerprint: of the whole tensor, once the ranks have computed it.
    """

    layout: tuple[Any, ...]
    first: int
    sums: torch.Tensor
    some: torch.Tensor | None
    fingerprint: str | None = None

    def differs_from(self, tensor: torch.Tensor, shard: Shard | None, number: int = 0) -> bool:
        """Whether the tensor's values have changed since, or its layout has.

        Args:
            tensor: as it is now.
            shard: see `fingerprints`.
            number: 0 to compare all rows, else which share: of 16 consecutive numbers, each row has one.
        """
        if layout_of(tensor, shard) != self.layout:
            return True
        place = number % max(min(len(self.sums), SHARES), 1)
        now = _sums_of_rows(tensor, shard, self.layout, place if number else None)
        rows = slice(place, None, SHARES) if number else slice(None)
        return not now[rows].equal(self.sums[rows])

    def is_rounded_to(self, tensor: torch.Tensor, largest: float) -> bool:
        """Whether the tensor may differ by rounding only: by a few units in the last place of this largest value."""
        import torch

        now = _some_values(tensor)
        if self.some is None or now is None or not len(now):
            return True
        limit = 4 * torch.finfo(tensor.dtype).eps * max(largest, float(self.some.abs().max()))
        return bool(((now - self.some).abs() <= limit).all())


def read(tensor: torch.Tensor, shard: Shard | None = None) -> Content | None:
    """Read what is this rank's part of a tensor; None if its values cannot be read."""
    if not is_readable(tensor):
        return None
    layout = layout_of(tensor, shard)
    first = layout[2] * tensor.element_size() // ROW_BYTES
    return Content(layout, first, _sums_of_rows(tensor, shard, layout), _some_values(tensor))


def _some_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """About 64 evenly spaced values, in double precision."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return None
    values = own_values(tensor)
    return values[:: max(len(values) // 64, 1)].cpu().double()


def layout_of(tensor: Any, shard: Shard | None = None) -> tuple[Any, Any, int, int]:
    """The dtype and shape of a tensor, and the range of elements that this rank reads, counted in all of its shards."""
    shape = shape_of(tensor)
    if partition_of(tensor) is not tensor:
        begin, end = range_of_partition(tensor)
    else:
        # Consecutive blocks for each rank, and another first rank for each shape, to distribute small ones too.
        per_block = BLOCK_BYTES // tensor.element_size()
        copy, copies = (rank(), world_size()) if shard is None else (shard.copy, shard.copies)
        start = 0 if shard is None else shard.index * tensor.numel()
        turn = (copy + crc32(repr(shape).encode())) % copies
        blocks = -(-tensor.numel() // per_block)
        begin, end = (start + min(blocks * at // copies * per_block, tensor.numel()) for at in (turn, turn + 1))
    return tensor.dtype, shape, begin, end


def fingerprints(
    parameters: Sequence[torch.Tensor],
    device: Any = None,
    contents: Sequence[Content | None] | None = None,
    *,
    shards: Sequence[Shard | None] = (),
) -> list[str | None]:
    """The fingerprint of each parameter, 32 hexadecimal digits; None if its values cannot be read.

    Every rank must call it with the same parameters in the same order. Each rank reads its own shard of a parameter
    that ZeRO-3 has partitioned; the blocks of other parameters are distributed over the ranks. Unreadable are
    partitions that ZeRO++ has quantized or that are on NVMe, tensor subclasses (see `parameters.contents`), and
    tensors that are sparse, quantized by torch itself, or on the device "meta".

    Args:
        parameters: parameters and other tensors, whole or partitioned, of any dtype, shape and device.
        device: where the ranks' sums are added up, such as the engine's; by default the CPU.
        contents: what this rank has read of each; they get the fingerprints. By default, everything is read now.
        shards: for each parameter, what this rank has of it; None if every rank has the same, or a partition of
            ZeRO-3's. By default, all are None.
    """
    import torch

    if not parameters:
        return []
    own_shards = shards or [None] * len(parameters)
    if contents is None:
        contents = [read(parameter, shard) for parameter, shard in zip(parameters, own_shards, strict=True)]
    counts = [_block_count(parameter, shard) for parameter, shard in zip(parameters, own_shards, strict=True)]
    sums = torch.zeros(sum(counts), dtype=torch.int64)
    for blocks, content in zip(torch.split(sums, counts), contents, strict=True):
        if content is not None:
            blocks.index_add_(0, torch.arange(len(content.sums)).add_(content.first) // SHARES, content.sums)
    sums = add_up(sums, device)
    for parameter, shard, blocks, content in zip(
        parameters, own_shards, torch.split(sums, counts), contents, strict=True
    ):
        if content is not None:
            content.fingerprint = _digest(_size(parameter, shard), blocks)
    return [None if content is None else content.fingerprint for content in contents]


class Stream:
    """Computes the fingerprint of a whole parameter whose content arrives in chunks, without collectives.

    Args:
        dtype: torch's name of the dtype, such as "bfloat16".
        numel: the number of elements.
    """

    def __init__(self, dtype: str, numel: int) -> None:
        import torch

        self._kind: torch.dtype = getattr(torch, dtype)
        self._size = numel * self._kind.itemsize
        self._sums = torch.zeros(-(-self._size // BLOCK_BYTES), dtype=torch.int64)
        self._offset = 0

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, a whole number of elements."""
        import torch

        piece = torch.frombuffer(chunk, dtype=self._kind)
        block, added = block_sums(piece, self._offset)
        self._sums[block : block + len(added)] += added
        self._offset += len(piece)

    def digest(self) -> str:
        """The fingerprint, after the last chunk."""
        return _digest(self._size, self._sums)


def of_stream(dtype: str, numel: int, chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """The fingerprint of a whole parameter, whose bytes arrive in these chunks (see `Stream`)."""
    stream = Stream(dtype, numel)
    for chunk in chunks:
        stream.add(chunk)
    return stream.digest()


def block_sums(piece: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
    """The contribution of a piece of a parameter to the sums of its blocks.

    Args:
        piece: consecutive values, one-dimensional, of any dtype.
        offset: the offset of the piece in the whole parameter, in elements.

    Returns:
        The index of the first block, and an int64 tensor with the sums of it and the following ones.
    """
    import torch

    first, rows = row_sums(piece, offset)
    blocks = torch.arange(first, first + len(rows), device=rows.device) // SHARES - first // SHARES
    sums = torch.zeros(int(blocks[-1]) + 1 if len(blocks) else 1, dtype=torch.int64, device=rows.device)
    return first // SHARES, sums.index_add_(0, blocks, rows)


def row_sums(piece: torch.Tensor, offset: int, turn: int | None = None) -> tuple[int, torch.Tensor]:
    """As `block_sums`, of the rows.

    Args:
        piece, offset: see `block_sums`.
        turn: compute only the rows with this place in their blocks; the others are 0.
    """
    import torch

    if piece.element_size() == 16:  # complex128: two elements of eight bytes
        piece, offset = torch.view_as_real(piece).flatten(), 2 * offset
    piece = piece.view(getattr(torch, _INTEGERS[piece.element_size()]))
    per_row = ROW_BYTES // piece.element_size()
    first = offset // per_row
    sums = torch.zeros(-(-(offset + len(piece)) // per_row) - first, dtype=torch.int64, device=piece.device)
    for place in range(min(len(sums), SHARES)):
        if turn is None or (first + place) % SHARES == turn:
            _add_rows(piece, offset - first * per_row, place, (first + place) % SHARES, sums)
    return first, sums


def _add_rows(piece: torch.Tensor, offset: int, place: int, turn: int, sums: torch.Tensor) -> None:
    """Compute the sums of the rows `place`, `place + SHARES` and so on, which all have the same weights.

    Args:
        piece: integers.
        offset: of the piece, from the beginning of the first row.
        place: the first of the rows.
        turn: their place in their blocks.
        sums: of all rows.
    """
    import torch

    per_row = ROW_BYTES // piece.element_size()
    low, high = (weights[turn].to(piece.device) for weights in _weights())
    wanted = sums[place::SHARES]
    # 2 MiB fit into a CPU's cache, and are enough for its threads; a GPU needs more work at once.
    at_once = min(128 if piece.device.type == "cpu" else 1024, len(wanted))
    words = torch.empty(at_once, ROW_WORDS, dtype=torch.int64, device=piece.device)
    weighed = torch.empty_like(words)
    elements = words.view(-1).view(piece.dtype).view(at_once, per_row)
    row = 0
    while row < len(wanted):
        start = (place + row * SHARES) * per_row - offset
        count = min(at_once, (len(piece) - start - per_row) // (SHARES * per_row) + 1) if start >= 0 else 0
        if count > 0:
            elements[:count].copy_(piece[start:].unfold(0, per_row, SHARES * per_row)[:count])
        else:  # the piece has only a part of this row
            count = 1
            words[0] = 0
            begin, end = max(start, 0), min(start + per_row, len(piece))
            elements[0, begin - start : end - start].copy_(piece[begin:end])
        torch.mul(words[:count], low, out=weighed[:count])
        totals = weighed[:count].sum(1)
        totals += words[:count].bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(high).sum(1)
        wanted[row : row + count] = totals
        row += count


@cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """W and U, as int64 tensors for the words of one block, by row."""
    import torch

    index = torch.arange(2 * BLOCK_WORDS, dtype=torch.int64)
    low = ((2 * index + 1) * 0x9E3779B1) & 0xFFFFFFFF  # odd times odd numbers: odd, and all different
    mixed = (index + 1) * -0x61C8864680B583EB  # splitmix64; >> shifts the sign in, so the mask removes it
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    weights = ((mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) << 32) | low
    return weights[:BLOCK_WORDS].view(SHARES, ROW_WORDS), weights[BLOCK_WORDS:].view(SHARES, ROW_WORDS)


def _digest(size: int, sums: torch.Tensor) -> str:
    """The digest of a parameter's size in bytes and the sums of its blocks."""
    content = size.to_bytes(8, "little") + sums.numpy().astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16, person=b"frozen patch 1").hexdigest()


def _sums_of_rows(
    tensor: Any, shard: Shard | None, layout: tuple[Any, Any, int, int], place: int | None = None
) -> torch.Tensor:
    """The sums of the rows of what this rank reads, on the CPU; with a place, only of each 16th row from there."""
    import torch

    *_, begin, end = layout
    first = begin * tensor.element_size() // ROW_BYTES
    count = -(-end * tensor.element_size() // ROW_BYTES) - first if begin < end else 0
    turn = None if place is None else (first + place) % SHARES
    if (partition := partition_of(tensor)) is not tensor:
        pieces: Iterable[tuple[torch.Tensor, int]] = [(partition.detach().view(-1), begin)]
    else:
        pieces = _pieces(tensor.detach(), 0 if shard is None else shard.index * tensor.numel())
    sums = torch.zeros(count, dtype=torch.int64, device=partition_of(tensor).device)
    for piece, offset in pieces:
        from_, to = max(begin - offset, 0), min(end - offset, piece.numel())
        if from_ < to:
            row, added = row_sums(piece.reshape(-1)[from_:to], offset + from_, turn)
            sums[row - first : row - first + len(added)] += added
    return sums.cpu()


def _pieces(values: torch.Tensor, offset: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts of a tensor in order, with their offsets: the whole, or parts small enough to be copied if need be."""
    if values.is_contiguous() or values.dim() == 1:
        yield values, offset
        return
    import torch

    rows = COPIED_BYTES // (values[0].numel() * values.element_size())
    for part in torch.split(values, max(rows, 1)):
        if rows:
            yield part, offset
        else:
            yield from _pieces(part[0], offset)
        offset += part.numel()


def is_readable(tensor: Any) -> bool:
    """Whether the values can be read; partitions on NVMe may not be in memory."""
    import torch

    content = partition_of(tensor)
    if inner_tensors(tensor) or content.layout != torch.strided or content.is_quantized or content.is_meta:
        return False
    is_here = content is tensor or is_in_memory(content)
    return is_here and (content.element_size() in _INTEGERS or content.element_size() == 16)


def own_values(tensor: Any) -> torch.Tensor:
    """The values that this process has of a readable tensor, flattened; only some if it is not contiguous."""
    values: torch.Tensor = partition_of(tensor).detach()
    while not values.is_contiguous() and values.dim() > 1:
        values = values[0]
    return values.contiguous().view(-1)


def _block_count(parameter: torch.Tensor, shard: Shard | None) -> int:
    return 0 if inner_tensors(parameter) else -(-_size(parameter, shard) // BLOCK_BYTES)


def _size(parameter: torch.Tensor, shard: Shard | None) -> int:
    """The size in bytes of a parameter, with all of its shards."""
    return numel_of(parameter) * parameter.element_size() * (1 if shard is None else shard.count)

"""The fingerprint: a digest of one parameter's content that does not depend on ZeRO stage, world size or device.

A parameter's values, in order, are divided into blocks of 256 KiB. A block's sum is linear in its bits, so each rank
computes a partial sum from its shard, and the ranks add these up. BLAKE2b then digests the sums of all blocks in order.
A block's sum is the total of those of its 16 rows of 16 KiB. Each rank keeps the sums of the rows that it has read
(`Content`), and later compares them with the values again: all rows, or some.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

from .internals import is_in_memory, partition_of, range_of_partition, shape_of
from .parameters import inner_tensors
from .ranks import add_up, digest, rank, world_size

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = 8 * BLOCK_WORDS
ROWS = 16
"""How many rows a block has."""
ROW_WORDS = BLOCK_WORDS // ROWS
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
        size: of the whole tensor with all its shards, in bytes.
        layout: see `layout_of`; None if this rank has not read the tensor, or cannot.
        first: the index of the first row in the whole tensor.
        sums: of the rows, on the CPU.
        sample: see `_sample`, on the CPU.
        fingerprint: of the whole tensor, once the ranks have computed it.
    """

    size: int
    layout: tuple[Any, ...] | None = None
    first: int = 0
    sums: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    fingerprint: str | None = None

    def is_rounded_to(self, tensor: torch.Tensor, largest: float) -> bool:
        """Whether the tensor may differ by rounding only: by a few units in the last place of this largest value."""
        import torch

        if self.sample is None or self.layout is None or self.layout[0] != tensor.dtype:
            return False
        now = _sample(tensor, self.layout).cpu().view(tensor.dtype).double()
        before = self.sample.view(tensor.dtype).double()
        if now.shape != before.shape:
            return False
        limit = 4 * torch.finfo(tensor.dtype).eps * max(largest, *before.abs().tolist())
        return bool(((now - before).abs() <= limit).all())


def unread(tensor: torch.Tensor, shard: Shard | None = None) -> Content:
    """The content of a tensor of which this rank has read nothing."""
    shards = 1 if shard is None else shard.count
    return Content(0 if inner_tensors(tensor) else prod(shape_of(tensor)) * tensor.element_size() * shards)


def read(tensor: torch.Tensor, shard: Shard | None = None) -> Content:
    """Read this rank's part of a tensor, of any dtype, shape and device.

    Args:
        tensor: whole, or partitioned by ZeRO-3: then each rank reads its own partition.
        shard: what this rank has of it; None if every rank has the same, or a partition of ZeRO-3's.
    """
    content, layout = unread(tensor, shard), layout_of(tensor, shard)
    if layout is not None:
        first, sums = _sums_of_rows(tensor, shard, layout)
        content = replace(
            content, layout=layout, first=first, sums=sums, sample=_sample(tensor, layout).to("cpu", copy=True)
        )
    return content


def changes(earlier: Sequence[tuple[Content, Any, Shard | None]], rows: range | None = None) -> list[bool]:
    """Which tensors have other values than before, or another layout; False for those that cannot be read.

    Args:
        earlier: what was read, each with the tensor and the shard, see `read`.
        rows: which to compare, counted through all of them, beside the samples of all tensors; all by default.
    """
    import torch

    changed: list[bool] = []
    samples: dict[Any, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)  # by device
    end = 0
    for number, (content, tensor, shard) in enumerate(earlier):
        begin, end = end, end + (0 if content.sums is None else content.sums.numel())
        layout = layout_of(tensor, shard)
        changed.append(layout is not None and layout != content.layout)
        if layout is None or changed[number] or content.sums is None or content.sample is None:
            continue
        start, stop = (begin, end) if rows is None else (max(rows.start, begin), min(rows.stop, end))
        if start < stop:
            compared = range(content.first + start - begin, content.first + stop - begin)
            _, sums = _sums_of_rows(tensor, shard, layout, compared)
            changed[number] = not sums.equal(content.sums[start - begin : stop - begin])
        sample = _sample(tensor, layout)
        samples[sample.device].append((number, sample, content.sample))
    for of_one_device in samples.values():  # all at once: a GPU takes as long for one tensor
        numbers, now, before = zip(*of_one_device, strict=True)
        ends = torch.tensor([len(sample) for sample in now]).cumsum(0)
        different = (torch.cat(now).cpu() != torch.cat(before)).nonzero()[:, 0]
        for at in set(torch.searchsorted(ends, different, right=True).tolist()):
            changed[numbers[at]] = True
    return changed


def fingerprints(contents: Sequence[Content], device: Any = None) -> list[str | None]:
    """Compute the fingerprint of each tensor, 32 hexadecimal digits; None if a rank has not read its part.

    Every rank must call it with its contents of the same tensors, in the same order.

    Args:
        contents: what this rank has read. They get the fingerprints.
        device: where the ranks' sums are added up, such as the engine's; by default the CPU.
    """
    import torch

    if not contents:
        return []
    lengths = [*(-(-content.size // BLOCK_BYTES) for content in contents), len(contents)]
    numbers = torch.zeros(sum(lengths), dtype=torch.int64)
    *blocks, readers = torch.split(numbers, lengths)
    for number, content in enumerate(contents):
        if content.sums is not None:
            readers[number] = 1
            rows = torch.arange(content.first, content.first + len(content.sums))
            blocks[number].index_add_(0, rows // ROWS, content.sums)
    *blocks, readers = torch.split(add_up(numbers, device), lengths)
    for number, content in enumerate(contents):
        if readers[number] == world_size():
            content.fingerprint = _digest(content.size, blocks[number].tolist())
    return [content.fingerprint for content in contents]


def of_stream(size: int, chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """The fingerprint of a whole tensor that arrives in chunks, without collectives and without torch.

    Args:
        size: of the tensor, in bytes.
        chunks: its bytes, in order.
    """
    import numpy

    low, high = (weights.reshape(-1) for weights in _weights())
    sums = []
    for block in _blocks(chain(chunks, [bytes(-size % 8)])):
        words = numpy.frombuffer(block, numpy.uint64)
        of_low = numpy.einsum("w,w", words, low[: len(words)])
        of_high = numpy.einsum("w,w", words >> numpy.uint64(32), high[: len(words)])
        sums.append(int(of_low) + int(of_high))
    return _digest(size, sums)


def _blocks(chunks: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytes | memoryview]:
    """The bytes of chunks, in blocks; the last one may be shorter."""
    left = b""
    for chunk in chunks:
        content = memoryview(left + chunk if left else chunk)
        end = len(content) // BLOCK_BYTES * BLOCK_BYTES
        yield from (content[at : at + BLOCK_BYTES] for at in range(0, end, BLOCK_BYTES))
        left = bytes(content[end:])
    if left:
        yield left


def sketch(tensor: torch.Tensor) -> int:
    """A digest of some values, equal for copies of a tensor; 0 if these are all the same, or cannot be read."""
    if (layout := layout_of(tensor)) is None:
        return 0
    part = partition_of(tensor)
    values = _sample(tensor, layout).cpu().view(-1, part.element_size())
    content = part.dtype, part.numel(), values.tolist()
    return 0 if bool((values == values[:1]).all()) else digest(content)


def layout_of(tensor: Any, shard: Shard | None = None) -> tuple[Any, ...] | None:
    """The dtype and shape of a tensor, and the range of elements that this rank reads, counted in all of its shards.

    None if it cannot be read: if ZeRO++ has quantized its partitions or they are on NVMe, and if it is a tensor
    subclass (see `parameters.Contents`), sparse, quantized by torch itself, or on the device "meta".
    """
    import torch

    part = partition_of(tensor)
    if inner_tensors(tensor) or part.layout != torch.strided or part.is_quantized or part.is_meta:
        return None
    if part.element_size() not in (*_INTEGERS, 16):
        return None
    shape = shape_of(tensor)
    numel = prod(shape)
    if part is not tensor:
        if not is_in_memory(part):
            return None
        begin, end = range_of_partition(tensor)
    else:
        # Consecutive blocks for each rank, and another first rank for each shape, to distribute small ones too.
        per_block = BLOCK_BYTES // tensor.element_size()
        copy, copies = (rank(), world_size()) if shard is None else (shard.copy, shard.copies)
        start = 0 if shard is None else shard.index * numel
        turn = (copy + crc32(repr(shape).encode())) % copies
        blocks = -(-numel // per_block)
        begin, end = (start + min(blocks * at // copies * per_block, numel) for at in (turn, turn + 1))
    return tensor.dtype, shape, begin, end


def _sample(tensor: Any, layout: tuple[Any, ...]) -> torch.Tensor:
    """The bytes of about 64 evenly spaced values of those that this process has of a tensor, whose layout is known."""
    import torch

    values: torch.Tensor = partition_of(tensor).detach()
    while not values.is_contiguous() and values.dim() > 1:
        values = values[0]
    count = values.numel()
    if partition_of(tensor) is not tensor:
        count = min(count, layout[-1] - layout[-2])  # DeepSpeed initializes no padding
    return values.reshape(-1)[: count : max(count // 64, 1)].contiguous().view(torch.uint8)


def _sums_of_rows(
    tensor: Any, shard: Shard | None, layout: tuple[Any, ...], rows: range | None = None
) -> tuple[int, torch.Tensor]:
    """The first row of what this rank reads, or of some of its rows, and their sums, on the CPU.

    Args:
        tensor, shard, layout: see `layout_of`.
        rows: of the whole tensor; by default all that this rank reads.
    """
    import torch

    *_, begin, end = layout
    size, values = tensor.element_size(), partition_of(tensor).detach()
    offset = begin if partition_of(tensor) is not tensor else 0 if shard is None else shard.index * tensor.numel()
    if rows is not None:
        begin, end = max(begin, rows.start * ROW_BYTES // size), min(end, rows.stop * ROW_BYTES // size)
    first = begin * size // ROW_BYTES
    count = -(-end * size // ROW_BYTES) - first if begin < end else 0
    sums = torch.zeros(count, dtype=torch.int64, device=values.device)
    todo = [(values, offset)]
    while todo:
        piece, offset = todo.pop()
        from_, to = max(begin - offset, 0), min(end - offset, piece.numel())
        if from_ >= to:
            continue
        if piece.is_contiguous() or piece.dim() == 1 or piece.numel() * piece.element_size() <= COPIED_BYTES:
            row, added = row_sums(piece.reshape(-1)[from_:to], offset + from_)
            sums[row - first : row - first + len(added)] += added
        elif len(piece) == 1:
            todo.append((piece[0], offset))
        else:
            half = len(piece) // 2
            todo += [(piece[:half], offset), (piece[half:], offset + piece[:half].numel())]
    return first, sums.cpu()


def row_sums(piece: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
    """The contribution of a piece of a tensor to the sums of its rows.

    Args:
        piece: consecutive values, one-dimensional, of any dtype.
        offset: of the piece in the whole tensor, in elements.

    Returns:
        The index of the first row, and an int64 tensor with the sums of it and the following ones.
    """
    import numpy
    import torch

    offset *= 2 if piece.element_size() == 16 else 1
    piece = _integers(piece)
    per_row = ROW_BYTES // piece.element_size()
    first, end = offset // per_row, -(-(offset + len(piece)) // per_row)
    sums = torch.empty(end - first, dtype=torch.int64, device=piece.device)
    at_once = min(8 if piece.device.type == "cpu" else 64, max((end - first) // ROWS, 1))
    words = torch.empty(at_once * ROWS, ROW_WORDS, dtype=torch.int64, device=piece.device)
    elements = words.view(-1).view(piece.dtype)
    row = first
    while row < end:  # a part of a block at both ends, and whole ones between
        place = row % ROWS
        rows = min(ROWS - place, end - row)
        count = rows if rows < ROWS else min(at_once, (end - row) // ROWS) * ROWS
        begin = row * per_row - offset
        start, stop = max(begin, 0), min(begin + count * per_row, len(piece))
        now = piece[start:stop]
        if len(now) < count * per_row:
            words[:count] = 0
        if len(now) < count * per_row or not now.is_contiguous() or now.storage_offset() * now.element_size() % 8:
            elements[start - begin : stop - begin].copy_(now)
            now = words[:count]
        now = now.view(torch.int64).view(-1, rows, ROW_WORDS)
        low, high = (weights[place : place + rows] for weights in _weights(piece.device))
        if isinstance(low, numpy.ndarray):  # numpy stores no products; a block and its weights fit into the cache
            totals = torch.empty(len(now), rows, dtype=torch.int64)
            for block, total in zip(now.numpy().view(numpy.uint64), totals.numpy().view(numpy.uint64), strict=True):
                numpy.einsum("rw,rw->r", block, low, out=total)
                total += numpy.einsum("rw,rw->r", block >> numpy.uint64(32), high)
        else:
            totals = (now * low).sum(2) + ((now >> 32) & 0xFFFFFFFF).mul_(high).sum(2)
        sums[row - first : row - first + count] = totals.flatten()
        row += count
    return first, sums


def _integers(values: torch.Tensor) -> torch.Tensor:
    """One-dimensional values as integers of their size; of complex128, two for each."""
    import torch

    if values.element_size() == 16:
        values = torch.view_as_real(values).flatten()
    return values.view(getattr(torch, _INTEGERS[values.element_size()]))


@cache
def _weights(device: torch.device | None = None) -> tuple[Any, ...]:
    """W and U for the words of one block, by row: of numpy's uint64, or tensors if torch cannot use numpy there."""
    import numpy

    index = numpy.arange(2 * BLOCK_WORDS, dtype=numpy.uint64)
    low = (2 * index + 1) * 0x9E3779B1 & 0xFFFFFFFF  # odd times odd numbers: odd, and all different
    mixed: Any = (index + 1) * 0x9E3779B97F4A7C15  # splitmix64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB
    by_row = ((mixed ^ mixed >> 31) << 32 | low).reshape(2, ROWS, ROW_WORDS)
    if device is None:
        return tuple(by_row)
    import torch

    tensors = torch.frombuffer(by_row, dtype=torch.int64).view(by_row.shape)
    if device.type == "cpu":
        with suppress(RuntimeError):  # torch was built for another numpy
            return tuple(tensors.numpy().view(numpy.uint64))
    return tuple(tensors.to(device))


def _digest(size: int, sums: Iterable[int]) -> str:
    """The digest of a tensor's size in bytes and the sums of its blocks, modulo 2^64."""
    content = b"".join((number % 2**64).to_bytes(8, "little") for number in (size, *sums))
    return hashlib.blake2b(content, digest_size=16, person=b"frozen patch 1").hexdigest()

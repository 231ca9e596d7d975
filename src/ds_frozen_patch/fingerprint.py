"""The fingerprint: a digest of one parameter's content that does not depend on ZeRO stage, world size or device.

A parameter's values, in order, are divided into blocks of 256 KiB. A block's sum is linear in its bits, so each rank
computes a partial sum from its shard, and the ranks add these up. BLAKE2b then digests the sums of all blocks in order.

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

from .common.collectives import add_up, on_any_rank, rank, world_size
from .parameters import inner_tensors, numel_of

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = 8 * BLOCK_WORDS
COPIED_BYTES = 1 << 24
"""At most so much of a tensor that is not contiguous is copied at once."""
SMALL_BYTES = 4096
"""Every rank reads a CPU tensor up to this size by itself: it is likely to be created anew for each save."""
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


def fingerprints(
    parameters: Sequence[torch.Tensor],
    device: Any = None,
    remembered: Any = None,
    *,
    all_known: bool = False,
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
        remembered: a `Memory`, to compute only what has changed since. By default, everything is computed.
        all_known: every rank is known to remember all fingerprints, so no collective is needed.
        shards: for each parameter, what this rank has of it; None if every rank has the same, or a partition of
            ZeRO-3's. By default, all are None.
    """
    import torch

    if not parameters:
        return []
    memory = Memory() if remembered is None else remembered
    if all_known:
        return [memory.recall(parameter) for parameter in parameters]
    stale = on_any_rank([not memory.holds(parameter) for parameter in parameters], device)
    own_shards = shards or [None] * len(parameters)
    todo = [
        (parameter, shard) for parameter, shard, is_stale in zip(parameters, own_shards, stale, strict=True) if is_stale
    ]
    if todo:
        counts = [_block_count(parameter, shard) for parameter, shard in todo]
        sums = torch.zeros(sum(counts), dtype=torch.int64)
        begin = 0
        for index, ((parameter, shard), count) in enumerate(zip(todo, counts, strict=True)):
            for block, added in _own_sums(parameter, shard, index):
                sums[begin + block : begin + block + len(added)] += added.cpu()
            begin += count
        sums = add_up(sums, device)
        memory.forget_what_is_gone()
        for (parameter, shard), own_sums in zip(todo, torch.split(sums, counts), strict=True):
            size = _size(parameter, shard)
            memory.keep(parameter, _digest(size, own_sums) if is_readable(parameter) else None)
    return [memory.recall(parameter) for parameter in parameters]


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


@cache
def process_memory() -> Memory:
    """The memory of this process, which loads and saves share, so that a base is read once."""
    return Memory()


class Memory:
    """A cache of fingerprints, valid as long as a tensor's storage and version stay the same.

    A write that bypasses autograd's version counter (through `.data`) is not detected.

    It has weak references to storages, not to tensors: torch does not swap tensors that have weak references
    (`torch.utils.swap_tensors`, which `Module.to` uses for tensor subclasses).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, Any, str | None]] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `recall` is up to date: the content has not changed, is small or unreadable."""
        if _is_small(tensor) or not is_readable(tensor):
            return True
        kept = self._known.get(_place(tensor))
        return kept is not None and kept[1] == _state(tensor)

    def recall(self, tensor: torch.Tensor) -> str | None:
        """The fingerprint of the tensor's current content, or None."""
        if _is_small(tensor):
            return _own_digest(tensor)
        return self._known[_place(tensor)][2] if is_readable(tensor) and self.holds(tensor) else None

    def keep(self, tensor: torch.Tensor, fingerprint: str | None) -> None:
        """Remember the fingerprint of the tensor's current content."""
        if fingerprint is None:
            return
        from torch.multiprocessing.reductions import StorageWeakRef

        storage: Any = StorageWeakRef(_content(tensor).untyped_storage())  # type: ignore[no-untyped-call]
        self._known[_place(tensor)] = (storage, _state(tensor), fingerprint)

    def forget_what_is_gone(self) -> None:
        """Forget storages that no longer exist."""
        self._known = {place: kept for place, kept in self._known.items() if not kept[0].expired()}


def block_sums(piece: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
    """The contribution of a piece of a parameter to the sums of its blocks.

    Args:
        piece: consecutive values, one-dimensional, of any dtype.
        offset: the offset of the piece in the whole parameter, in elements.

    Returns:
        The index of the first block, and an int64 tensor with the sums of it and the following ones.
    """
    import torch

    if piece.element_size() == 16:  # complex128: two elements of eight bytes
        piece, offset = torch.view_as_real(piece).flatten(), 2 * offset
    piece = piece.view(getattr(torch, _INTEGERS[piece.element_size()]))
    per_block = BLOCK_BYTES // piece.element_size()
    first, last = offset // per_block, max(offset + len(piece) - 1, offset) // per_block
    sums = torch.zeros(last - first + 1, dtype=torch.int64, device=piece.device)
    low, high = (weights.to(piece.device) for weights in _weights())
    # 2 MiB fit into a CPU's cache, and are enough for its threads; a GPU needs more work at once.
    at_once = min(8 if piece.device.type == "cpu" else 64, len(sums))
    words = torch.empty(at_once, BLOCK_WORDS, dtype=torch.int64, device=piece.device)
    weighed = torch.empty_like(words)
    elements = words.view(-1).view(piece.dtype)
    for block in range(first, last + 1, at_once):
        begin, end = max(offset, block * per_block), min(offset + len(piece), (block + at_once) * per_block)
        if end - begin < len(elements):
            words.zero_()
        start = begin - block * per_block
        elements[start : start + end - begin].copy_(piece[begin - offset : end - offset])
        torch.mul(words, low, out=weighed)
        totals = weighed.sum(1)
        words.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(high)
        totals += words.sum(1)
        place = block - first
        sums[place : place + at_once] = totals[: len(sums) - place]
    return first, sums


@cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """W and U, as int64 tensors for the words of one block."""
    import torch

    index = torch.arange(2 * BLOCK_WORDS, dtype=torch.int64)
    low = ((2 * index + 1) * 0x9E3779B1) & 0xFFFFFFFF  # odd times odd numbers: odd, and all different
    mixed = (index + 1) * -0x61C8864680B583EB  # splitmix64; >> shifts the sign in, so the mask removes it
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    weights = ((mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) << 32) | low
    return weights[:BLOCK_WORDS], weights[BLOCK_WORDS:]


def _digest(size: int, sums: torch.Tensor) -> str:
    """The digest of a parameter's size in bytes and the sums of its blocks."""
    content = size.to_bytes(8, "little") + sums.numpy().astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16, person=b"frozen patch 1").hexdigest()


def _own_sums(parameter: Any, shard: Shard | None, index: int) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's contributions to the sums of a parameter, each as the first block and consecutive sums."""
    if not is_readable(parameter):
        return
    if hasattr(parameter, "ds_tensor"):
        part, holds_first_copy = _partition(parameter)
        offset = part * parameter.ds_tensor.ds_numel
        count = min(parameter.ds_tensor.ds_numel, numel_of(parameter) - offset)  # what is beyond is padding
        if holds_first_copy and count > 0:
            yield block_sums(parameter.ds_tensor.detach().view(-1)[:count], offset)
        return
    per_block = BLOCK_BYTES // parameter.element_size()
    # Consecutive blocks for each rank, and a different first rank for each parameter, to distribute small ones too.
    copy, copies = (rank(), world_size()) if shard is None else (shard.copy, shard.copies)
    start = 0 if shard is None else shard.index * parameter.numel()
    turn = (copy + index) % copies
    blocks = _block_count(parameter, None)
    begin, end = (blocks * turn // copies) * per_block, (blocks * (turn + 1) // copies) * per_block
    for piece, offset in _pieces(parameter.detach(), 0):
        from_, to = max(begin - offset, 0), min(end - offset, piece.numel())
        if from_ < to:
            yield block_sums(piece.reshape(-1)[from_:to], start + offset + from_)


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


def _partition(parameter: Any) -> tuple[int, bool]:
    """This rank's index among ZeRO-3's partitions, and whether they are the first of several copies (MiCS)."""
    import torch.distributed as dist

    mics = getattr(parameter, "comm", None)
    group = mics.param_shard_group if mics is not None else parameter.ds_process_group
    return dist.get_rank(group), 0 in dist.get_process_group_ranks(group)


def _content(tensor: Any) -> Any:
    """The part of a tensor that this process has."""
    return getattr(tensor, "ds_tensor", tensor)


def is_readable(tensor: Any) -> bool:
    """Whether the values can be read; partitions on NVMe may not be in memory."""
    import torch

    content = _content(tensor)
    if inner_tensors(tensor) or content.layout != torch.strided or content.is_quantized or content.is_meta:
        return False
    is_here = content is tensor or (content.status.name == "AVAILABLE" and not hasattr(content, "ds_quant_scale"))
    return is_here and (content.element_size() in _INTEGERS or content.element_size() == 16)


def own_values(tensor: Any) -> torch.Tensor:
    """The values that this process has of a readable tensor, flattened; only some if it is not contiguous."""
    values: torch.Tensor = _content(tensor).detach()
    while not values.is_contiguous() and values.dim() > 1:
        values = values[0]
    return values.contiguous().view(-1)


def _is_small(tensor: Any) -> bool:
    import torch

    return (
        not isinstance(tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and is_readable(tensor)
        and tensor.numel() * tensor.element_size() <= SMALL_BYTES
    )


def _own_digest(tensor: torch.Tensor) -> str:
    """The fingerprint of a whole tensor, computed without collectives."""
    values = tensor.detach().contiguous().view(-1)
    _, sums = block_sums(values, 0)
    return _digest(values.numel() * values.element_size(), sums if len(values) else sums[:0])


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identifies a tensor as long as its storage exists."""
    content = _content(tensor)
    storage = content.untyped_storage()._cdata
    return storage, content.storage_offset(), tuple(content.shape), content.stride(), content.dtype


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Changes when the content of a tensor changes."""
    content = _content(tensor)
    return content.data_ptr(), None if content.is_inference() else content._version, content.device


def _block_count(parameter: torch.Tensor, shard: Shard | None) -> int:
    return 0 if inner_tensors(parameter) else -(-_size(parameter, shard) // BLOCK_BYTES)


def _size(parameter: torch.Tensor, shard: Shard | None) -> int:
    """The size in bytes of a parameter, with all of its shards."""
    return numel_of(parameter) * parameter.element_size() * (1 if shard is None else shard.count)

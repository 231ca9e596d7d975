"""The fingerprint: a digest of one parameter's content that does not depend on ZeRO stage, world size or device.

A parameter's values, in order, are cut into blocks of 256 KiB. A block's sum is linear in its bits, so ranks that
hold parts of it add up what they have; the sums of all blocks, in order, then go through BLAKE2b.

**The sum of a block.** Read the block as 64-bit words x_j (the last one padded with zeros), each of two 32-bit
lanes: x_j = 2^32 h_j + l_j. The sum is

    S = sum_j (W_j x_j + U_j h_j)  =  sum_j (W_j l_j + (2^32 W_j + U_j) h_j)   modulo 2^64,

so every lane has a weight of its own: W_j for l_j, and 2^32 W_j + U_j for h_j. The weights are fixed; they are odd,
no two agree in their lower 32 bits, and their upper 32 bits are pseudo-random (splitmix64).

**What it detects.** Two contents whose blocks differ in some sum differ in their fingerprints, but for a collision of
BLAKE2b. Within a block, let d_i be the differences of the lanes, |d_i| < 2^32:

- One changed lane, so any one changed element: S changes by d w with w odd, and d w = 0 modulo 2^64 only for d = 0.
- Two elements of up to 32 bits swapped: S changes by d (2^a w_i - 2^b w_j), a and b being their places in their
  lanes. If a = b, w_i - w_j has fewer than 32 factors of 2, as has 2^a d, so the product is not 0 modulo 2^64;
  if not, the factor in brackets is 2^min(a,b) times an odd number, and again it is not.
- Any other change is caught unless the sum of d_i w_i happens to be 0. With weights drawn at random that has a
  probability of 2^-(63-k), k being the least number of factors of 2 among the d_i: 2^-63 as a rule, never above 2^-32.
  (The multilinear family; see Lemire and Kaser, "Strongly universal string hashing is fast", 2014.)

It is no defence against somebody who builds a base to collide: the weights are public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = 8 * BLOCK_WORDS
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def fingerprints(
    parameters: Sequence[torch.nn.Parameter],
    device: Any = None,
    remembered: Any = None,
    *,
    all_known: bool = False,
) -> list[str | None]:
    """The fingerprint of each parameter, 32 hexadecimal digits; None where its values cannot be read.

    Every rank must call it with the same parameters in the same order. A parameter that ZeRO-3 has partitioned is
    read where it lies, and the ranks add up; one that every rank holds is split among them by blocks. Unreadable are
    partitions that are quantized or swapped out to NVMe.

    Args:
        parameters: whole or partitioned, of any dtype, shape and device.
        device: where the ranks' sums are added up, such as the engine's; by default the CPU.
        remembered: a `Memory`, to compute only what has changed since. By default, everything is computed.
        all_known: the ranks have told each other that each of them remembers all; then they need not meet.
    """
    import torch

    if not parameters:
        return []
    memory = Memory() if remembered is None else remembered
    if all_known:
        return [memory.recall(parameter) for parameter in parameters]
    stale = on_any_rank([not memory.holds(parameter) for parameter in parameters], device)
    todo = [parameter for parameter, is_stale in zip(parameters, stale, strict=True) if is_stale]
    if todo:
        counts = [_block_count(parameter) for parameter in todo]
        sums = torch.zeros(sum(counts), dtype=torch.int64)
        begin = 0
        for index, (parameter, count) in enumerate(zip(todo, counts, strict=True)):
            for block, found in _own_sums(parameter, index):
                sums[begin + block : begin + block + len(found)] += found.cpu()
            begin += count
        sums = _added_up(sums, device)
        for parameter, own in zip(todo, torch.split(sums, counts), strict=True):
            size = numel_of(parameter) * parameter.element_size()
            memory.keep(parameter, _digest(size, own) if _is_readable(parameter) else None)
    return [memory.recall(parameter) for parameter in parameters]


def on_any_rank(flags: list[bool], device: Any) -> list[bool]:
    """Whether each of some flags is set on one of the ranks, which all must call it with as many.

    Args:
        flags: this rank's.
        device: as of `fingerprints`.
    """
    import torch

    return [count > 0 for count in _added_up(torch.tensor(flags, dtype=torch.int32), device).tolist()]


def of_stream(dtype: str, numel: int, chunks: Iterable[bytes | bytearray | memoryview]) -> str:
    """The fingerprint of a whole parameter whose content comes in pieces, in this process alone.

    Args:
        dtype: torch's name of it, such as "bfloat16".
        numel: the number of its elements.
        chunks: its bytes, in order; each of a whole number of elements.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    size = numel * kind.itemsize
    sums = torch.zeros(-(-size // BLOCK_BYTES), dtype=torch.int64)
    offset = 0
    for chunk in chunks:
        piece = torch.frombuffer(chunk, dtype=kind)
        block, found = block_sums(piece, offset)
        sums[block : block + len(found)] += found
        offset += len(piece)
    return _digest(size, sums)


@cache
def process_memory() -> Memory:
    """The one memory of this process: loads and saves share it, so that a base is read once."""
    return Memory()


class Memory:
    """The fingerprints that were computed before, valid as long as a parameter's storage and version stay the same.

    A write that goes past autograd's version counter (through `.data`) goes unnoticed.
    """

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._known: Any = WeakTensorKeyDictionary()

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the fingerprint is known and the content has not changed since."""
        known = self._known.get(parameter)
        return known is not None and known[0] == _state(parameter)

    def recall(self, parameter: torch.nn.Parameter) -> str | None:
        """The last fingerprint that was kept, or None."""
        known = self._known.get(parameter)
        return known[1] if known else None

    def keep(self, parameter: torch.nn.Parameter, fingerprint: str | None) -> None:
        """Remember the fingerprint of what the parameter holds now."""
        self._known[parameter] = (_state(parameter), fingerprint)


def block_sums(piece: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
    """The sums that a piece of a parameter adds to the blocks that it touches.

    Args:
        piece: consecutive values, one-dimensional, of any dtype.
        offset: where in the whole parameter its first value stands, in elements.

    Returns:
        The number of the first block, and an int64 tensor with the sum of it and of those that follow.
    """
    import torch

    if piece.element_size() == 16:  # complex128: two elements of eight bytes
        piece, offset = torch.view_as_real(piece).flatten(), 2 * offset
    piece = piece.view(getattr(torch, _INTEGERS[piece.element_size()]))
    per_block = BLOCK_BYTES // piece.element_size()
    first, last = offset // per_block, max(offset + len(piece) - 1, offset) // per_block
    sums = torch.zeros(last - first + 1, dtype=torch.int64, device=piece.device)
    low, high = (weights.to(piece.device) for weights in _weights())
    # 1 MiB stays in a CPU's cache, and is enough for its threads to share; a GPU wants more to do at once.
    at_once = min(4 if piece.device.type == "cpu" else 64, len(sums))
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
        found = weighed.sum(1)
        words.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(high)
        found += words.sum(1)
        place = block - first
        sums[place : place + at_once] = found[: len(sums) - place]
    return first, sums


@cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """W and U, int64 tensors of one block's words."""
    import torch

    index = torch.arange(2 * BLOCK_WORDS, dtype=torch.int64)
    low = ((2 * index + 1) * 0x9E3779B1) & 0xFFFFFFFF  # odd times odd numbers: odd, and all different
    mixed = (index + 1) * -0x61C8864680B583EB  # splitmix64; >> shifts the sign in, so the mask takes it out
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    weights = ((mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) << 32) | low
    return weights[:BLOCK_WORDS], weights[BLOCK_WORDS:]


def _digest(size: int, sums: torch.Tensor) -> str:
    """Of a parameter's size in bytes, and the sums of its blocks."""
    content = size.to_bytes(8, "little") + sums.numpy().astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16, person=b"frozen patch 1").hexdigest()


def _own_sums(parameter: torch.nn.Parameter, index: int) -> Iterator[tuple[int, torch.Tensor]]:
    """What this rank adds to the sums of a parameter: by first block, the sums of it and of those that follow."""
    if not _is_readable(parameter):
        return
    if hasattr(parameter, "ds_tensor"):
        rank, holds_first_copy = _partition(parameter)
        offset = rank * parameter.ds_tensor.ds_numel
        count = min(parameter.ds_tensor.ds_numel, numel_of(parameter) - offset)  # what is beyond is padding
        if holds_first_copy and count > 0:
            yield block_sums(parameter.ds_tensor.detach().view(-1)[:count], offset)
        return
    rank, world_size = _rank_and_world_size()
    per_block = BLOCK_BYTES // parameter.element_size()
    # Whole runs of blocks, and another rank first for each parameter, so that small ones are shared out too.
    turn = (rank + index) % world_size
    blocks = _block_count(parameter)
    begin, end = (blocks * turn // world_size) * per_block, (blocks * (turn + 1) // world_size) * per_block
    for piece, offset in _pieces(parameter.detach(), 0):
        from_, to = max(begin - offset, 0), min(end - offset, len(piece))
        if from_ < to:
            yield block_sums(piece[from_:to], offset + from_)


def _pieces(values: torch.Tensor, offset: int) -> Iterator[tuple[torch.Tensor, int]]:
    """One-dimensional views of a tensor in its order, copied only where it is not contiguous."""
    if values.is_contiguous():
        yield values.view(-1), offset
    elif values.dim() == 1:
        yield values.contiguous(), offset
    else:
        for row in values:
            yield from _pieces(row, offset)
            offset += row.numel()


def _partition(parameter: Any) -> tuple[int, bool]:
    """This rank's place among ZeRO-3's partitions, and whether they are the first of several copies (MiCS)."""
    import torch.distributed as dist

    mics = getattr(parameter, "comm", None)
    group = mics.param_shard_group if mics is not None else parameter.ds_process_group
    return dist.get_rank(group), 0 in dist.get_process_group_ranks(group)


def _is_readable(parameter: torch.nn.Parameter) -> bool:
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return True
    return not hasattr(partition, "ds_quant_scale") and partition.status.name == "AVAILABLE"


def _state(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    """What changes when the content of a parameter does, or its storage is replaced."""
    content: Any = getattr(parameter, "ds_tensor", parameter)
    return content.data_ptr(), content._version, content.dtype, content.device, tuple(content.shape)


def numel_of(parameter: torch.nn.Parameter) -> int:
    """The elements of a whole parameter, also where ZeRO-3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _block_count(parameter: torch.nn.Parameter) -> int:
    return -(-numel_of(parameter) * parameter.element_size() // BLOCK_BYTES)


def _rank_and_world_size() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _added_up(sums: torch.Tensor, device: Any) -> torch.Tensor:
    import torch.distributed as dist

    if not dist.is_initialized():
        return sums
    shared = sums.to(device)
    dist.all_reduce(shared)
    return shared.cpu()

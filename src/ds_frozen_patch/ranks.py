"""Communication between ranks: small collectives, and the process group's store."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def world_size() -> int:
    """The number of ranks, 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The rank, 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def gather_numbers(numbers: Sequence[int], device: Any) -> list[list[int]]:
    """Gather the numbers of all ranks in one collective, which is also a barrier.

    Every rank must call it, with equally many numbers.

    Args:
        numbers: integers of 64 bits.
        device: where the process group's backend can reach a tensor.

    Returns:
        The numbers of each rank, by rank.
    """
    import torch
    import torch.distributed as dist

    if world_size() == 1:
        return [list(numbers)]
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    by_rank: list[list[int]] = torch.stack(everyone).tolist()
    return by_rank


def add_up(numbers: torch.Tensor, device: Any) -> torch.Tensor:
    """Add the tensors of all ranks, element by element; every rank must call it with the same shape and dtype.

    Args:
        numbers: integers, on the CPU.
        device: as for `gather_numbers`.

    Returns:
        The sums, on the CPU.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return numbers
    shared = numbers.to(device)
    dist.all_reduce(shared)
    return shared.cpu()


def on_any_rank(flags: list[bool], device: Any) -> list[bool]:
    """For each flag, whether it is set on any rank; every rank must call it with the same number of flags.

    Its size does not depend on the number of ranks, unlike that of `gather_numbers`.

    Args:
        flags: those of this rank.
        device: as for `gather_numbers`.
    """
    import torch

    return [count > 0 for count in add_up(torch.tensor(flags, dtype=torch.int32), device).tolist()]


def gather(item: Any) -> list[Any]:
    """Gather an object of each rank; every rank must call it. Slower than `gather_numbers`, so for rare cases."""
    import torch.distributed as dist

    if world_size() == 1:
        return [item]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, item)
    return everyone


def digest(value: object) -> int:
    """A hash of 63 bits of the `repr` of a value; never 0."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1 or 1


def default_store() -> Any | None:
    """The key-value store of the default process group, or None: one rank alone, or a backend without one (MPI)."""
    import torch.distributed as dist

    if world_size() == 1:
        return None
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return get() if get is not None else None

"""The fingerprint of partitioned parameters that CPU ranks cannot train, laid out by hand as ZeRO-3 does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_frozen_patch.fingerprint import BLOCK_BYTES, fingerprints, read

pytestmark = [pytest.mark.promise(5), pytest.mark.everyday]


def partitioned(whole: torch.Tensor, group: Any, **more: Any) -> torch.nn.Parameter:
    """Return a parameter of which this rank has its partition among `group`, padded with garbage."""
    size = -(-whole.numel() // dist.get_world_size(group))
    part = torch.full((size,), 7.0, dtype=whole.dtype)
    begin = size * dist.get_rank(group)
    own = whole.flatten()[begin : begin + size]
    part[: len(own)] = own
    parameter: Any = torch.nn.Parameter(torch.empty(0, dtype=whole.dtype), requires_grad=False)
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = part, whole.numel(), whole.shape
    part.ds_numel, part.status = size, SimpleNamespace(name="AVAILABLE")  # type: ignore[attr-defined]
    parameter.ds_process_group = group
    for name, value in more.items():
        setattr(parameter, name, value)
    return parameter  # type: ignore[no-any-return]


SIZES = [0, 1, 2, 5, 1000, BLOCK_BYTES // 2, BLOCK_BYTES // 2 * 3 + 1]


def lay_out(mics: bool) -> tuple[list[str | None], list[str | None], list[str | None]]:
    from deepspeed.comm import init_distributed

    init_distributed("gloo")
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(size, generator=generator).bfloat16() for size in SIZES]
    group, more = dist.group.WORLD, {}
    if mics:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        more = {"comm": SimpleNamespace(param_shard_group=halves[dist.get_rank() // 2])}
        shards = halves[dist.get_rank() // 2]
        parts = [partitioned(whole, shards, **more) for whole in wholes]
    else:
        parts = [partitioned(whole, group) for whole in wholes]
    whole_prints = fingerprints([read(torch.nn.Parameter(whole, requires_grad=False)) for whole in wholes])
    found = fingerprints([read(part) for part in parts])
    unreadable: list[Any] = [partitioned(wholes[4], group) for _ in range(3)]
    unreadable[0].ds_tensor.ds_quant_scale = torch.ones(1)
    unreadable[1].ds_tensor.status.name = "NOT_AVAILABLE"
    if dist.get_rank() == 0:  # the other ranks can read theirs
        unreadable[2].ds_tensor.status.name = "NOT_AVAILABLE"
    return whole_prints, found, fingerprints([read(parameter) for parameter in unreadable])


@pytest.mark.short
@pytest.mark.parametrize(("world_size", "mics"), [(2, False), (3, False), (4, True)])
def test_any_partitioning(ranks: Any, world_size: int, mics: bool) -> None:
    results = ranks(world_size, lay_out, mics=mics)
    for whole, partitioned_, unreadable in results:
        assert partitioned_ == whole
        assert None not in whole
        assert unreadable == [None, None, None]
        assert results[0][0] == whole
    assert len(set(results[0][0])) == len(SIZES)

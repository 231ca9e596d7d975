"""The fingerprint on its own: what it does not depend on, and what it must detect."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from ds_frozen_patch import fingerprint as fingerprint_module
from ds_frozen_patch.fingerprint import (
    BLOCK_BYTES,
    ROW_BYTES,
    ROWS,
    _weights,
    changes,
    fingerprints,
    of_stream,
    read,
    row_sums,
)

NAMES = ["bfloat16", "float16", "float32", "float64", "int8", "bool", "complex64", "complex128", "float8_e4m3fn"]
DTYPES = [getattr(torch, name) for name in NAMES]


def bits(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return values of every bit pattern, NaNs included."""
    made = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (made.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def fingerprint(values: torch.Tensor) -> str:
    (found,) = fingerprints([read(torch.nn.Parameter(values, requires_grad=False))])
    assert found is not None
    return found


def test_torch_without_numpy_gives_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and where torch was built for another numpy."""
    values = bits((3 * BLOCK_BYTES + 7,), torch.int8)
    first, by_numpy = row_sums(values, 5)
    weights = tuple(torch.from_numpy(weights.view(numpy.int64)) for weights in _weights(torch.device("cpu")))
    monkeypatch.setattr(fingerprint_module, "_weights", lambda _: weights)
    assert row_sums(values, 5)[0] == first
    assert torch.equal(row_sums(values, 5)[1], by_numpy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_partitions_add_up(dtype: torch.dtype) -> None:
    """Any partitioning, at any element, gives the sums of the whole tensor."""
    values = bits((3 * BLOCK_BYTES // torch.empty(0, dtype=dtype).element_size() + 7,), dtype)
    first, whole = row_sums(values, 0)
    assert first == 0
    assert len(whole) == 3 * ROWS + 1
    pick = random.Random(0)
    for _ in range(5):
        cuts = sorted([0, len(values), *(pick.randrange(len(values)) for _ in range(pick.choice([1, 2, 9])))])
        total = torch.zeros_like(whole)
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                first, sums = row_sums(values[begin:end], begin)
                total[first : first + len(sums)] += sums
        assert torch.equal(total, whole)
        content = values.view(torch.uint8).numpy().tobytes()
        cuts = sorted([0, len(content), *(pick.randrange(len(content)) for _ in range(pick.choice([1, 2, 9])))])
        chunks = [memoryview(content)[begin:end] for begin, end in itertools.pairwise(cuts)]
        assert of_stream(len(content), chunks) == of_stream(len(content), [content]) == fingerprint(values)


def test_layout_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_frozen_patch.fingerprint.COPIED_BYTES", 4 << 10)  # rows of 3 kB, and of 300 kB
    values = bits((300, 500, 3))
    assert fingerprint(values.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == fingerprint(values)
    assert fingerprint(torch.cat([values, values])[300:]) == fingerprint(values)
    strided = torch.stack([values.flatten(), values.flatten()], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert fingerprint(strided) == fingerprint(values.flatten())


@pytest.mark.parametrize("rows", [(0, 1), (0, 4095), (17, 17 + 512), (1000, 3000), None])
@pytest.mark.parametrize("width", [64, 67, 128])
def test_rearranged_rows(width: int, rows: tuple[int, int] | None) -> None:
    """Two rows swapped, or each row rolled by one."""
    values = bits((4096, width))
    changed = values.clone()
    words = changed.view(torch.int16)
    if rows:
        words[list(rows)] = words[list(reversed(rows))]
    else:
        words.copy_(words.roll(1, 1))
    assert fingerprint(changed) != fingerprint(values)


def test_one_bit_anywhere() -> None:
    """Each bit of a few words at either end of a block, and random bits."""
    values = bits((2 * BLOCK_BYTES // 2,))
    words = values.view(torch.int64)
    before = fingerprint(values)
    pick = random.Random(0)
    ends = [0, 1, BLOCK_BYTES // 8 - 1, BLOCK_BYTES // 8, len(words) - 1]
    for place in [*ends, *(pick.randrange(len(words)) for _ in range(5))]:
        for bit in range(64):
            flip = torch.tensor(1, dtype=torch.int64) << bit
            words[place] ^= flip
            assert fingerprint(values) != before
            words[place] ^= flip
    assert fingerprint(values) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_changes(dtype: torch.dtype, strided: bool) -> None:
    """A change of one value is in one share of the rows at most, a change of all values in the samples of each."""
    sizes, per_row = (1, 1000, 9, 40), ROW_BYTES // torch.empty(0, dtype=dtype).element_size()
    shapes = [(max(size * per_row // 4, 1), 2 if strided else 1) for size in sizes]
    before = [bits(shape, dtype, seed)[:, 0] for seed, shape in enumerate(shapes)]
    contents = [read(values) for values in before]

    def changed(now: list[torch.Tensor], rows: range | None) -> list[bool]:
        return changes([(content, values, None) for content, values in zip(contents, now, strict=True)], rows)

    count = sum(len(content.sums) for content in contents if content.sums is not None)
    shares = [range(count * turn // 7, count * (turn + 1) // 7) for turn in range(7)]
    assert not any(flag for rows in (None, range(0), *shares) for flag in changed(before, rows))
    pick = random.Random(0)
    for number, values in enumerate(before):
        for place in {0, len(values) - 1, *(pick.randrange(len(values)) for _ in range(5))}:
            other = [each.clone() for each in before]
            other[number][place : place + 1].view(torch.uint8)[0] ^= 1
            expected = [each == number for each in range(len(before))]
            assert changed(other, None) == expected
            seen = [changed(other, rows) for rows in shares]
            assert [any(flags) for flags in zip(*seen, strict=True)] == expected
            in_sample = changed(other, range(0))[number]
            assert in_sample or sum(map(any, seen)) == 1
    other = [bits(shape, dtype, 9)[:, 0] for shape in shapes]
    differ = [fingerprint(values) != fingerprint(now) for values, now in zip(before, other, strict=True)]
    assert all(changed(other, rows) == differ for rows in (None, range(0), *shares))
    assert changed([before[0].unsqueeze(1), *before[1:]], range(0)) == [True, False, False, False]


def test_padding_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last partition of ZeRO-3 may be longer than what is left of a parameter."""
    parameter: Any = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    partition: Any = torch.arange(6.0)
    parameter.ds_tensor, parameter.ds_shape, partition.status = partition, (10,), SimpleNamespace(name="AVAILABLE")
    monkeypatch.setattr("ds_frozen_patch.fingerprint.range_of_partition", lambda _: (6, 10))
    content = read(parameter)
    for place, is_changed in ((4, False), (3, True)):
        partition[place] = -1
        assert [changes([(content, parameter, None)], rows) for rows in (None, range(0))] == [[is_changed]] * 2


def test_weights_satisfy_the_proof() -> None:
    weights = torch.from_numpy(numpy.concatenate(_weights(torch.device("cpu"))).view("int64")).flatten()
    assert bool((weights & 1).all())
    assert len(set((weights & 0xFFFFFFFF).tolist())) == len(weights)
    # Fixed for ever: a fingerprint on disk must mean the same in every release.
    assert fingerprint(torch.arange(-50000, 50000, dtype=torch.int32)) == KNOWN


KNOWN = "dd7c5e55e6d66723bffe159993fb119d"

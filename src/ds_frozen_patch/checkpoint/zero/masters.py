"""The fp32 masters: the trained weights as the optimizer keeps them, in shards of the ranks.

In ZeRO 1 and 2 each parameter group is one flat tensor, in the order of `param_shapes`, cut into one shard per rank. In
ZeRO-3 each parameter is cut into shards of equal size, and a rank's shards follow each other.
`deepspeed.utils.zero_to_fp32` reads them in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ...common.errors import CheckpointError, named
from ...parameters import plain
from ..dtypes import FLOATING
from ..format.records import Piece, Records, TensorSource, from_stored, pieces_of_range
from ..format.stored import StoredTensor, iter_tensors
from .partitions import ALIGNMENT, Shapes, group_shard_size, numel, parameter_offsets, parameter_shard_size
from .states import States, groups_in_memory, masters_key

SAMPLE = 64
"""How many elements of each rank's shard of a master `check_masters_match` compares."""


def locate_masters(states: States, groups: Sequence[Shapes]) -> dict[str, TensorSource]:
    """The fp32 masters by name, in the order of the optimizer; none if the optimizer has none of its own.

    Raises:
        CheckpointError: a file has no masters, or too few or too many elements of them.
    """
    if not states.optimizers:
        return _masters_of_stage_0(states, groups)
    if not groups:
        return {}
    shards = [
        _flat_tensors(state, "fp32_flat_groups") or _flat_tensors(state, "single_partition_of_fp32_groups")
        for state in states.optimizers
    ]
    if not all(shards) or any(tensor.dtype not in FLOATING for tensors in shards for tensor in tensors):
        raise CheckpointError(f"{states.layout.root} has no fp32 master weights among its optimizer states.")
    masters: dict[str, TensorSource] = {}
    if states.zero_stage == 3:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        sizes = {name: parameter_shard_size(shape, len(shards)) for name, shape in shapes.items()}
        expected = [sum(sizes.values())] * len(shards)
        _check_master_sizes(states, [sum(item.numel for item in tensors) for tensors in shards], expected)
        begin = 0
        for name, shape in shapes.items():
            pieces = [piece for tensors in shards for piece in pieces_of_range(tensors, begin, sizes[name])]
            masters[name] = TensorSource(shards[0][0].dtype, tuple(shape), without_padding(pieces, prod(shape)))
            begin += sizes[name]
        return masters
    for index, (group, flat) in enumerate(zip(groups, groups_in_memory(states, groups), strict=True)):
        for file, tensors in zip(states.layout.optimizer, shards, strict=True):
            if len(tensors) <= index:
                raise CheckpointError(
                    f"{file} lacks the masters of parameter group {index}. Get a complete copy of it."
                )
        flats = [tensors[index] for tensors in shards]
        size, shard = numel(flat), group_shard_size(flat, len(shards))
        least = [min(max(size - rank * shard, 0), shard) for rank in range(len(flats))]
        _check_master_sizes(states, [flat.numel for flat in flats], least, ALIGNMENT * len(shards))
        begins = parameter_offsets(flat)
        for name, shape in group.items():
            masters[name] = TensorSource(
                flats[0].dtype, tuple(shape), pieces_of_range(flats, begins[name], prod(shape))
            )
    return masters


def _masters_of_stage_0(states: States, groups: Sequence[Shapes]) -> dict[str, TensorSource]:
    """In 16 bits, there is a master for each parameter, or a flat one for each group. None if they do not fit these."""
    optimizer: Any = states.models[0].get("optimizer")
    saved = optimizer[masters_key(optimizer)] if masters_key(optimizer) else None
    if not isinstance(saved, list) or len(saved) != len(groups):
        return {}
    masters: dict[str, TensorSource] = {}
    for group, of_group in zip(groups, saved, strict=True):
        tensors, begins = [tensor for _, tensor in iter_tensors(of_group)], parameter_offsets(group)
        if [tensor.shape for tensor in tensors] == [tuple(shape) for shape in group.values()]:
            masters |= {name: from_stored(tensor) for name, tensor in zip(group, tensors, strict=True)}
        elif len(tensors) == 1 and tensors[0].numel == numel(group) and tensors[0].is_contiguous:
            for name, shape in group.items():
                pieces = pieces_of_range(tensors, begins[name], prod(shape))
                masters[name] = TensorSource(tensors[0].dtype, tuple(shape), pieces)
        else:
            return {}
    left_out = states.record.names
    # An optimizer over all parameters has masters of what is left out too.
    return {name: master for name, master in masters.items() if plain(name) not in left_out}


def without_padding(pieces: Sequence[Piece], count: int) -> tuple[Piece, ...]:
    """The first `count` elements of some pieces."""
    kept = []
    for piece in pieces:
        if count > 0:
            kept.append(Piece(piece.storage, piece.begin, min(piece.count, count)))
        count -= piece.count
    return tuple(kept)


def check_masters_match(masters: Mapping[str, TensorSource], halves: Mapping[str, TensorSource]) -> None:
    """Raise CheckpointError if the masters are not those of the model's weights: a file is from another run.

    The first elements of each rank's shard are compared; most of them must agree, except for rounding. ZeRO-3 does not
    save the weights that this needs.

    Args:
        masters: the trained weights from the optimizer.
        halves: the weights that the model computed with.
    """
    different: dict[str, set[str]] = {}
    with Records(check=False) as records:
        for name, half in halves.items():
            begin, (place,) = 0, half.pieces
            for piece in masters[name].pieces:
                count = min(piece.count, SAMPLE)
                samples = (
                    (masters[name].dtype, Piece(piece.storage, piece.begin, count)),
                    (half.dtype, Piece(place.storage, place.begin + begin, count)),
                )
                master, weight = (
                    _unpack_numbers(records.read(TensorSource(dtype, (count,), (sample,))), dtype)
                    for dtype, sample in samples
                )
                agree = sum(abs(m - w) <= 0.01 * abs(m) + 1e-6 for m, w in zip(master, weight, strict=True))
                if 2 * agree < count:
                    files = (piece.storage.path.name, place.storage.path.name)
                    different.setdefault(name, set()).update(files)
                begin += piece.count
    if different:
        raise CheckpointError(
            f"{' and '.join(sorted(set().union(*different.values())))} are not from one run: the optimizer's masters"
            f" differ from the model's weights: {named(list(different), 3)}. Take all files from one checkpoint."
        )


def _check_master_sizes(states: States, sizes: Sequence[int], expected: Sequence[int], padding: int = 0) -> None:
    """Raise CheckpointError if the masters have too few or too many elements, and name the file that is wrong.

    Args:
        states: of the checkpoint.
        sizes: the number of elements that each rank's file contains.
        expected: the number that it should contain.
        padding: how many more all files together may contain.
    """
    if sum(expected) <= sum(sizes) <= sum(expected) + padding and (padding or list(sizes) == list(expected)):
        return
    wrong = [rank for rank, (size, wanted) in enumerate(zip(sizes, expected, strict=True)) if size != wanted]
    rank = next((rank for rank in wrong if sizes[rank] < expected[rank]), wrong[0])
    raise CheckpointError(
        f"{states.layout.optimizer[rank]} does not fit the model's states: the masters have {sizes[rank]} elements"
        f" instead of {expected[rank]}. It is from another run, or they are on NVMe; take all files from one"
        " checkpoint."
    )


def _flat_tensors(state: Mapping[str, Any], key: str) -> list[StoredTensor]:
    """The flat tensors of a rank, in the order of the groups."""
    entries = sorted(iter_tensors(state.get(key)), key=lambda item: [str(k).zfill(9) for k in item[0]])
    return [tensor for _, tensor in entries if tensor.is_contiguous]


def _unpack_numbers(content: bytearray, dtype: str) -> Sequence[float]:
    if dtype == "bfloat16":  # the upper half of an fp32
        content = bytearray(b"".join(b"\0\0" + content[i : i + 2] for i in range(0, len(content), 2)))
    code, width = {"float16": ("e", 2), "float64": ("d", 8)}.get(dtype, ("f", 4))
    return struct.unpack(f"<{len(content) // width}{code}", content)

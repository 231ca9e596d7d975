"""The tensors of an output, each with what reads it, and the files that they are written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.dtypes import convert, output_dtype
from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.format.safetensors import write_file
from ..checkpoint.format.stored import ITEM_SIZES, Storage, whole_tensor
from ..checkpoint.format.writing import write_archive

TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of an output: its dtype and shape there, what reads its content, and how many bytes that reads."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Records], memoryview]
    cost: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


Tensors = Mapping[str, OutputTensor]
Aliases = Mapping[str, str]
"""The name of the tensor that each tied alias is."""


def converted(source: TensorSource, dtype: str | None) -> OutputTensor:
    """A tensor of a checkpoint; with a dtype, a floating-point one is converted to it."""
    to = output_dtype(source.dtype, dtype)

    def read(records: Records) -> memoryview:
        return convert(records.read(source), source.dtype, to)

    return OutputTensor(to, source.shape, read, source.nbytes)


def write_shard(file: Path, tensors: Tensors, aliases: Aliases, records: Records) -> None:
    """Write a safetensors file. It contains tied tensors once, and the aliases as metadata, as the library does it."""
    about = {alias: name for alias, name in aliases.items() if name in tensors}
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(2) as pool:  # two are in memory at most: both read, or one read and one written
        reads = chain((pool.submit(tensor.read, records) for tensor in tensors.values()), [None])
        write_file(file, entries, (read.result() for read, _ in pairwise(reads) if read), about)


def write_folder(folder: Path, shards: Mapping[str, Tensors], aliases: Aliases, records: Records) -> None:
    """Write a new folder of safetensors files, and their index."""
    folder.mkdir()
    for name, tensors in shards.items():
        write_shard(folder / name, tensors, aliases, records)
    if len(shards) > 1:
        size = sum(tensor.size for tensors in shards.values() for tensor in tensors.values())
        where = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def write_torch(
    file: Path,
    state: Mapping[str, Any],
    tensors: Tensors,
    aliases: Aliases,
    pickled: Mapping[str, Any],
    records: Records,
) -> None:
    """Write a file of `torch.save`: a state, and as its `state_dict` tensors and what the pickle of a file says."""
    weights = {**pickled, **{name: whole_tensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}}
    weights |= {alias: weights[name] for alias, name in aliases.items() if name in weights}

    def content(storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        if storage.file is None:
            yield tensors[storage.key].read(records)
        else:
            yield from records.content(storage, begin, count)

    write_archive(file, {**state, "state_dict": weights}, content)

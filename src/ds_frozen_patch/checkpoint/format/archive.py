"""Read the state in a file of `torch.save` without torch, and without running any of its code.

Such a file is a zip archive of `data.pkl` and a record of raw bytes for each storage. Only the pickle is read, and
becomes plain values.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...common.errors import CheckpointError
from .stored import ITEM_SIZES, StoredTensor, iter_tensors
from .unpickling import unpickle
from .zip_directory import Record, open_regular, read_chunks, read_directory, storage_records


class UnreadableError(CheckpointError):
    """A pickle has what only torch can read."""


@dataclass(frozen=True)
class Contents:
    """The state in a file, the size of its pickle, and the names in it that are not expected in a checkpoint."""

    state: Any
    pickle_bytes: int
    unexpected: frozenset[str] = frozenset()


_VERSION = re.compile(rb"([1-9]|10)\n?")
"""The versions of the format that torch supports."""


def read_archive(path: Path, *, trust: bool = False) -> Contents:
    """Read the state in a file of `torch.save`, but no tensors.

    Args:
        path: the file.
        trust: accept stand-ins for any class. By default, unexpected classes are an error, because `torch.load` would
            run their code.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, of another kind, or names an unexpected class;
            UnreadableError: its pickle has values that are not read here.
    """
    try:
        content, sizes = _read_pickle(path)
    except Exception as error:  # whatever a damaged archive leads to
        raise CheckpointError(
            f"{path} cannot be read, is truncated, damaged, or not a file of torch.save ({error}). Get a complete copy"
            " of it."
        ) from None
    try:
        state, unexpected = unpickle(path, content, trust)
        tensors = {tensor for _, tensor in iter_tensors(state)}
        for tensor in tensors:
            _check_within_records(tensor, sizes)
        if sum(tensor.numel * ITEM_SIZES[tensor.dtype] for tensor in tensors) > 10 * sum(sizes.values()) + (1 << 26):
            raise ValueError("its tensors claim far more elements than it contains")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise UnreadableError(
            f"{path} has a value that these tools do not support ({type(error).__name__}: {error}). A resume may load"
            " it all the same."
        ) from None
    return Contents(state, len(content), unexpected)


def _read_pickle(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of a file, and the size of each storage's record; allocates no more than the size of the file."""
    with open_regular(path) as file:
        records = read_directory(file)
        if not _VERSION.fullmatch(_read_small_record(file, records, "version")):
            raise ValueError("its version of the format is unknown to torch")
        if "byteorder" in records and _read_small_record(file, records, "byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        content = _read_record(file, records["data.pkl"])
    return content, {key: record.size for key, record in storage_records(records).items()}


def _read_small_record(file: IO[bytes], records: Mapping[str, Record], name: str) -> bytes:
    """The content of a record that must be small."""
    if records[name].size > 64:
        raise ValueError(f"its record {name} is too large")
    return _read_record(file, records[name])


def _read_record(file: IO[bytes], record: Record) -> bytes:
    content = b"".join(read_chunks(file, record))
    if record.checksum not in (None, zlib.crc32(content)):
        raise ValueError(f"the checksum of its record {record.name} is wrong")
    return content


def _check_within_records(tensor: StoredTensor, sizes: dict[str, int]) -> None:
    storage, width = tensor.storage, ITEM_SIZES[tensor.dtype]
    if sizes.get(storage.key) != storage.nbytes:
        raise ValueError(f"record {storage.key} has {sizes.get(storage.key)} bytes, not {storage.nbytes}")
    if (tensor.offset + tensor.extent) * width > storage.nbytes:
        raise ValueError(f"a tensor goes beyond record {storage.key}")

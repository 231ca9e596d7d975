"""A file of `torch.save` seen from outside: what its pickle says, without torch, and without running any of it.

Such a file is a zip archive: `data.pkl`, and a record of raw bytes for each storage. Here the pickle becomes plain
values, and no tensor's bytes are read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...common.errors import CheckpointError
from .stored import ITEM_SIZES, StoredTensor, tensors
from .unpickling import unpickled
from .zip_directory import Record, by_key, chunks, open_regular, read_directory


@dataclass(frozen=True)
class Contents:
    """What a file's pickle holds, how many bytes it has, and what it names that is not expected in a checkpoint."""

    state: Any
    pickle_bytes: int
    unexpected: frozenset[str] = frozenset()


_VERSION = re.compile(rb"([1-9]|10)\n?")
"""The versions of the format that torch reads."""


def read(path: Path, *, trust: bool = False) -> Contents:
    """Read what one file of `torch.save` holds, and no tensor's bytes.

    Args:
        path: the file.
        trust: take stand-ins for classes of any module. Without it, one that is not expected in a checkpoint is an
            error that names it: whoever loads the file by torch's own means would run its code.

    Raises:
        CheckpointError: the file is not there, cut, damaged, of another kind, or names an unexpected class.
    """
    try:
        content, sizes = _content(path)
    except Exception as error:  # whatever a damaged archive leads to
        raise CheckpointError(
            f"{path} cannot be read, is cut, damaged, or no file of torch.save ({error}). Take a whole copy of it."
        ) from None
    try:
        state, unexpected = unpickled(path, content, trust)
        found = {tensor for _, tensor in tensors(state)}
        for tensor in found:
            _check(tensor, sizes)
        if sum(tensor.numel * ITEM_SIZES[tensor.dtype] for tensor in found) > 10 * sum(sizes.values()) + (1 << 26):
            raise ValueError("its tensors say that they have far more elements than there are")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"The pickle in {path} is damaged ({type(error).__name__}: {error}). Take a whole copy of the file."
        ) from None
    return Contents(state, len(content), unexpected)


def _content(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of a file, and the size of each record of a storage; nothing larger than the file is ever made."""
    with open_regular(path) as file:
        records = read_directory(file)
        if not _VERSION.fullmatch(_small(file, records, "version")):
            raise ValueError("it is of a version of the format that torch does not know")
        if "byteorder" in records and _small(file, records, "byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        content = _whole(file, records["data.pkl"])
    return content, {key: record.size for key, record in by_key(records).items()}


def _small(file: IO[bytes], records: Mapping[str, Record], name: str) -> bytes:
    """The bytes of a record that has a few."""
    if records[name].size > 64:
        raise ValueError(f"its record {name} is too large")
    return _whole(file, records[name])


def _whole(file: IO[bytes], record: Record) -> bytes:
    content = b"".join(chunks(file, record))
    if record.checksum not in (None, zlib.crc32(content)):
        raise ValueError(f"its record {record.name} is not as it was written")
    return content


def _check(tensor: StoredTensor, sizes: dict[str, int]) -> None:
    storage, width = tensor.storage, ITEM_SIZES[tensor.dtype]
    if sizes.get(storage.key) != storage.nbytes:
        raise ValueError(f"record {storage.key} has {sizes.get(storage.key)} bytes, not {storage.nbytes}")
    if (tensor.offset + tensor.extent) * width > storage.nbytes:
        raise ValueError(f"a tensor goes beyond record {storage.key}")

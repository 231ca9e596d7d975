"""A file of `torch.save` seen from outside: what its pickle says, without torch, and without running any of it.

Such a file is a zip archive: `data.pkl`, and a record of raw bytes for each storage. Here the pickle becomes plain
values, and no tensor's bytes are read.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import CheckpointError
from .stored import ITEM_SIZES, StoredTensor, tensors
from .unpickling import unpickled


@dataclass(frozen=True)
class Contents:
    """What a file's pickle holds, and how many bytes it has."""

    state: Any
    pickle_bytes: int


UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OSError, RuntimeError, OverflowError)
"""What `zipfile` raises for a file that is damaged, or none of its kind."""


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
        state = unpickled(path, content, trust)
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
    return Contents(state, len(content))


def members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """What a file says of its records; without checksums where torch was told to write none (`set_crc32_options`)."""
    found = archive.infolist()
    if not any(info.CRC for info in found):
        for info in found:
            info.CRC = None  # type: ignore[assignment]
    return found


def _content(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of a file, and the size of each record of a storage; nothing larger than the file is ever made."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # torch goes by how a file begins, and so would read another one than this
            raise ValueError("there is something else before its archive")
        infos, size = members(archive), path.stat().st_size
        names = [info.filename for info in infos]
        (pickled,) = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        folder = pickled.removesuffix("data.pkl")
        if len(set(names)) < len(names) or not all(name.startswith(folder) for name in names):
            raise ValueError("it has records of one name, or of more than one file")
        if any(info.compress_type or info.flag_bits & 1 or info.header_offset < 0 for info in infos):
            raise ValueError("its records are compressed or encrypted, which torch does not do")
        if sum(info.file_size for info in infos) > size or any(i.header_offset + i.file_size > size for i in infos):
            raise ValueError("its records say that they are larger than the file")
        content = archive.read(pickled)
        if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        return content, {info.filename.removeprefix(f"{folder}data/"): info.file_size for info in infos}


def _check(tensor: StoredTensor, sizes: dict[str, int]) -> None:
    storage, width = tensor.storage, ITEM_SIZES[tensor.dtype]
    if sizes.get(storage.key) != storage.nbytes:
        raise ValueError(f"record {storage.key} has {sizes.get(storage.key)} bytes, not {storage.nbytes}")
    if (tensor.offset + tensor.extent) * width > storage.nbytes:
        raise ValueError(f"a tensor goes beyond record {storage.key}")

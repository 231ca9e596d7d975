"""Read a file of `torch.save` without torch, and without running anything that it names.

Such a file is a zip archive of `data.pkl` and a record of raw bytes for each storage. `zipfile` reads the archive's
directory, and `pickle.Unpickler` the state: each name in it becomes a stand-in, and each storage a range of the file.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ...common.errors import CheckpointError
from ...common.files import open_regular, read_at, read_each
from .rebuilding import IN_PLACE_OF
from .stored import ITEM_SIZES, STORAGES, Storage, is_size, iter_tensors, stand_in

CHUNK_BYTES = 1 << 20
MAX_PICKLE_BYTES = 1 << 30
"""The largest pickle that is read. What is read of it takes several times as much memory."""
_HEADER_BYTES = 30
_DIRECTORY_OF_DOS = 0x10


class UnreadableError(CheckpointError):
    """A pickle has what only torch can read."""


@dataclass(frozen=True)
class Contents:
    """The state in a file, and the size of its pickle."""

    state: Any
    pickle_bytes: int


@dataclass(frozen=True)
class Record:
    """The range of a record in its file; `checksum` is None if torch was configured to write none."""

    begin: int
    size: int
    checksum: int | None


def read_archive(path: Path) -> Contents:
    """Read the state in a file of `torch.save`, but no tensors.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or of another kind; UnreadableError: its pickle has
            values that are not read here.
    """
    try:
        with open_regular(path) as file:
            records = read_directory(file)
            content = _read_record(file, records["data.pkl"], MAX_PICKLE_BYTES)  # first, as in the file
            if "byteorder" in records and _read_record(file, records["byteorder"], 64) != b"little":
                raise ValueError("its numbers are big-endian")
    except Exception as error:  # whatever a damaged archive leads to
        raise damaged(path, error, ", or not a file of torch.save") from None
    try:
        state = unpickle(path, content, records)
        for _, tensor in iter_tensors(state):
            if (tensor.offset + tensor.extent) * ITEM_SIZES[tensor.dtype] > tensor.storage.nbytes:
                raise ValueError(f"a tensor goes beyond record {tensor.storage.key}")
    except Exception as error:  # whatever a damaged pickle leads to
        raise UnreadableError(
            f"{path} has a value that these tools do not support ({type(error).__name__}: {error!s:.300}). A resume may"
            " load it all the same."
        ) from None
    return Contents(state, len(content))


def read_directory(file: IO[bytes]) -> dict[str, Record]:
    """The records of a file of `torch.save` by name, without the archive's folder, in the directory's order.

    Raises:
        ValueError: it is none, or torch could find another pickle or tensor in it than `zipfile`.
        Exception: of any kind, for a damaged file.
    """
    with zipfile.ZipFile(file) as archive:
        infos, begin = archive.infolist(), archive.start_dir
    folder = infos[0].orig_filename.partition("/")[0] + "/" if infos else ""
    if len({info.orig_filename.lower() for info in infos}) < len(infos):  # torch ignores the case
        raise ValueError("it has duplicate records")
    has_checksums = _have_checksums(infos)
    records, end = {}, 0
    infos_in_order = sorted(infos, key=lambda info: info.header_offset)
    headers = read_each(file, _HEADER_BYTES, [info.header_offset for info in infos_in_order])
    for info, header in zip(infos_in_order, headers, strict=True):
        name = info.orig_filename
        if info.compress_type or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise ValueError("its records are compressed or encrypted")
        if info.external_attr & _DIRECTORY_OF_DOS or info.filename != name:
            raise ValueError(f"its record {name!r:.100} has two meanings")
        if info.header_offset < end or header[:4] != b"PK\3\4" or (not end and info.header_offset):
            raise ValueError(f"its record {name!r:.100} is not where it should be")
        at = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<2H", header[-4:]))
        end = at + info.file_size
        records[name] = Record(at, info.file_size, info.CRC if has_checksums else None)
    if end > begin:
        raise ValueError("it is truncated")
    if any(name.lower() == f"{folder}constants.pkl".lower() for name in records):
        raise ValueError("it is a file of TorchScript")
    names = (info.orig_filename for info in infos)
    return {name.removeprefix(folder): records[name] for name in names if name.startswith(folder)}


def check_file(
    file: Path, progressed: Callable[[int], object] = lambda _: None, *, records: slice = slice(None)
) -> None:
    """Verify that a file of `torch.save` is not truncated, and the checksums of its records.

    Args:
        file: the file.
        progressed: called with the number of bytes that were read.
        records: which of them.

    Raises:
        CheckpointError: a checksum is wrong, or the file cannot be read.
    """
    try:
        with open_regular(file) as opened, zipfile.ZipFile(opened) as archive:
            infos = archive.infolist()
            if any(info.external_attr & _DIRECTORY_OF_DOS for info in infos):  # torch reads nothing of such a record
                raise ValueError("a record is marked as a folder")
            for info in infos[records] if _have_checksums(infos) else ():
                try:
                    with archive.open(info) as record:
                        while chunk := record.read(CHUNK_BYTES):
                            progressed(len(chunk))
                except zipfile.BadZipFile:
                    name = info.orig_filename.partition("/")[2].removeprefix("data/")
                    raise CheckpointError(
                        f"{file} is damaged: record {name} does not match its checksum. Get a complete copy of it."
                    ) from None
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged archive leads to
        raise damaged(file, error) from None


def _have_checksums(infos: Sequence[zipfile.ZipInfo]) -> bool:
    """False after `torch.serialization.set_crc32_options(False)`: all are 0."""
    return any(info.CRC for info in infos)


def unpickle(path: Path, content: bytes, records: Mapping[str, Record]) -> Any:
    """The state in a pickle of a file with these records; raises any exception if the pickle is damaged."""
    return _Unpickler(path, content, records).load()


class _Unpickler(pickle.Unpickler):
    """It can call only stand-ins and what is in `IN_PLACE_OF`, and change only objects that it has created."""

    def __init__(self, path: Path, content: bytes, records: Mapping[str, Record]) -> None:
        super().__init__(BytesIO(content))
        self.path, self.records = path, records
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return IN_PLACE_OF[full] if full in IN_PLACE_OF else stand_in(full)

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _, numel = pid
        dtype = STORAGES[storage_type.stands_for.rpartition(".")[2]]
        if kind != "storage" or not isinstance(key, str) or not is_size(numel):
            raise ValueError("it has an unknown storage")
        record = self.records[f"data/{key}"]
        storage = Storage(self.path, key, dtype, numel, record.begin, record.checksum)
        if storage.nbytes != record.size:
            raise ValueError(f"record {key} has {record.size} bytes, not {storage.nbytes}")
        if self.storages.setdefault(key, storage) != storage:  # torch would take the first of them for both
            raise ValueError(f"storage {key!r:.20} has two dtypes or sizes")
        return storage


def _read_record(file: IO[bytes], record: Record, limit: int) -> bytes:
    if record.size > limit:
        raise ValueError(f"a record of it has {record.size} bytes, and at most {limit} are read")
    content = read_at(file, record.size, record.begin)
    if len(content) < record.size:
        raise ValueError("it is truncated")
    if record.checksum not in (None, zlib.crc32(content)):
        raise ValueError("the checksum of its pickle is wrong")
    return content


def damaged(path: Path, error: Exception, more: str = "") -> CheckpointError:
    """The error for a file that cannot be read."""
    return CheckpointError(
        f"{path} cannot be read, is truncated or damaged{more} ({error!s:.300}). Get a complete copy of it."
    )

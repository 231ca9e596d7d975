"""Parse the zip directory of a file of `torch.save`, so strictly that it has only one interpretation.

Zip readers differ: in which of two end records they use, in what may precede the archive, and in whether names are case
sensitive. torch uses miniz and Python has `zipfile`, and a file can be crafted in which each finds a different pickle.
So a file is refused unless all redundant fields agree. `tests/tools/test_archives.py` compares what is accepted with
torch's own reader.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 22

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")

_NAME = re.compile(
    rb"([ -.0-\[\]-~]{1,255})/"  # the folder: the stem of the name of the saved file
    rb"(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/[0-9A-Za-z_-]{1,64})"
)
_ZIP64, _PADDING = 1, 0x4246
"""The extra fields that torch writes: sizes above 4 GiB, and padding that aligns a record."""
_FLAGS = 0x0808
"""The flags that torch sets: a data descriptor follows the record, and its name is UTF-8."""
_DESCRIPTORS = (0, 12, 16, 20, 24)
"""The possible sizes of that descriptor; nothing else may be between two records."""
_KINDS = (0, stat.S_IFREG)
_LARGE = 0xFFFFFFFF
_MOST = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, _LARGE, _LARGE)
"""The values of the fields of an end record if the zip64 end record has the numbers."""


@dataclass(frozen=True)
class Record:
    """A record and its place in the file; `checksum` is None if torch was configured to write none."""

    name: str
    begin: int
    size: int
    checksum: int | None


@dataclass(frozen=True)
class _Entry:
    """A directory entry; `offset` is that of the record's header."""

    folder: bytes
    name: bytes
    flags: int
    checksum: int
    size: int
    offset: int


def open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading; raises OSError for pipes and devices."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(opened, "rb", buffering=buffering)


def read_directory(file: IO[bytes]) -> dict[str, Record]:
    """Read the records of a file of `torch.save` by name, without the archive's folder, in the directory's order.

    Raises:
        ValueError: it is not such a file, or is ambiguous. The text is part of a message.
        OSError: it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    begin, end, count = _find_directory(file, size)
    entries = list(_read_entries(file, begin, end, count))
    names = {entry.name.lower() for entry in entries}
    if len(names) < len(entries) or len({entry.folder for entry in entries}) > 1:
        raise ValueError("it has duplicate records, or more than one folder")
    if not {b"data.pkl", b"version"} <= names:
        raise ValueError("it has no record data.pkl or version")
    places = _check_headers(file, entries, begin)
    has_checksums = any(entry.checksum for entry in entries)  # torch.serialization.set_crc32_options(False): all are 0
    records = (Record(e.name.decode(), places[e], e.size, e.checksum if has_checksums else None) for e in entries)
    return {record.name: record for record in records}


def storage_records(records: Mapping[str, Record]) -> dict[str, Record]:
    """The records of storages, by their keys in the pickle."""
    return {name.removeprefix("data/"): record for name, record in records.items() if name.startswith("data/")}


def read_chunks(file: IO[bytes], record: Record) -> Iterator[bytes]:
    """Read a record, a few MiB at a time."""
    file.seek(record.begin)
    left = record.size
    while left:
        if not (chunk := file.read(min(left, CHUNK_BYTES))):
            raise ValueError("it is truncated")
        left -= len(chunk)
        yield chunk


def hash_directory(path: Path) -> str | None:
    """The SHA-256 of a file from its directory on, which has the checksum of each record; None if it is no zip archive.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            begin, _, _ = _find_directory(file, size)
            return sha256(_read(file, begin, size - begin)).hexdigest()
        except ValueError:
            return None


def _find_directory(file: IO[bytes], size: int) -> tuple[int, int, int]:
    """The begin and end of the directory, and the number of its entries, from the end records."""
    at = size - _END.size
    if at < 0:
        raise ValueError("it is too short for an archive")
    mark, disk, first_disk, here, count, length, begin, comment = _END.unpack(_read(file, at, _END.size))
    if mark != b"PK\5\6" or comment:
        raise ValueError("it does not end like an archive of torch.save")
    end, numbers = at, (disk, first_disk, here, count, length, begin)
    if at >= _LOCATOR.size and _read(file, at - _LOCATOR.size, 4) == b"PK\6\7":
        end = at - _LOCATOR.size - _END64.size
        _, locator_disk, there, disks = _LOCATOR.unpack(_read(file, at - _LOCATOR.size, _LOCATOR.size))
        if end < 0 or (locator_disk, there, disks) != (0, end, 1):
            raise ValueError("its zip64 end record is not where it should be")
        mark, record, _, _, *large = _END64.unpack(_read(file, end, _END64.size))
        if mark != b"PK\6\6" or record != _END64.size - 12:
            raise ValueError("its zip64 end record is damaged")
        if any(short not in (full, most) for short, full, most in zip(numbers, large, _MOST, strict=True)):
            raise ValueError("its two end records differ")
        disk, first_disk, here, count, length, begin = large
    if disk or first_disk or here != count:
        raise ValueError("it is one part of a split archive")
    if begin + length != end:
        raise ValueError("its directory is not where its end record says")
    return begin, end, count


def _read_entries(file: IO[bytes], at: int, end: int, count: int) -> Iterator[_Entry]:
    """Iterate over the entries, so that a wrong number of entries does not take memory."""
    for _ in range(count):
        (
            mark, _, _, flags, method, _, _, checksum, packed, size, length, extra, comment, disk, _, attributes, offset
        ) = _ENTRY.unpack(_read(file, at, _ENTRY.size))  # fmt: skip
        at += _ENTRY.size
        if mark != b"PK\1\2" or at + length + extra > end:
            raise ValueError("its directory is damaged")
        name, fields = _read(file, at, length), _read(file, at + length, extra)
        at += length + extra
        if not (match := _NAME.fullmatch(name)):
            shown = name[:100].decode("ascii", "backslashreplace")
            raise ValueError(f"it has a record {shown!r}, which torch.save does not write")
        if method or flags & ~_FLAGS:
            raise ValueError("its records are compressed or encrypted, which torch.save does not do")
        record = match[2].decode()
        # miniz treats entries with DOS's attribute of a directory as empty.
        if comment or disk or attributes & 0xFFFF or stat.S_IFMT(attributes >> 16) not in _KINDS:
            raise ValueError(f"its record {record} has attributes that torch.save does not write")
        taken = [value for value in (size, packed, offset) if value == _LARGE]
        large = _parse_extra_fields(fields).get(_ZIP64, b"")
        if len(large) != 8 * len(taken):
            raise ValueError(f"the sizes of its record {record} are ambiguous")
        values = iter(struct.unpack(f"<{len(taken)}Q", large))
        size, packed, offset = (next(values) if value == _LARGE else value for value in (size, packed, offset))
        if size != packed:
            raise ValueError(f"its record {record} has two sizes")
        yield _Entry(match[1], match[2], flags, checksum, size, offset)
    if at != end:
        raise ValueError("its directory is longer than it says")


def _parse_extra_fields(extra: bytes) -> dict[int, bytes]:
    """The extra fields of an entry or of a header, by number."""
    by_number: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            raise ValueError("an extra field is truncated")
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4 + length
        if kind not in (_ZIP64, _PADDING) or kind in by_number or at > len(extra):
            raise ValueError(f"it has an extra field {kind:#06x}, which torch.save does not write there")
        by_number[kind] = extra[at - length : at]
    return by_number


def _check_headers(file: IO[bytes], entries: list[_Entry], directory: int) -> dict[_Entry, int]:
    """Check that headers and records fill the file up to its directory; returns where each record begins."""
    places: dict[_Entry, int] = {}
    end, has_descriptor = 0, False
    for entry in sorted(entries, key=lambda entry: entry.offset):
        gap = entry.offset - end
        if gap not in (_DESCRIPTORS if has_descriptor else (0,)):
            raise ValueError(f"there is a gap before its record {entry.name.decode()}, or records overlap")
        name = entry.folder + b"/" + entry.name
        header = _read(file, entry.offset, _LOCAL.size + len(name))
        mark, _, flags, method, *_, length, extra = _LOCAL.unpack_from(header)
        if (mark, flags, method, length, header[_LOCAL.size :]) != (b"PK\3\4", entry.flags, 0, len(name), name):
            raise ValueError(f"the header of its record {entry.name.decode()} is damaged")
        begin = entry.offset + _LOCAL.size + length
        _parse_extra_fields(_read(file, begin, extra))
        places[entry] = begin + extra
        end, has_descriptor = begin + extra + entry.size, bool(entry.flags & 8)
        if end > directory:
            raise ValueError(f"its record {entry.name.decode()} is larger than the file")
    if directory - end not in (_DESCRIPTORS if has_descriptor else (0,)):
        raise ValueError("there is a gap before its directory")
    return places


def _read(file: IO[bytes], begin: int, size: int) -> bytes:
    content = os.pread(file.fileno(), size, begin) if size else b""
    if len(content) != size:
        raise ValueError("it is truncated")
    return content

"""The directory of a file of `torch.save`, read so strictly that there is one way to read it.

Such a file is a zip archive, and zip readers differ: on which of two end records counts, on what lies before the
archive, on names in other letters. torch reads archives with miniz and Python with `zipfile`, and a file can be made in
which each finds another pickle. So neither is asked: a file is refused unless all that a reader could go by agrees.
`tests/tools/test_archives.py` compares what is accepted with torch's own reader.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 22

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")

_NAME = re.compile(
    rb"([ -.0-\[\]-~]{1,255})/"  # the folder: the stem of the name that the file was saved under
    rb"(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/[0-9A-Za-z_-]{1,64})"
)
_ZIP64, _PADDING = 1, 0x4246
"""The extra fields that torch writes: sizes of more than 4 GiB, and what aligns a record."""
_FLAGS = 0x0808
"""The flags that torch sets: a data descriptor follows the record, its name is UTF-8."""
_DESCRIPTORS = (0, 12, 16, 20, 24)
"""The sizes of that descriptor, which is all that may lie between two records."""
_KINDS = (0, stat.S_IFREG)
_LARGE = 0xFFFFFFFF
_MOST = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, _LARGE, _LARGE)
"""What the fields of an end record hold where the zip64 one has the number."""


@dataclass(frozen=True)
class Record:
    """Where a record's bytes are in its file; `checksum` is None where torch was told to write none."""

    name: str
    begin: int
    size: int
    checksum: int | None


@dataclass(frozen=True)
class _Entry:
    """What the directory says of a record: `offset` is that of its header."""

    folder: bytes
    name: bytes
    flags: int
    checksum: int
    size: int
    offset: int


def open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a regular file to be read, also at the end of links. A pipe or a device is an OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(opened, "rb", buffering=buffering)


def read_directory(file: IO[bytes]) -> dict[str, Record]:
    """The records of a file of `torch.save` by name, without the archive's folder, in the directory's order.

    Raises:
        ValueError: the file is none, or could be read in more than one way. The text says what is odd, for a message.
        OSError: it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    begin, end, count = _place(file, size)
    entries = list(_entries(file, begin, end, count))
    names = {entry.name.lower() for entry in entries}
    if len(names) < len(entries) or len({entry.folder for entry in entries}) > 1:
        raise ValueError("it has records of one name, or of more than one folder")
    if not {b"data.pkl", b"version"} <= names:
        raise ValueError("it has no record data.pkl or version")
    places = _begins(file, entries, begin)
    has_checksums = any(entry.checksum for entry in entries)  # torch.serialization.set_crc32_options(False): all are 0
    found = {}
    for entry in entries:
        name = entry.name.decode()
        found[name] = Record(name, places[entry], entry.size, entry.checksum if has_checksums else None)
    return found


def by_key(records: Mapping[str, Record]) -> dict[str, Record]:
    """Those of them that are storages, by the keys that the pickle gives these."""
    return {name.removeprefix("data/"): record for name, record in records.items() if name.startswith("data/")}


def chunks(file: IO[bytes], record: Record) -> Iterator[bytes]:
    """The bytes of a record, a few MiB at a time."""
    file.seek(record.begin)
    left = record.size
    while left:
        if not (chunk := file.read(min(left, CHUNK_BYTES))):
            raise ValueError("it is cut")
        left -= len(chunk)
        yield chunk


def _place(file: IO[bytes], size: int) -> tuple[int, int, int]:
    """Where the directory begins and ends, and how many entries it has: as the end of the file says."""
    at = size - _END.size
    if at < 0:
        raise ValueError("it is too short for an archive")
    mark, disk, first_disk, here, count, length, begin, comment = _END.unpack(_read(file, at, _END.size))
    if mark != b"PK\5\6" or comment:
        raise ValueError("it does not end as an archive of torch.save")
    end, said = at, (disk, first_disk, here, count, length, begin)
    if at >= _LOCATOR.size and _read(file, at - _LOCATOR.size, 4) == b"PK\6\7":
        end = at - _LOCATOR.size - _END64.size
        _, locator_disk, there, disks = _LOCATOR.unpack(_read(file, at - _LOCATOR.size, _LOCATOR.size))
        if end < 0 or (locator_disk, there, disks) != (0, end, 1):
            raise ValueError("its zip64 end record is not where it should be")
        mark, record, _, _, *large = _END64.unpack(_read(file, end, _END64.size))
        if mark != b"PK\6\6" or record != _END64.size - 12:
            raise ValueError("its zip64 end record is damaged")
        if any(short not in (full, most) for short, full, most in zip(said, large, _MOST, strict=True)):
            raise ValueError("its two end records differ")
        disk, first_disk, here, count, length, begin = large
    if disk or first_disk or here != count:
        raise ValueError("it is a part of an archive")
    if begin + length != end:
        raise ValueError("its directory is not where its end says")
    return begin, end, count


def _entries(file: IO[bytes], at: int, end: int, count: int) -> Iterator[_Entry]:
    """One after the other, so that a directory that says it is large takes no memory."""
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
        # miniz takes what has the attribute of a folder of DOS for empty.
        if comment or disk or attributes & 0xFFFF or stat.S_IFMT(attributes >> 16) not in _KINDS:
            raise ValueError(f"its record {record} has attributes that torch.save does not write")
        taken = [value for value in (size, packed, offset) if value == _LARGE]
        large = _fields(fields).get(_ZIP64, b"")
        if len(large) != 8 * len(taken):
            raise ValueError(f"the sizes of its record {record} are not clear")
        values = iter(struct.unpack(f"<{len(taken)}Q", large))
        size, packed, offset = (next(values) if value == _LARGE else value for value in (size, packed, offset))
        if size != packed:
            raise ValueError(f"its record {record} has two sizes")
        yield _Entry(match[1], match[2], flags, checksum, size, offset)
    if at != end:
        raise ValueError("its directory is longer than it says")


def _fields(extra: bytes) -> dict[int, bytes]:
    """The extra fields of an entry or of a header, by number."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            raise ValueError("an extra field is cut")
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4 + length
        if kind not in (_ZIP64, _PADDING) or kind in found or at > len(extra):
            raise ValueError(f"it has an extra field {kind:#06x}, which torch.save does not write there")
        found[kind] = extra[at - length : at]
    return found


def _begins(file: IO[bytes], entries: list[_Entry], directory: int) -> dict[_Entry, int]:
    """Where the bytes of each record begin, by the headers before them, which fill the file up to its directory."""
    places: dict[_Entry, int] = {}
    end, has_descriptor = 0, False
    for entry in sorted(entries, key=lambda one: one.offset):
        gap = entry.offset - end
        if gap not in (_DESCRIPTORS if has_descriptor else (0,)):
            raise ValueError(f"there is something else before its record {entry.name.decode()}, or they overlap")
        name = entry.folder + b"/" + entry.name
        header = _read(file, entry.offset, _LOCAL.size + len(name))
        mark, _, flags, method, *_, length, extra = _LOCAL.unpack_from(header)
        if (mark, flags, method, length, header[_LOCAL.size :]) != (b"PK\3\4", entry.flags, 0, len(name), name):
            raise ValueError(f"the header of its record {entry.name.decode()} is damaged, or another's")
        begin = entry.offset + _LOCAL.size + length
        _fields(_read(file, begin, extra))
        places[entry] = begin + extra
        end, has_descriptor = begin + extra + entry.size, bool(entry.flags & 8)
        if end > directory:
            raise ValueError(f"its record {entry.name.decode()} says that it is larger than there is room for")
    if directory - end not in (_DESCRIPTORS if has_descriptor else (0,)):
        raise ValueError("there is something else before its directory")
    return places


def _read(file: IO[bytes], begin: int, size: int) -> bytes:
    content = os.pread(file.fileno(), size, begin) if size else b""
    if len(content) != size:
        raise ValueError("it is cut")
    return content

"""The files of `torch.save`, written in place of torch's zip writer: the same bytes, faster, at once or later.

torch writes a file by one call for each storage, and a few more. It computes checksums with a table, copies from a GPU
into memory that is not pinned, and leaves all data to the sync at the end. Here the checksum of a chunk is computed
while it is in the processor's cache, the disk begins with it while later chunks are written, and the record of the save
learns the size of the file and the digest of its directory without reading it again.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..common.files import SYNCED_BYTES, begin_sync, fastest_crc32
from ..common.overrides import overridden
from ..record import File

if TYPE_CHECKING:
    import torch

Note = Callable[[Path, File], None]
"""Receives each file that is written, and what the record says of it."""

_CHUNK_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**18
"""Smaller writes share a system call; larger ones are not copied."""
_MAX16, _MAX32 = 2**16 - 1, 2**32 - 1


@contextmanager
def opened(path: Path, sync: bool, note: Note) -> Iterator[Archive]:
    """Write a file; `note` is called once it is complete, and with `sync` on disk."""
    with path.open("wb", _BUFFER_BYTES) as file:
        archive = Archive(file, path, sync)
        yield archive
        description = archive.finish()
    note(path, description)


class Archive:
    """Stands in for `torch._C.PyTorchFileWriter`.

    Attributes:
        records: the names of those written. The first is the pickle; storages follow.
    """

    def __init__(self, file: IO[bytes], path: Path, sync: bool) -> None:
        import torch

        module: Any = torch.serialization
        self._file, self._sync = file, sync
        # torch lets Python open a file whose path is not ASCII, and does not know its name then.
        self._folder = (path.name.rpartition(".")[0] or path.name) if str(path).isascii() else "archive"
        self._alignment = getattr(module, "_get_storage_alignment", lambda: 64)()
        has_checksums = getattr(module, "get_crc32_options", lambda: True)()
        self._checksum: Callable[..., int] = fastest_crc32() if has_checksums else lambda *_: 0
        self.records: list[str] = []
        self._directory = bytearray()
        self._combined = 0  # of all checksums
        self._size = self._begun = 0
        self._pinned: Any = None
        self._on_gpu: dict[int, Any] = {}

    def to_cpu(self, storage: Any) -> Any:
        """A storage of a GPU as it is, to be copied in pieces; else None."""
        import torch

        with suppress(RuntimeError):  # no memory can be pinned
            if storage.device.type == "cuda":
                if self._pinned is None:
                    self._pinned = torch.empty(2, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
                self._on_gpu[storage.data_ptr()] = storage
                return storage
        return None

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write data: text, bytes, a storage, or in old releases of torch the address of one."""
        full, at = f"{self._folder}/{name}".encode(), self._size
        is_large, is_far = size >= _MAX32, at >= _MAX32
        zip64 = listed64 = b""
        if is_large or is_far:
            zip64 = _zip64([size, 0] * is_large + [at] * is_far)  # 0: torch does not know it yet
            listed64 = _zip64([size, size] * is_large + [at] * is_far)
        padding = -(at + 30 + len(full) + len(zip64) + 4) % self._alignment
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = 0x808 if size else 0x800  # names are UTF-8; a descriptor follows
        write = self._file.write
        write(struct.pack("<4s2xH18x2H", b"PK\3\4", flags, len(full), len(extra)) + full + extra)
        self._size += 30 + len(full) + len(extra)
        checksum = 0
        for piece in self._pieces(data, size):
            checksum = self._checksum(piece, checksum)
            write(piece)
            self._size += len(piece)
            if self._sync and self._size - self._begun >= SYNCED_BYTES:
                self._begun = begin_sync(self._file, self._begun)
        if size:
            self._size += write(struct.pack("<4sL2Q" if zip64 else "<4s3L", b"PK\7\10", checksum, size, size))
            self._combined ^= checksum + 0x9E3779B9 + (self._combined << 6) + (self._combined >> 2)
            self._combined %= 2**64
        short = min(size, _MAX32)
        values = flags, checksum, short, short, len(full), len(listed64), min(at, _MAX32)
        self._directory += struct.pack("<4s4xH6x3L2H10xL", b"PK\1\2", *values) + full + listed64
        self.records.append(name)

    def finish(self) -> File:
        """Write the end of the file, and return what it is."""
        for name, content in _last_records(tuple(self.records)):
            is_id = name == ".data/serialization_id"
            data = content[:20] + b"%020d" % self._combined if is_id else content
            self.write_record(name, data, len(data))
        at, size, count = self._size, len(self._directory), len(self.records)
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, size, at)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, at + size, 1)
        short = min(count, _MAX16)
        end += struct.pack("<4s4x2H2L2x", b"PK\5\6", short, short, min(size, _MAX32), min(at, _MAX32))
        self._file.write(self._directory + end)
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        return File(at + size + len(end), sha256(self._directory + end).hexdigest())

    def _pieces(self, data: Any, size: int) -> Iterable[bytes | memoryview]:
        data = self._on_gpu.get(data, data) if isinstance(data, int) else data
        if isinstance(data, str | bytes):
            return [data.encode() if isinstance(data, str) else data]
        if isinstance(data, int) or data.device.type == "cpu":
            return _memory(data if isinstance(data, int) else data.data_ptr(), size)
        return _from_gpu(data, self._pinned)


def in_place_of_torch(
    folder: Path, open_archive: Callable[[Path], AbstractContextManager[Any]]
) -> AbstractContextManager[None]:
    """While this lasts, `torch.save` of this thread writes the files of a folder by what `open_archive` opens.

    torch itself writes elsewhere, and for state that pickles itself by `torch.save` into memory.
    """
    import torch

    module: Any = torch.serialization
    storages: Any = torch.UntypedStorage
    # Of this release, and under these settings, nothing else is called but `write_record`.
    calls = set(module._save.__code__.co_names) & set(vars(torch._C.PyTorchFileWriter))
    skips_data = getattr(getattr(module, "_serialization_tls", None), "skip_data", False)
    if skips_data or not calls <= {"write_record", "write_record_metadata"}:
        return nullcontext()
    thread, opener, to_cpu = threading.get_ident(), module._open_zipfile_writer, storages.cpu
    archives: list[Any] = []

    @contextmanager
    def open_here(file: Any) -> Iterator[Any]:
        is_path = threading.get_ident() == thread and isinstance(file, str | os.PathLike)
        if not is_path or folder not in Path(file).parents:
            with opener(file) as archive:
                yield archive
            return
        with open_archive(Path(file)) as archive:
            archives.append(archive)
            try:
                yield archive
            finally:
                archives.pop()

    def to_cpu_here(storage: Any) -> Any:
        is_record = threading.get_ident() == thread and archives and archives[-1].records
        taken = archives[-1].to_cpu(storage) if is_record else None
        return to_cpu(storage) if taken is None else taken

    return overridden([(module, "_open_zipfile_writer", open_here), (storages, "cpu", to_cpu_here)])


@dataclass
class Recorder:
    """Records files of one rank, to be written later. The memory for their data is kept for the next save.

    Attributes:
        files: the path of each file, and its records.
        copies: the addresses of the copies made for this save.
    """

    files: list[tuple[Path, list[tuple[str, Any, int]]]] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    _buffers: list[torch.UntypedStorage] = field(default_factory=list)
    _used: int = 0

    def begin(self) -> None:
        """Forget what was recorded."""
        self.files, self.copies, self._used = [], set(), 0

    @contextmanager
    def opened(self, path: Path) -> Iterator[_Copies]:
        """Record a file."""
        copies = _Copies(self)
        yield copies
        self.files.append((path.absolute(), copies.records))

    def write(self, sync: bool, note: Note) -> None:
        """Write the files."""
        for path, records in self.files:
            with opened(path, sync, note) as archive:
                for record in records:
                    archive.write_record(*record)

    def buffer(self, size: int, pinned: bool) -> Any:
        """Memory for one more copy."""
        import torch

        if self._used == len(self._buffers) or self._buffers[self._used].nbytes() != size:
            new = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            self._buffers[self._used : self._used + 1] = [new]
        buffer = self._buffers[self._used]
        self._used += 1
        self.copies.add(buffer.data_ptr())
        return buffer


class _Copies:
    """Stands in for an `Archive`; copies the data of its records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.records: list[tuple[str, Any, int]] = []

    def to_cpu(self, storage: Any) -> Any:
        return self._recorder.buffer(storage.nbytes(), storage.device.type == "cuda").copy_(storage)

    def write_record(self, name: str, data: Any, size: int) -> None:
        if not isinstance(data, str | bytes):
            address = data if isinstance(data, int) else data.data_ptr()
            if address not in self._recorder.copies:
                data = self._recorder.buffer(size, pinned=False)
                ctypes.memmove(data.data_ptr(), address, size)
        self.records.append((name, data, size))


def _zip64(values: list[int]) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _memory(address: int, size: int) -> list[memoryview]:
    """Memory of the CPU, in pieces."""
    lengths = [(at, min(size - at, _CHUNK_BYTES)) for at in range(0, size, _CHUNK_BYTES)]
    return [memoryview((ctypes.c_char * length).from_address(address + at)).cast("B") for at, length in lengths]


def _from_gpu(storage: Any, buffers: Any) -> Iterator[memoryview]:
    """The bytes of a storage, by two buffers: one is filled while the other is written."""
    import torch

    source: Any = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    stream = torch.cuda.current_stream(storage.device)
    copied: list[tuple[Any, Any]] = []
    for number, piece in enumerate([*source.split(_CHUNK_BYTES), None]):
        if piece is not None:
            buffer = buffers[number % 2][: len(piece)].copy_(piece, non_blocking=True)
            copied.append((buffer, stream.record_event()))
        if number:
            buffer, event = copied.pop(0)
            event.synchronize()
            yield from _memory(buffer.data_ptr(), len(buffer))


@lru_cache(8)
def _last_records(names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """What this release of torch adds to a file with these records; the first half of its id is of their names."""
    import torch

    sample = io.BytesIO()
    writer: Any = torch._C.PyTorchFileWriter(sample)
    for name in names:
        writer.write_record(name, b"", 0)
    writer.write_end_of_file()
    with zipfile.ZipFile(sample) as archive:
        added = archive.infolist()[len(names) :]
        return [(info.filename.partition("/")[2], archive.read(info)) for info in added]

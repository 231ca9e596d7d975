"""Read the bytes of tensors from files of `torch.save` and safetensors, in pieces, and verify their checksums.

Files are read, not mapped into memory, so that only the current chunk takes memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...common.errors import CheckpointError
from ...common.files import open_regular
from . import safetensors as safetensors_file
from .archive import CHUNK_BYTES, Record, damaged, read_directory, storage_records
from .stored import ITEM_SIZES, Storage, StoredTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """`count` consecutive elements of a storage, from `begin` on."""

    storage: Storage
    begin: int
    count: int


@dataclass(frozen=True)
class TensorSource:
    """Where to read a tensor from: its elements are those of all pieces, in order.

    If the tensor is not contiguous in its storage, `view` has its strides, and the single piece covers all elements.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    view: tuple[int, ...] | None = field(default=None)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * ITEM_SIZES[self.dtype]


def from_stored(tensor: StoredTensor) -> TensorSource:
    """The source of a tensor that is in one storage."""
    piece = Piece(tensor.storage, tensor.offset, tensor.extent)
    return TensorSource(tensor.dtype, tensor.shape, (piece,), None if tensor.is_contiguous else tensor.stride)


def pieces_of_range(parts: Sequence[StoredTensor], begin: int, count: int) -> tuple[Piece, ...]:
    """The pieces of `count` elements from `begin` on, in the concatenation of flat tensors."""
    pieces = []
    for part in parts:
        from_, to = max(begin, 0), min(begin + count, part.numel)
        if from_ < to:
            pieces.append(Piece(part.storage, part.offset + from_, to - from_))
        begin -= part.numel
    return tuple(pieces)


def without_padding(pieces: Sequence[Piece], count: int) -> tuple[Piece, ...]:
    """The first `count` elements of some pieces."""
    kept = []
    for piece in pieces:
        if count > 0:
            kept.append(Piece(piece.storage, piece.begin, min(piece.count, count)))
        count -= piece.count
    return tuple(kept)


def map_into_memory(tensors: Mapping[str, TensorSource]) -> dict[str, torch.Tensor]:
    """Map tensors of one piece each from their files, so that they are read when they are used."""
    import torch

    files: dict[Path, torch.Tensor] = {}
    mapped = {}
    with Records() as records:
        for name, tensor in tensors.items():
            (piece,) = tensor.pieces
            file, width = piece.storage.path, ITEM_SIZES[tensor.dtype]
            if file not in files:
                files[file] = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            begin = records.place(piece.storage) + piece.begin * width
            values = files[file][begin : begin + tensor.nbytes].view(getattr(torch, tensor.dtype))
            mapped[name] = values.view(tensor.shape)
    return mapped


@dataclass
class _RecordState:
    """The offset and size of a record in its file, and how much of it has been checked."""

    begin: int
    size: int
    checksum: int | None
    checked: int = 0
    so_far: int = 0
    in_order: bool = True


class Records:
    """A context manager that reads storages of many files, and at its end verifies the checksums of what was read.

    Files of `torch.save` have a checksum for each record. It is computed while the record is read in order; whatever
    has not been read is read at the end.

    Args:
        check: whether to verify checksums.

    Raises:
        CheckpointError: a file cannot be read, or a checksum is wrong.
    """

    def __init__(self, check: bool = True) -> None:
        self._check = check
        self._files: dict[Path, tuple[IO[bytes], Mapping[str, Record]]] = {}
        self._records: dict[Storage, _RecordState] = {}

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and self._check:
                for storage in self._records:
                    self.check(storage)
        finally:
            for opened in self._files.values():
                opened[0].close()

    def read(self, tensor: TensorSource) -> bytearray:
        """Read all elements of a tensor into memory."""
        content = bytearray(sum(piece.count for piece in tensor.pieces) * ITEM_SIZES[tensor.dtype])
        left = memoryview(content)
        for storage, begin, size in _spans(tensor):
            self._read_into(storage, begin, left[:size])
            left = left[size:]
        if tensor.view is None:
            return content
        import torch

        dtype = getattr(torch, tensor.dtype)
        ordered = bytearray(tensor.nbytes)
        elements = torch.frombuffer(content, dtype=dtype).as_strided(tensor.shape, tensor.view)
        torch.frombuffer(ordered, dtype=dtype).view(tensor.shape).copy_(elements)
        return ordered

    def chunks(self, tensor: TensorSource, buffers: Iterator[memoryview] | None = None) -> Iterator[memoryview]:
        """Read a tensor's pieces, at most `CHUNK_BYTES` at a time; each chunk is valid until the next one.

        Args:
            tensor: what to read.
            buffers: what to read the chunks into, each of `CHUNK_BYTES`; a chunk is valid until its buffer comes again.
        """
        if buffers is None:
            buffers = repeat(memoryview(bytearray(max((size for *_, size in _spans(tensor)), default=0))))
        for storage, begin, size in _spans(tensor):
            chunk = next(buffers)[:size]
            self._read_into(storage, begin, chunk)
            yield chunk

    def place(self, storage: Storage) -> int:
        """The offset of a storage in its file."""
        return self._find(storage).begin

    def check(self, storage: Storage) -> None:
        """Verify the checksum of a record, and read what has not been read yet."""
        record = self._record(storage)
        if record.checksum is None:
            return
        if not record.in_order:
            record.checked, record.so_far, record.in_order = 0, 0, True
        buffer = memoryview(bytearray(min(CHUNK_BYTES, record.size - record.checked)))
        while record.checked < record.size:
            self._read_into(storage, record.checked, buffer[: record.size - record.checked])
        if record.so_far != record.checksum:
            raise CheckpointError(
                f"{storage.path} is damaged: record {storage.key} does not match its checksum. Get a complete copy of"
                " it."
            )

    def _read_into(self, storage: Storage, begin: int, chunk: memoryview) -> None:
        record = self._record(storage)
        file, _ = self._files[storage.path]
        if begin + len(chunk) > record.size:
            raise CheckpointError(f"{storage.path} is damaged: record {storage.key} is too short.")
        try:
            file.seek(record.begin + begin)
            count = file.readinto(chunk)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{storage.path} cannot be read: {error}") from None
        if count != len(chunk):
            raise CheckpointError(f"{storage.path} is truncated. Get a complete copy of it.")
        if record.checksum is None:
            return
        if begin == record.checked:
            record.so_far = zlib.crc32(chunk, record.so_far)
            record.checked += len(chunk)
        else:
            record.in_order = False

    def _record(self, storage: Storage) -> _RecordState:
        if storage not in self._records:
            self._records[storage] = self._find(storage)
        return self._records[storage]

    def _find(self, storage: Storage) -> _RecordState:
        if storage.path not in self._files:
            self._files[storage.path] = _open_file(storage.path)
        return _find(storage, self._files[storage.path][1])


def _spans(tensor: TensorSource) -> Iterator[tuple[Storage, int, int]]:
    """A tensor's pieces, at most `CHUNK_BYTES` at a time: the storage, and the first byte and the size in it."""
    width = ITEM_SIZES[tensor.dtype]
    for piece in tensor.pieces:
        end = (piece.begin + piece.count) * width
        for begin in range(piece.begin * width, end, CHUNK_BYTES):
            yield piece.storage, begin, min(CHUNK_BYTES, end - begin)


def _open_file(path: Path) -> tuple[IO[bytes], Mapping[str, Record]]:
    """Open a file and read the places of its records, by key."""
    places = safetensors_file.read_ranges(path) if path.suffix == ".safetensors" else None
    try:
        file = open_regular(path, buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if places is not None:
        return file, {name: Record(place.start, len(place), None) for name, place in places.items()}
    try:
        return file, storage_records(read_directory(file))
    except Exception as error:  # whatever a damaged archive leads to
        file.close()
        raise damaged(path, error) from None


def _find(storage: Storage, records: Mapping[str, Record]) -> _RecordState:
    place = records.get(storage.key)
    if place is None or place.size != storage.nbytes:
        raise CheckpointError(f"{storage.path} is damaged: it has no record {storage.key} that matches its pickle.")
    return _RecordState(place.begin, place.size, place.checksum)

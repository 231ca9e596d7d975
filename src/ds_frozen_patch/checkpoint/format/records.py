"""Read the bytes of tensors from files of `torch.save` and safetensors, in pieces, and verify their checksums.

Files are read, not mapped into memory, so that only the current chunk takes memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

from ...common.errors import CheckpointError
from ...common.files import open_regular, read_into
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


class Records:
    """A context manager that reads storages of many files, and at its end verifies the checksums of what was read.

    Files of `torch.save` have a checksum for each record. It is computed while the record is read in order; whatever
    has not been read is read at the end. Several threads may read at once.

    Args:
        check: whether to verify checksums.
        progressed: called with the number of bytes that were read for a caller.

    Raises:
        CheckpointError: a file cannot be read, or a checksum is wrong.
    """

    def __init__(self, check: bool = True, progressed: Callable[[int], object] = lambda _: None) -> None:
        self._check, self._progressed = check, progressed
        self._files: dict[Path, tuple[IO[bytes], Mapping[str, Record]]] = {}
        self._opening = Lock()
        self._sums: dict[Storage, tuple[int, int]] = {}
        """How many bytes of a record were read in order, and their checksum."""

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None and self._check:
                for storage in self._sums:
                    self.check(storage)
        finally:
            for file, _places in self._files.values():
                file.close()

    def read(self, tensor: TensorSource) -> bytearray:
        """Read all elements of a tensor into memory."""
        width = ITEM_SIZES[tensor.dtype]
        content = bytearray(sum(piece.count for piece in tensor.pieces) * width)
        left = memoryview(content)
        for piece in tensor.pieces:
            self._read_into(piece.storage, piece.begin * width, left[: piece.count * width])
            left = left[piece.count * width :]
        self._progressed(len(content))
        if tensor.view is None:
            return content
        import torch

        dtype = getattr(torch, tensor.dtype)
        ordered = bytearray(tensor.nbytes)
        elements = torch.frombuffer(content, dtype=dtype).as_strided(tensor.shape, tensor.view)
        torch.frombuffer(ordered, dtype=dtype).view(tensor.shape).copy_(elements)
        return ordered

    def chunks(self, tensor: TensorSource) -> Iterator[memoryview]:
        """Read a tensor's pieces, at most `CHUNK_BYTES` at a time; each chunk is valid until the next one."""
        width = ITEM_SIZES[tensor.dtype]
        for piece in tensor.pieces:
            yield from self.content(piece.storage, piece.begin * width, piece.count * width)

    def content(self, storage: Storage, begin: int, count: int) -> Iterator[memoryview]:
        """Read so many bytes of a storage, as `chunks` does."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, count)))
        for at in range(begin, begin + count, CHUNK_BYTES):
            chunk = buffer[: begin + count - at]
            self._read_into(storage, at, chunk)
            yield chunk
            self._progressed(len(chunk))

    def place(self, storage: Storage) -> int:
        """The offset of a storage in its file."""
        return self._find(storage)[1].begin

    def check(self, storage: Storage) -> None:
        """Verify the checksum of a record, and read what has not been read yet."""
        _, record = self._find(storage)
        if record.checksum is None:
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, record.size)))
        while (left := record.size - self._sums.setdefault(storage, (0, 0))[0]) > 0:
            self._read_into(storage, record.size - left, buffer[:left])
        if record.checksum != self._sums[storage][1]:
            raise CheckpointError(
                f"{storage.path} is damaged: record {storage.key} does not match its checksum. Get a complete copy of"
                " it."
            )

    def _read_into(self, storage: Storage, begin: int, content: memoryview) -> None:
        file, record = self._find(storage)
        if begin + len(content) > record.size:
            raise CheckpointError(f"{storage.path} is damaged: record {storage.key} is too short.")
        for at in range(0, len(content), CHUNK_BYTES):
            chunk = content[at : at + CHUNK_BYTES]
            try:
                count = read_into(file, chunk, record.begin + begin + at)
            except OSError as error:
                raise CheckpointError(f"{storage.path} cannot be read: {error}") from None
            if count != len(chunk):
                raise CheckpointError(f"{storage.path} is truncated. Get a complete copy of it.")
            done, so_far = self._sums.get(storage, (0, 0))
            if begin + at == done and record.checksum is not None:
                done, so_far = done + len(chunk), zlib.crc32(chunk, so_far)
            self._sums[storage] = done, so_far

    def _find(self, storage: Storage) -> tuple[IO[bytes], Record]:
        with self._opening:
            if storage.path not in self._files:
                self._files[storage.path] = _open_file(storage.path)
        file, records = self._files[storage.path]
        record = records.get(storage.key)
        if record is None or record.size != storage.nbytes:
            raise CheckpointError(f"{storage.path} is damaged: it has no record {storage.key} that matches its pickle.")
        return file, record


def _open_file(path: Path) -> tuple[IO[bytes], Mapping[str, Record]]:
    """Open a file and read the places of its records, by key."""
    tensors = safetensors_file.read_header(path)[0] if path.suffix == ".safetensors" else None
    try:
        file = open_regular(path, buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if tensors is not None:
        return file, {name: Record(tensor.begin, tensor.size, None) for name, tensor in tensors.items()}
    try:
        return file, storage_records(read_directory(file))
    except Exception as error:  # whatever a damaged archive leads to
        file.close()
        raise damaged(path, error) from None

"""Read the bytes of tensors from files of `torch.save` and safetensors, in pieces, and verify their checksums.

Files are read, not mapped into memory, so that only the current chunk takes memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import IO, Any

from ...common.errors import CheckpointError
from ...common.files import fastest_crc32, open_regular, read_into
from .archive import CHUNK_BYTES
from .stored import ITEM_SIZES, Storage, StoredTensor

_LARGE_PAGE = 2**21
"""The size of a large page in bytes, on most machines."""


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


def new_memory(size: int) -> memoryview:
    """Allocate writable memory.

    A large `bytearray` would be filled with zeros while holding the GIL, so that no other thread could run.
    """
    if size < _LARGE_PAGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not every kernel has large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


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
        self._check, self._progressed, self._crc32 = check, progressed, fastest_crc32()
        self._files: dict[Path, IO[bytes]] = {}
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
            for file in self._files.values():
                file.close()

    def read(self, tensor: TensorSource) -> memoryview:
        """Read all elements of a tensor into memory."""
        width = ITEM_SIZES[tensor.dtype]
        content = left = new_memory(sum(piece.count for piece in tensor.pieces) * width)
        for piece in tensor.pieces:
            self._read_into(piece.storage, piece.begin * width, left[: piece.count * width])
            left = left[piece.count * width :]
        self._progressed(len(content))
        if tensor.view is None:
            return content
        import torch

        dtype = getattr(torch, tensor.dtype)
        ordered = new_memory(tensor.nbytes)
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

    def check(self, storage: Storage) -> None:
        """Verify the checksum of a record, and read what has not been read yet."""
        if storage.checksum is None:
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, storage.nbytes)))
        while (left := storage.nbytes - self._sums.setdefault(storage, (0, 0))[0]) > 0:
            self._read_into(storage, storage.nbytes - left, buffer[:left])
        if storage.checksum != self._sums[storage][1]:
            raise CheckpointError(
                f"{storage.path} is damaged: record {storage.key} does not match its checksum, or the file is being"
                " replaced. Get a complete copy of it."
            )

    def _read_into(self, storage: Storage, begin: int, content: memoryview) -> None:
        file = self._open(storage.path)
        for at in range(0, len(content), CHUNK_BYTES):
            chunk = content[at : at + CHUNK_BYTES]
            try:
                count = read_into(file, chunk, storage.begin + begin + at)
            except OSError as error:
                raise CheckpointError(f"{storage.path} cannot be read: {error}") from None
            if count != len(chunk):
                raise CheckpointError(f"{storage.path} is truncated, or being replaced. Get a complete copy of it.")
            done, so_far = self._sums.get(storage, (0, 0))
            if begin + at == done and storage.checksum is not None:
                done, so_far = done + len(chunk), self._crc32(chunk, so_far)
            self._sums[storage] = done, so_far

    def _open(self, path: Path) -> IO[bytes]:
        with self._opening:
            if path not in self._files:
                try:
                    self._files[path] = open_regular(path, buffering=0)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error}") from None
            return self._files[path]

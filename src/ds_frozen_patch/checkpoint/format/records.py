"""The bytes of tensors: read from files of `torch.save` and of safetensors, in pieces, and checked on the way.

Nothing is mapped into memory, so that what is read counts only while it is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...common.errors import CheckpointError
from . import safetensors as safetensors_file
from .stored import ITEM_SIZES, Storage, StoredTensor
from .zip_directory import CHUNK_BYTES, Record, by_key, chunks, open_regular, read_directory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """Elements of a storage that follow on each other: `count` of them from `begin` on."""

    storage: Storage
    begin: int
    count: int


@dataclass(frozen=True)
class Whole:
    """A whole tensor as it lies in files: the elements of all pieces, in order.

    `view` is given where it is one storage's elements in another order: the piece is then what they lie in.
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


def whole(tensor: StoredTensor) -> Whole:
    """A tensor that one storage holds."""
    piece = Piece(tensor.storage, tensor.offset, tensor.extent)
    return Whole(tensor.dtype, tensor.shape, (piece,), None if tensor.is_contiguous else tensor.stride)


def joined(parts: Sequence[StoredTensor], begin: int, count: int) -> tuple[Piece, ...]:
    """The pieces of `count` elements from `begin` on, in flat tensors that follow on each other."""
    pieces = []
    for part in parts:
        from_, to = max(begin, 0), min(begin + count, part.numel)
        if from_ < to:
            pieces.append(Piece(part.storage, part.offset + from_, to - from_))
        begin -= part.numel
    return tuple(pieces)


def mapped(tensors: Mapping[str, Whole]) -> dict[str, torch.Tensor]:
    """Tensors of one piece each, mapped into memory from their files: nothing is read before it is used."""
    import torch

    files: dict[Path, torch.Tensor] = {}
    made = {}
    with Records() as records:
        for name, tensor in tensors.items():
            (piece,) = tensor.pieces
            file, width = piece.storage.path, ITEM_SIZES[tensor.dtype]
            if file not in files:
                files[file] = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            begin = records.place(piece.storage) + piece.begin * width
            values = files[file][begin : begin + tensor.nbytes].view(getattr(torch, tensor.dtype))
            made[name] = values.view(tensor.shape)
    return made


def check_file(file: Path, told: Callable[[int], object] = lambda _: None, *, first: int = 0, step: int = 1) -> None:
    """Compare every record of a file of `torch.save` with its checksum, or every `step`-th from the `first` on.

    Args:
        file: the file.
        told: is called with the number of bytes that were read.
        first: the place of the first record.
        step: 1 for all that follow.

    Raises:
        CheckpointError: one is not as it was written, or the file cannot be read.
    """
    try:
        with open_regular(file) as opened:
            for record in list(read_directory(opened).values())[first::step]:
                checksum = 0
                for chunk in chunks(opened, record):
                    checksum = zlib.crc32(chunk, checksum)
                    told(len(chunk))
                if record.checksum not in (None, checksum):
                    name = record.name.removeprefix("data/")
                    raise CheckpointError(
                        f"{file} is damaged: record {name} is not as it was written. Take a whole copy of it."
                    )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read, is cut or damaged ({error}). Take a whole copy of it.") from None


@dataclass
class _Record:
    """Where a record's bytes begin in its file, how many they are, and how far they have been checked."""

    begin: int
    size: int
    checksum: int | None
    checked: int = 0
    so_far: int = 0
    in_order: bool = True


class Records:
    """Reads storages of many files; leave it without an exception, and all that was read was as it was written.

    A file of `torch.save` has a checksum for each record. It is computed as the record is read; what of it was not
    read, or not in order, is read for that at the end.

    Args:
        check: whether to do that.

    Raises:
        CheckpointError: a file cannot be read, or a record is not as it was written.
    """

    def __init__(self, check: bool = True) -> None:
        self._check = check
        self._files: dict[Path, tuple[IO[bytes], Mapping[str, Record]]] = {}
        self._records: dict[Storage, _Record] = {}

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

    def read(self, tensor: Whole) -> bytearray:
        """The elements of a tensor in its order; it takes as much memory as that."""
        content = bytearray(sum(piece.count for piece in tensor.pieces) * ITEM_SIZES[tensor.dtype])
        begin = 0
        for chunk in self.chunks(tensor):
            content[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        if tensor.view is None:
            return content
        import torch

        dtype = getattr(torch, tensor.dtype)
        ordered = bytearray(tensor.nbytes)
        elements = torch.frombuffer(content, dtype=dtype).as_strided(tensor.shape, tensor.view)
        torch.frombuffer(ordered, dtype=dtype).view(tensor.shape).copy_(elements)
        return ordered

    def chunks(self, tensor: Whole) -> Iterator[memoryview]:
        """The elements of a tensor's pieces as bytes, a few MiB at a time; each chunk is valid until the next."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, tensor.nbytes)))
        width = ITEM_SIZES[tensor.dtype]
        for piece in tensor.pieces:
            begin, end = piece.begin * width, (piece.begin + piece.count) * width
            while begin < end:
                chunk = buffer[: min(len(buffer), end - begin)]
                self._read_into(piece.storage, begin, chunk)
                yield chunk
                begin += len(chunk)

    def place(self, storage: Storage) -> int:
        """Where in its file a storage begins."""
        return self._find(storage).begin

    def check(self, storage: Storage) -> None:
        """Compare a record with its checksum, whatever of it has been read."""
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
                f"{storage.path} is damaged: record {storage.key} is not as it was written. Take a whole copy of it."
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
            raise CheckpointError(f"{storage.path} is cut. Take a whole copy of it.")
        if record.checksum is None:
            return
        if begin == record.checked:
            record.so_far = zlib.crc32(chunk, record.so_far)
            record.checked += len(chunk)
        else:
            record.in_order = False

    def _record(self, storage: Storage) -> _Record:
        if storage not in self._records:
            self._records[storage] = self._find(storage)
        return self._records[storage]

    def _find(self, storage: Storage) -> _Record:
        if storage.path not in self._files:
            self._files[storage.path] = _open(storage.path)
        return _find(storage, self._files[storage.path][1])


def _open(path: Path) -> tuple[IO[bytes], Mapping[str, Record]]:
    """A file, and what it says of its records, by their keys."""
    places = safetensors_file.places(path) if path.suffix == ".safetensors" else None
    try:
        file = open_regular(path, buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if places is not None:
        return file, {name: Record(name, place.start, len(place), None) for name, place in places.items()}
    try:
        return file, by_key(read_directory(file))
    except (OSError, ValueError) as error:
        file.close()
        raise CheckpointError(f"{path} cannot be read, is cut or damaged ({error}). Take a whole copy of it.") from None


def _find(storage: Storage, known: Mapping[str, Record]) -> _Record:
    place = known.get(storage.key)
    if place is None or place.size != storage.nbytes:
        raise CheckpointError(f"{storage.path} is damaged: it has no record {storage.key} as its pickle describes it.")
    return _Record(place.begin, place.size, place.checksum)

"""Tensors that are composed of pieces of stored ones, to be written to a new file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..format.records import Piece, Records, TensorSource
from ..format.stored import ITEM_SIZES, Storage, StoredTensor
from ..format.zip_directory import CHUNK_BYTES
from .partitions import Range


class NewTensors:
    """Tensors that are not in a file yet: each consists of pieces of others, and of zeros."""

    def __init__(self) -> None:
        self.pieces: dict[Storage, list[Piece | int]] = {}

    def flat(self, dtype: str, pieces: Sequence[Piece | int]) -> StoredTensor:
        """Add a flat tensor of pieces and zeros; a number stands for that many zeros."""
        count = sum(piece if isinstance(piece, int) else piece.count for piece in pieces)
        storage = Storage(None, str(len(self.pieces)), dtype, count)
        self.pieces[storage] = list(pieces)
        return StoredTensor(storage, dtype, 0, (count,), (1,))

    def recut(self, flats: Mapping[tuple[int, int], StoredTensor], ranges: Sequence[Range | int]) -> StoredTensor:
        """Add a flat tensor of ranges of others, which are listed by rank and group."""

        def piece(item: Range) -> Piece:
            flat = flats[item.rank, item.group]
            return Piece(flat.storage, flat.offset + item.begin, item.count)

        taken = [flats[item.rank, item.group] for item in ranges if isinstance(item, Range)]
        like = (taken or list(flats.values()))[0]
        made = self.flat(like.dtype, [piece(item) if isinstance(item, Range) else item for item in ranges])
        return replace(like, storage=made.storage, offset=0, shape=made.shape, stride=made.stride)

    def copy(self, value: Any) -> Any:
        """Copy a tensor: ranks that shared one step counter would each count the other's steps."""
        if not isinstance(value, StoredTensor):
            return value
        made = self.flat(value.dtype, [Piece(value.storage, value.offset, value.extent)])
        return replace(value, storage=made.storage, offset=0)

    def content(self, records: Records, storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        """The bytes of a new storage, or of one in a file."""
        if storage not in self.pieces:
            yield from records.chunks(TensorSource("uint8", (count,), (Piece(storage, begin, count),)))
            return
        for piece in self.pieces[storage]:
            if isinstance(piece, int):
                size = piece * ITEM_SIZES[storage.dtype]
                yield from (bytes(min(CHUNK_BYTES, size - begin)) for begin in range(0, size, CHUNK_BYTES))
            else:
                yield from records.chunks(TensorSource(storage.dtype, (piece.count,), (piece,)))

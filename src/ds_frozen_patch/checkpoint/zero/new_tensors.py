"""Tensors that are composed of pieces of stored ones, to be written to a new file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

from ..format.archive import CHUNK_BYTES
from ..format.records import Piece, Records, TensorSource
from ..format.stored import ITEM_SIZES, Storage, StoredTensor


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

    def flat_like(self, like: StoredTensor, pieces: Iterable[Piece | int]) -> StoredTensor:
        """Add a flat tensor of pieces and zeros, of the dtype and kind of another tensor."""
        tensor = self.flat(like.dtype, list(pieces))
        return replace(like, storage=tensor.storage, offset=0, shape=tensor.shape, stride=tensor.stride)

    def whole_like(self, like: StoredTensor, pieces: Iterable[Piece | int], shape: Sequence[int]) -> StoredTensor:
        """Add a contiguous tensor of a shape, of the dtype and kind of another tensor."""
        strides = list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else []
        return replace(self.flat_like(like, pieces), shape=tuple(shape), stride=tuple(strides))

    def copy(self, value: Any) -> Any:
        """Copy a tensor: ranks that shared one step counter would each count the other's steps."""
        if not isinstance(value, StoredTensor):
            return value
        tensor = self.flat(value.dtype, [Piece(value.storage, value.offset, value.extent)])
        return replace(value, storage=tensor.storage, offset=0)

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

"""Write a file that `torch.load` reads, without torch."""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ...common.errors import CheckpointError
from ...common.files import begin_sync
from .stored import MAX_DEPTH, STORAGES, Fixed, Size, StandIn, Storage, StoredTensor, iter_tensors, stand_in

ALIGNMENT = 64
"""Bytes; torch aligns records like this, for files that are mapped into memory."""
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


def write_archive(path: Path, state: Any, content: Callable[[Storage, int, int], Iterable[bytes | memoryview]]) -> None:
    """Write a state, as `archive.read` returns it, to a file that `torch.load` reads.

    Only the range of each storage that its tensors use is written.

    Args:
        path: the file to create.
        state: plain values, stored tensors and stand-ins.
        content: returns bytes of a storage; called with the storage, the offset of the range and its length in bytes.
    """
    spans: dict[Storage, tuple[int, int]] = {}
    for _, tensor in iter_tensors(state):
        storage, begin, end = tensor.storage, tensor.offset, tensor.offset + tensor.extent
        if storage.dtype != tensor.dtype or not tensor.numel:
            begin, end = 0, storage.numel
        span = spans.get(storage, (begin, end))
        spans[storage] = min(begin, span[0]), max(end, span[1])
    pickled = BytesIO()
    pickler = _Pickler(pickled, spans)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 10 * MAX_DEPTH))  # Python's pickler takes several calls for each level
    try:
        pickler.dump(state)
    except RecursionError:
        raise CheckpointError("The checkpoint has values that are nested too deeply to be written again.") from None
    finally:
        sys.setrecursionlimit(limit)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
        _write_record(archive, "data.pkl", pickled.tell(), [pickled.getvalue()])
        _write_record(archive, "byteorder", 6, [b"little"])
        begun = 0
        for storage, key in pickler.keys.items():
            begin, end = spans.get(storage, (0, storage.numel))
            width = storage.nbytes // storage.numel if storage.numel else 1
            _write_record(
                archive, f"data/{key}", (end - begin) * width, content(storage, begin * width, (end - begin) * width)
            )
            begun = begin_sync(file, begun)
        _write_record(archive, "version", 2, [b"3\n"])


def _write_record(archive: zipfile.ZipFile, name: str, size: int, content: Iterable[bytes | memoryview]) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = size
    file: Any = archive.fp
    large = size > zipfile.ZIP64_LIMIT // 2
    begin = file.tell() + 30 + len(info.filename) + (20 if large else 0)
    gap = -begin % ALIGNMENT
    if gap:
        gap += ALIGNMENT if gap < 4 else 0
        info.extra = struct.pack("<HH", 0x4246, gap - 4) + b"\0" * (gap - 4)  # the field that torch fills gaps with
    with archive.open(info, "w", force_zip64=large) as record:
        for chunk in content:
            record.write(chunk)


class _Pickler(pickle._Pickler):
    """Pickles what `archive.read` returns: stand-ins under the names that they stand for, storages under new keys."""

    def __init__(self, file: IO[bytes], spans: dict[Storage, tuple[int, int]]) -> None:
        super().__init__(file, protocol=2)
        self.spans = spans
        self.keys: dict[Storage, str] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        key = self.keys.setdefault(obj, str(len(self.keys)))
        begin, end = self.spans.get(obj, (0, obj.numel))
        return "storage", stand_in(f"torch.{_STORAGE_OF[obj.dtype]}"), key, "cpu", end - begin

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, StoredTensor):
            return self._tensor(obj)
        if isinstance(obj, Size):
            return stand_in("torch.Size"), (tuple(obj),)
        if isinstance(obj, StandIn):
            call: tuple[Any, tuple[Any, ...]] = (obj.function or type(obj), obj.arguments)
            if not obj.is_called:
                new: Any = copyreg  # the functions that pickle itself writes as opcodes
                call = new.__newobj__, (type(obj), *obj.arguments)
                if obj.named:
                    call = new.__newobj_ex__, (type(obj), obj.arguments, obj.named)
            items, pairs = (iter(values) if values else None for values in (obj.items, obj.pairs))
            return (*call, obj.state, items, pairs)
        return NotImplemented

    def _tensor(self, tensor: StoredTensor) -> tuple[Any, tuple[Any, ...]]:
        begin, _ = self.spans.get(tensor.storage, (0, 0))
        function = stand_in(tensor.maker)
        arguments = (tensor.storage, tensor.offset - begin, tuple(tensor.shape), tuple(tensor.stride), *tensor.more)
        if tensor.wrapper is None:
            return function, arguments
        name, more = tensor.wrapper
        if name.endswith("_rebuild_from_type_v2"):
            return stand_in(name), (function, more[0], arguments, more[1])
        return stand_in(name), (replace(tensor, wrapper=None), *more)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write the name that a class stands for; nothing is imported."""
        if isinstance(obj, Fixed):
            module, _, inner = obj.stands_for.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{inner}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]

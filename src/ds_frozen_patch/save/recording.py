"""What `torch.save` writes, recorded with the values of this moment, to be written to its file later.

torch writes a file by one call for each storage, and a few more. Made again with copies of the data, these calls write
the same bytes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.overrides import overridden

if TYPE_CHECKING:
    import torch


@dataclass
class Recorder:
    """Records files of one rank. The memory for their data is kept, and used again for the next save.

    Attributes:
        files: the recorded calls for each file, in order.
        copies: the addresses of the copies made for this save.
    """

    files: list[tuple[Path, list[tuple[str, tuple[Any, ...]]]]] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    _buffers: list[torch.UntypedStorage] = field(default_factory=list)
    _used: int = 0
    _others: int = 0  # open archives that are not recorded

    def begin(self) -> None:
        """Forget what was recorded."""
        self.files, self.copies, self._used = [], set(), 0

    def recording(self, folder: Path) -> AbstractContextManager[None]:
        """While this lasts, `torch.save` of this thread writes nothing to a folder; what it would write is recorded.

        It still writes elsewhere, as does state that pickles itself by `torch.save` into memory.
        """
        import torch

        module: Any = torch.serialization
        storages: Any = torch.UntypedStorage
        thread = threading.get_ident()
        open_writer, to_cpu = module._open_zipfile_writer, storages.cpu

        def open_recorder(file: Any) -> Any:
            if threading.get_ident() != thread:
                return open_writer(file)
            is_inside = isinstance(file, str | os.PathLike) and folder in Path(file).parents
            return self._file(Path(file)) if is_inside else self._other(open_writer(file))

        def to_buffer(storage: Any) -> Any:
            is_recorded = threading.get_ident() == thread and not self._others
            return self._copy(storage) if is_recorded else to_cpu(storage)

        return overridden([(module, "_open_zipfile_writer", open_recorder), (storages, "cpu", to_buffer)])

    def write(self) -> Iterator[Path]:
        """Write the files, one for each step."""
        import torch

        serialization: Any = torch.serialization
        for path, calls in self.files:
            with serialization._open_zipfile_writer(str(path)) as writer:
                for name, arguments in calls:
                    getattr(writer, name)(*arguments)
            yield path

    @contextmanager
    def _file(self, file: Path) -> Iterator[_Calls]:
        calls = _Calls(self)
        yield calls
        self.files.append((file.absolute(), calls.calls))

    @contextmanager
    def _other(self, opened: Any) -> Iterator[Any]:
        self._others += 1
        try:
            with opened as writer:
                yield writer
        finally:
            self._others -= 1

    def _copy(self, storage: Any) -> Any:
        """A copy on the CPU, of a storage on any device."""
        buffer = self._buffer(storage.nbytes(), storage.device.type == "cuda")
        buffer.copy_(storage)
        return buffer

    def _copy_from(self, address: int, size: int) -> int:
        """The address of a copy of memory of the CPU."""
        buffer = self._buffer(size, False)
        if size:
            ctypes.memmove(buffer.data_ptr(), address, size)
        return int(buffer.data_ptr())

    def _buffer(self, size: int, pinned: bool) -> Any:
        import torch

        if self._used == len(self._buffers) or self._buffers[self._used].nbytes() != size:
            new = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            self._buffers[self._used : self._used + 1] = [new]
        buffer = self._buffers[self._used]
        self._used += 1
        self.copies.add(buffer.data_ptr())
        return buffer


class _Calls:
    """In the place of torch's writer: records the calls of its methods."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Record data: text, bytes, a storage, or in old releases of torch the address of one."""
        if not isinstance(data, str | bytes):
            address = data if isinstance(data, int) else data.data_ptr()
            if address not in self._recorder.copies:
                data = self._recorder._copy_from(data, size) if isinstance(data, int) else self._recorder._copy(data)
        self.calls.append(("write_record", (name, data, size)))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, arguments))

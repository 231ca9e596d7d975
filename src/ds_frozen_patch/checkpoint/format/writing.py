"""What a tool writes: under another name until it is whole, and a file of `torch.save` made without torch."""

from __future__ import annotations

import copyreg
import os
import pickle
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ...common.durable import make_folder, sync_folder, sync_tree
from ...common.errors import CheckpointError
from ...common.text import human_bytes
from ..zero.layout import Layout
from .stored import STORAGES, Size, StandIn, Storage, StoredTensor, stand_in, tensors
from .zip_directory import CHUNK_BYTES

ALIGNMENT = 64
"""Bytes; torch aligns records so, for files that are mapped into memory."""
MAX_BESIDE = 64 << 20
"""How many bytes may lie beside the states of a checkpoint, and as many more as these have."""
_MAX_DEPTH = 64
_CONVERTER = "zero_to_fp32.py"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@contextmanager
def output(target: str | Path, *sources: Path, over: bool = False) -> Iterator[Path]:
    """A path to write a file or a directory to, that gets the target's name when all is written, and not before.

    Args:
        target: the name.
        sources: what is read, and must stay as it is.
        over: take the place of a file of that name, wherever it is.

    Raises:
        CheckpointError: something has that name, it is inside of a source, or it cannot be written.
    """
    path = Path(target)
    if not over:
        check_output(path, *sources)
    made = None
    try:
        make_folder(path.parent)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        yield made / path.name
        sync_tree(made / path.name)
        if not over:
            check_output(path)
        (made / path.name).rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}). Nothing was left there.") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def check_output(path: Path, *sources: Path) -> None:
    """Raise CheckpointError where `output` would."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is there already. Name another place for the output, or remove it first.")
    for source in sources:
        if source.is_dir() and source.resolve() in (path.parent.resolve(), *path.parent.resolve().parents):
            raise CheckpointError(f"{path} is inside of {source}, which must stay as it is. Name a place outside.")


def copy_others(layout: Layout, made: Path) -> None:
    """Copy what lies beside the states: the note of the tag, and what a trainer has put there.

    Anybody may have made it. So the bytes of regular files are copied, without modes or attributes and up to a limit.
    Links are not followed; they, and what is no file, are left out, which is said on stderr. DeepSpeed's
    `zero_to_fp32.py` is left out too: people run it, and this one need not be DeepSpeed's. Installed with it, it is
    `python -m deepspeed.utils.zero_to_fp32`.

    Raises:
        CheckpointError: a file cannot be read, or all together have more than the states' bytes and `MAX_BESIDE`.
    """
    copies = _Copies(sum(file.stat().st_size for file in layout.files) + MAX_BESIDE)
    folder, states = layout.model[0].parent, {file.name for file in layout.files}
    with _opened(folder, os.O_DIRECTORY) as opened:
        copies.folder(folder, opened, made / layout.tag, _names(opened) - states)
    with _opened(layout.root, os.O_DIRECTORY) as opened:
        copies.folder(layout.root, opened, made, _names(opened, with_folders=False) - {"latest"})
    (made / "latest").write_text(layout.tag, encoding="utf-8")
    if copies.left_out:
        shown = ", ".join(repr(str(path)) for path in copies.left_out[:10])
        more = f" and {len(copies.left_out) - 10} more" if len(copies.left_out) > 10 else ""
        print(f"left out, since they are links or not regular files: {shown}{more}", file=sys.stderr)


@dataclass
class _Copies:
    """Copies files while there is `room` for their bytes."""

    room: int
    left_out: list[Path] = field(default_factory=list)

    def folder(self, source: Path, opened: int, target: Path, names: Iterable[str], depth: int = 0) -> None:
        """Copy these of a folder. They are found in the folder that is open: a path could lead elsewhere by now."""
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{source} has too many folders inside of each other. Move it away.")
        for name in sorted(names):
            item, kind = source / name, os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
            if stat.S_ISDIR(kind):
                (target / name).mkdir()
                with _opened(item, os.O_DIRECTORY, opened) as inner:
                    self.folder(item, inner, target / name, _names(inner), depth + 1)
            elif not stat.S_ISREG(kind):
                self.left_out.append(item)
            elif name.lower() != _CONVERTER:
                self._file(item, opened, target / name)

    def _file(self, source: Path, folder: int, target: Path) -> None:
        with _opened(source, os.O_NONBLOCK, folder) as opened:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):  # it was one before
                self.left_out.append(source)
                return
            self._take(found.st_size, source)
            copied = 0
            with target.open("xb") as made:
                while chunk := os.read(opened, CHUNK_BYTES):
                    copied += len(chunk)
                    if copied > found.st_size:  # it grows
                        self._take(len(chunk), source)
                    made.write(chunk)

    def _take(self, size: int, source: Path) -> None:
        self.room -= size
        if self.room < 0:
            raise CheckpointError(
                f"{source} is too large to be copied: what lies beside the states may have at most as many bytes as"
                f" they and {human_bytes(MAX_BESIDE)}. Move it away."
            )


def _names(folder: int, with_folders: bool = True) -> set[str]:
    """What is in an open folder."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if with_folders or not entry.is_dir(follow_symlinks=False)}


@contextmanager
def _opened(path: Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """A file or folder to be read; with an open folder, by its name in that and if it is no link."""
    flags |= os.O_RDONLY | os.O_CLOEXEC
    if folder is not None:
        flags |= os.O_NOFOLLOW
    try:
        opened = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        yield opened
    finally:
        os.close(opened)


def write_archive(path: Path, state: Any, content: Callable[[Storage, int, int], Iterable[bytes | memoryview]]) -> None:
    """Write a file that `torch.load` reads, of a state as `archive.read` gives it.

    Of each storage only the range that its tensors use is written.

    Args:
        path: the file to be made.
        state: plain values, stored tensors and stand-ins.
        content: gives a storage's bytes, for a storage, where its range begins and how many bytes it has.
    """
    spans: dict[Storage, tuple[int, int]] = {}
    for _, tensor in tensors(state):
        storage, begin, end = tensor.storage, tensor.offset, tensor.offset + tensor.extent
        if storage.dtype != tensor.dtype or not tensor.numel:
            begin, end = 0, storage.numel
        known = spans.get(storage, (begin, end))
        spans[storage] = min(begin, known[0]), max(end, known[1])
    pickled = BytesIO()
    pickler = _Pickler(pickled, spans)
    pickler.dump(state)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
        _write(archive, "data.pkl", pickled.tell(), [pickled.getvalue()])
        _write(archive, "byteorder", 6, [b"little"])
        for storage, key in pickler.keys.items():
            begin, end = spans.get(storage, (0, storage.numel))
            width = storage.nbytes // storage.numel if storage.numel else 1
            _write(
                archive, f"data/{key}", (end - begin) * width, content(storage, begin * width, (end - begin) * width)
            )
        _write(archive, "version", 2, [b"3\n"])


def _write(archive: zipfile.ZipFile, name: str, size: int, content: Iterable[bytes | memoryview]) -> None:
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
    """Says again what `archive.read` has read: stand-ins by the names that they stand for, storages by new keys."""

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
            call: tuple[Any, tuple[Any, ...]] = (type(obj), obj.arguments)
            if not obj.is_called:
                call = (
                    copyreg.__newobj__,  # type: ignore[attr-defined]
                    (type(obj), *obj.arguments),
                )
            items, pairs = (iter(held) if held else None for held in (obj.items, obj.pairs))
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
        """A stand-in's class is named as what it stands for; nothing is imported for that."""
        if isinstance(obj, type) and issubclass(obj, StandIn):
            module, _, inner = obj.stands_for.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{inner}\n".encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]

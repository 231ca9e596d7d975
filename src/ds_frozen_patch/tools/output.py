"""The output of a tool: it gets its final name when it is complete, and includes the other files of a checkpoint."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.format.archive import CHUNK_BYTES
from ..checkpoint.zero.layout import Layout
from ..common.errors import CheckpointError
from ..common.files import RECORD
from ..common.text import human_bytes
from ..publish.durable import write_beside

MAX_OTHER_BYTES = 64 << 20
"""How much larger than its states the other files of a checkpoint may be."""
_MAX_DEPTH = 64
_CONVERTERS = ("zero_to_fp32.py", "zero_to_torch.py")
SCRIPTS = (".py", ".pyc", ".sh", ".so", ".ipynb", ".bat", ".ps1")


@contextmanager
def new_output(target: str | Path, *sources: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a path to write a file or directory to; it gets the target's name when the block ends without an error.

    Args:
        target: the final name.
        sources: what is read and must not be changed.
        replace: replace an existing file.

    Raises:
        CheckpointError: the target exists, is inside a source, or cannot be written.
    """
    path = Path(target)
    if not replace:
        check_output(path, *sources)
    try:
        with write_beside(path, replace=replace) as hidden:
            yield hidden
    except FileExistsError as error:
        if error.filename != str(path):
            raise _cannot_write(path, error) from None
        raise _exists(path) from None
    except OSError as error:
        raise _cannot_write(path, error) from None


def check_output(path: Path, *sources: Path) -> None:
    """Raise CheckpointError if the path exists or is inside a source."""
    if path.exists() or path.is_symlink():
        raise _exists(path)
    for source in sources:
        if source.is_dir() and source.resolve() in (path.parent.resolve(), *path.parent.resolve().parents):
            raise CheckpointError(f"{path} is inside {source}, which must not be changed. Choose a path outside of it.")


def _exists(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} already exists. Choose another path for the output, or remove it first.")


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be written ({error}). Nothing was left there.")


def copy_other_files(layout: Layout, target: Path) -> None:
    """Copy the other files of a checkpoint, such as those of the trainer, and write `latest`.

    The files are not trusted: only the bytes of regular files are copied, without modes or attributes, and up to a
    limit. Links, special files and scripts are skipped: people run scripts, and these may have been changed. All are
    listed on stderr but DeepSpeed's converters, which each checkpoint has (`python -m deepspeed.utils.zero_to_fp32`).

    Args:
        layout: of the checkpoint.
        target: the directory of the copy.

    Raises:
        CheckpointError: a file cannot be read, or together they are larger than the states plus `MAX_OTHER_BYTES`.
    """
    copies = _Copies(sum(file.stat().st_size for file in layout.files) + MAX_OTHER_BYTES)
    folder, states = layout.model[0].parent, {file.name for file in layout.files} | {RECORD}
    with _opened(folder, os.O_DIRECTORY) as opened:
        copies.folder(folder, opened, target / layout.tag, _names(opened) - states)
    with _opened(layout.root, os.O_DIRECTORY) as opened:
        copies.folder(layout.root, opened, target, _names(opened, with_folders=False) - {"latest"})
    (target / "latest").write_text(layout.tag, encoding="utf-8")
    for skipped, why in (
        (copies.skipped, "they are links or not regular files"),
        (copies.scripts, "they are scripts, which could have been changed"),
    ):
        if skipped:
            shown = ", ".join(repr(str(path)) for path in skipped[:10])
            more = f" and {len(skipped) - 10} more" if len(skipped) > 10 else ""
            print(f"skipped, because {why}: {shown}{more}", file=sys.stderr)


@dataclass
class _Copies:
    """Copies files, until `room` bytes are used up."""

    room: int
    skipped: list[Path] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)

    def folder(self, source: Path, opened: int, target: Path, names: Iterable[str], depth: int = 0) -> None:
        """Copy these names of an open folder. Its path is only for messages: it could lead elsewhere by now."""
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{source} is nested too deeply. Move it out of the checkpoint.")
        for name in sorted(names):
            item, kind = source / name, os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
            if stat.S_ISDIR(kind):
                (target / name).mkdir()
                with _opened(item, os.O_DIRECTORY, opened) as inner:
                    self.folder(item, inner, target / name, _names(inner), depth + 1)
            elif not stat.S_ISREG(kind):
                self.skipped.append(item)
            elif name.lower().endswith(SCRIPTS):
                if name not in _CONVERTERS:
                    self.scripts.append(item)
            else:
                self._file(item, opened, target / name)

    def _file(self, source: Path, folder: int, target: Path) -> None:
        with _opened(source, os.O_NONBLOCK, folder) as opened:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode):  # it was replaced in between
                self.skipped.append(source)
                return
            self._take(status.st_size, source)
            if os.pread(opened, 2, 0) == b"#!":
                self.scripts.append(source)
                return
            copied = 0
            with target.open("xb") as copy:
                while chunk := os.read(opened, CHUNK_BYTES):
                    copied += len(chunk)
                    if copied > status.st_size:  # it grows
                        self._take(len(chunk), source)
                    copy.write(chunk)

    def _take(self, size: int, source: Path) -> None:
        self.room -= size
        if self.room < 0:
            raise CheckpointError(
                f"{source} is too large to copy: the other files of a checkpoint may be at most"
                f" {human_bytes(MAX_OTHER_BYTES)} larger than its states. Move it out of the checkpoint."
            )


def _names(folder: int, with_folders: bool = True) -> set[str]:
    """The names in an open folder."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if with_folders or not entry.is_dir(follow_symlinks=False)}


@contextmanager
def _opened(path: Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file or folder; with `folder`, by its name in that open folder, and only if it is not a link."""
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

"""The output of a tool: it gets its final name when it is complete, and includes the other files of a checkpoint."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
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
    copies.add(layout.model[0].parent, target / layout.tag, {RECORD, *(file.name for file in layout.files)})
    copies.add(layout.root, target, {"latest", layout.tag}, is_deep=False)
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

    def add(self, source: Path, target: Path, others: set[str], is_deep: bool = True) -> None:
        """Copy what a folder has beside the others. No link is followed, not even one that has just replaced a file."""

        def fail(error: OSError) -> None:
            raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.")

        top = source.resolve()
        for path, folders, names, opened in os.fwalk(top, onerror=fail):
            inside = Path(path).relative_to(top)
            (target / inside).mkdir(exist_ok=True)
            for name in sorted({*names, *folders} - (others if path == str(top) else set())):
                kind = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
                if stat.S_ISREG(kind):
                    self._copy(source / inside / name, opened, target / inside / name)
                elif not stat.S_ISDIR(kind):
                    self.skipped.append(source / inside / name)
            if not is_deep:
                break

    def _copy(self, source: Path, folder: int, target: Path) -> None:
        def open_in_folder(name: str, flags: int) -> int:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)

        if source.name in _CONVERTERS:
            return
        try:
            file = open(source.name, "rb", opener=open_in_folder)  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"{source} cannot be read: {error.strerror}.") from None
        with file:
            if source.name.lower().endswith(SCRIPTS) or file.peek(2)[:2] == b"#!":
                self.scripts.append(source)
                return
            size = os.fstat(file.fileno()).st_size  # no more is read: it may grow, or be a device by now
            self.room -= size
            if self.room < 0:
                raise CheckpointError(
                    f"{source} is too large to copy: the other files of a checkpoint may be at most"
                    f" {human_bytes(MAX_OTHER_BYTES)} larger than its states. Move it out of the checkpoint."
                )
            with target.open("xb") as copy:
                for begin in range(0, size, CHUNK_BYTES):
                    copy.write(file.read(min(CHUNK_BYTES, size - begin)))

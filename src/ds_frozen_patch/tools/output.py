"""The output of a tool: it gets its final name when it is complete, and includes the other files of a checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.zero.layout import Layout
from ..common.errors import CheckpointError, named
from ..common.files import RECORD, SCRATCH
from ..publish.durable import write_beside
from ..publish.publication import is_local

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
        CheckpointError: the target is an address, exists, is inside a source, or cannot be written.
    """
    path = Path(target)
    check_output(path, *sources, replace=replace)
    try:
        with write_beside(path, replace=replace) as hidden:
            yield hidden
    except FileExistsError as error:
        if error.filename != str(path):
            raise _cannot_write(path, error) from None
        raise _exists(path) from None
    except OSError as error:
        raise _cannot_write(path, error) from None


def check_output(path: Path, *sources: Path, replace: bool = False) -> None:
    """Raise CheckpointError if the path is an address, or unless it is replaced, exists or is inside a source."""
    if not is_local(path):
        raise CheckpointError(f"{path} is an address. Choose a path on this machine for the output, and copy it.")
    if replace:
        return
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

    Only the bytes of regular files are copied. Links, special files and scripts, which people run and which may have
    been changed, are skipped, and listed on stderr, except for DeepSpeed's converters, which each checkpoint has.

    Args:
        layout: of the checkpoint.
        target: the directory of the copy.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    if SCRATCH.match(str(layout.root)):
        from ..buckets import bring_others

        bring_others(layout.root, layout.tag)
    skipped = []
    folder = layout.model[0].parent
    for source, output, others in (
        (folder, target / layout.tag, {RECORD, *(file.name for file in layout.files)}),
        (layout.root, target, {"latest", layout.tag}),
    ):
        for path, folders, names in os.walk(source, onerror=_cannot_read):
            for name in sorted({*folders, *names} - (others if path == str(source) else set())):
                item = Path(path, name)
                if item.is_symlink() or not (item.is_dir() or item.is_file()) or _is_script(item):
                    skipped.append(str(item))
                elif item.is_file():
                    copy = output / item.relative_to(source)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(item, copy, follow_symlinks=False)
            if source == layout.root:
                break
    (target / "latest").write_text(layout.tag, encoding="utf-8")
    if shown := [path for path in skipped if not path.endswith(_CONVERTERS)]:
        print(f"skipped, because they are links, special files or scripts: {named(shown, 10)}", file=sys.stderr)


def _is_script(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.name.lower().endswith(SCRIPTS) or file.read(2) == b"#!"


def _cannot_read(error: OSError) -> None:
    raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from None

"""How the files of a save get their names in a folder; no folder is ever renamed.

    last.ckpt/                                          named by the program
    ├── .ds_frozen_patch-3f2a9c01d4e8                   a note: which process runs the save of this id
    ├── latest                                          renamed into place last
    └── checkpoint/                                     of the tag
        ├── .mp_rank_00_model_states.pt.3f2a9c01d4e8    a file of this save
        ├── .ds_frozen_patch-journal-9b1e77c20a55       while the files get their names
        ├── ds_frozen_patch.json                        the record
        └── mp_rank_00_model_states.pt                  a file of the previous save

Each file is written under a hidden name. Once all are on disk, the journal gets its name: from this moment on the new
checkpoint exists. It lists which files get their names, the record last, and which are removed. Whoever finds it
finishes it. A hidden file can be renamed only once, so any number of processes may do that at the same time.

A journal's name contains the digest of the record that it replaces, so there is only one at a time, and one of another
job that was overtaken changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ..common.files import EXPORTS, OFFLOADED, RECORD, is_state, is_state_file
from .durable import entries, listed, sync_file, sync_folder
from .notes import OURS, notes

SINGLE = f"{OURS[1:]}-weights"
"""The name from which the hidden one of a single file is made: Lightning searches for others, such as "last"."""

_JOURNAL = f"{OURS}-journal-"
_PREPARED = "ds_frozen_patch-journal"
HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{12})")
"""A hidden name: the one that the file is to have, and the id of its save."""
_EXPORTED = [name.rpartition("/")[2] for name in EXPORTS]
_PREFIXES = (OURS[1:], "zero_to_")
_MOST_BYTES = 1 << 26


def hidden(path: Path, save: str) -> Path:
    """Where the save of this id writes what is to be at a path."""
    return path.with_name(f".{path.name}.{save}")


def folders_of(tag: Path) -> set[Path]:
    """The folders in which a save to a tag has hidden files: exports can be in the tag's folder, or beside it."""
    return {(folder / name).parent for folder in (tag, tag.parent) for name in EXPORTS}


def hidden_files(items: Iterable[Path]) -> Iterator[tuple[Path, str, str]]:
    """The hidden files of saves among `items`: each with the name that it is to have, and the id of its save."""
    for item in items:
        match = HIDDEN.fullmatch(item.name)
        if match and (is_state(match[1]) or match[1].startswith(_PREFIXES) or match[1] in ("latest", *_EXPORTED)):
            yield item, match[1], match[2]


@dataclass(frozen=True)
class Journal:
    """The renames and removals that complete a save in a tag's folder.

    Attributes:
        save: the id of the save.
        before, after: the digest of the record, before it is done and after.
        names: of the files that get their names, by paths from the folder; see `may_change`.
        removed: of files that the new checkpoint does not have.
    """

    save: str
    before: str
    after: str
    names: tuple[str, ...]
    removed: tuple[str, ...]

    def paths(self, folder: Path) -> Iterator[tuple[Path, Path]]:
        """Each hidden file, and where it is to be: the record last."""
        for name in sorted(self.names, key=lambda name: name == RECORD):
            yield hidden(folder / name, self.save), folder / name

    def prepare(self, folder: Path, sync: bool) -> None:
        """Write it under a hidden name, before `commit`."""
        note = hidden(folder / _PREPARED, self.save)
        note.write_text(json.dumps(vars(self)), encoding="utf-8")
        if sync:
            sync_file(note)


def may_change(name: str) -> bool:
    """Whether a journal may name a file: those that a save writes, and exports beside the tag's folder or in it."""
    return is_state(name) or name.removeprefix("../") in EXPORTS


def digest(folder: Path) -> str:
    """What identifies the record in a folder; "none" if there is none."""
    try:
        return digest_of((folder / RECORD).read_bytes())
    except FileNotFoundError:
        return "none"


def digest_of(record: bytes | None) -> str:
    """What identifies a record."""
    return "none" if record is None else sha256(record).hexdigest()[:12]


def journals(folder: Path) -> list[Path]:
    """The journals in a tag's folder; none if there is no such folder, or this process may not list it.

    Raises:
        OSError: it cannot be listed, so there may be one.
    """
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return sorted(item for item in folder.iterdir() if item.name.startswith(_JOURNAL))
    return []


def prepared(folder: Path) -> dict[str, Journal]:
    """The journals in a tag's folder that are not committed yet, by the ids of their saves."""
    files = [item for item, name, _ in hidden_files(entries(folder)) if name == _PREPARED]
    return {journal.save: journal for journal in map(read, files) if journal is not None}


def read(path: Path) -> Journal | None:
    """A journal; None if it is no longer there, or not one that a save can have written."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MOST_BYTES))
        names, removed = (tuple(values.pop(key)) for key in ("names", "removed"))
        journal = Journal(**values, names=names, removed=removed)
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    texts = (journal.save, journal.before, journal.after, *names, *removed)
    if not all(isinstance(text, str) for text in texts) or not re.fullmatch("[0-9a-f]{12}", journal.save):
        return None
    return journal if all(map(may_change, (*names, *removed))) else None


def commit(folder: Path, save: str, sync: bool) -> bool:
    """Give the prepared journal of a save its name, which makes the new checkpoint exist; `finish` does the renames.

    Returns:
        Whether it replaces the checkpoint that was there when it was prepared, and not one of another job.

    Raises:
        OSError: it has no name, and the new checkpoint does not exist.
    """
    note, is_first = hidden(folder / _PREPARED, save), True
    while True:
        finish(folder, sync)
        journal = read(note)
        if journal is None:
            raise FileNotFoundError(f"{note} was removed")
        if journal.before != (now := digest(folder)):
            journal = replace(journal, before=now)
            journal.prepare(folder, sync)
            is_first = False
        name = folder / f"{_JOURNAL}{now}"
        try:
            os.link(note, name)
        except FileExistsError:
            if read(name) is not None:
                continue  # the journal of another job
            note.replace(name)  # over one that is damaged
        except OSError:  # not every file system has hard links
            note.replace(name)
        else:
            note.unlink(missing_ok=True)
        if digest(folder) in (now, journal.after):
            if sync:
                sync_folder(folder)
            return is_first
        name.unlink(missing_ok=True)  # another job's was done in between
        journal.prepare(folder, sync)


def finish(folder: Path, sync: bool = True) -> None:
    """Complete the renames and removals that the journals in a tag's folder list.

    Args:
        folder: of the tag.
        sync: wait until the names are on disk.

    Raises:
        OSError: this process may not, or cannot; another one may.
    """
    for path in journals(folder):
        journal = read(path)
        if journal is None:
            continue
        if digest(folder) in (journal.before, journal.after):
            _do(folder, journal)
            for parent in {(folder / name).parent for name in journal.names} if sync else ():
                sync_folder(parent)
        path.unlink(missing_ok=True)  # also one that another save has overtaken: its writer makes a new one


def _do(folder: Path, journal: Journal) -> None:
    for name in journal.removed:
        if digest(folder) != journal.before:
            break  # another process has done this, and there may be a newer file of the name
        if name != RECORD:
            remove(folder / name)
    for source, target in journal.paths(folder):
        with suppress(FileNotFoundError):  # done already
            source.replace(target)
    if RECORD in journal.removed and digest(folder) == journal.before:
        remove(folder / RECORD)


def remove_states(folder: Path) -> None:
    """Remove what a save has written into a tag's folder, as far as it is possible."""
    for item in entries(folder):
        if is_state(item.name):
            with suppress(OSError):
                remove(item)


def remove(item: Path) -> None:
    """Remove a file, or the folder that DeepSpeed has written."""
    if item.name == OFFLOADED and item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
    else:
        item.unlink(missing_ok=True)


def names_now(folder: Path) -> dict[str, Path]:
    """Where the files of a tag's folder are for a process that cannot finish its journals, by their names."""
    files = {name: folder / name for name in listed(folder)}
    for journal in filter(None, map(read, journals(folder))):
        if digest(folder) == journal.before:
            files = {name: file for name, file in files.items() if name not in journal.removed}
            files |= {target.name: file for file, target in journal.paths(folder) if file.exists()}
    return {name: file for name, file in files.items() if is_state(name)}


@contextmanager
def linked(files: Mapping[str, Path], tag: str) -> Iterator[Path]:
    """A temporary folder in which the folder of a tag has links to files by the names that they are to have."""
    with tempfile.TemporaryDirectory(prefix=f"{OURS[1:]}-") as root:
        (Path(root) / tag).mkdir()
        (Path(root) / "latest").write_text(tag)
        for name, file in files.items():
            (Path(root) / tag / name).symlink_to(file.absolute())
        yield Path(root)


def is_unfinished(tag: Path) -> bool:
    """Whether a tag's folder has nothing but what a save has written that still runs, or was killed."""
    items = entries(tag)
    names = [item.name for item in items]
    if any(name.startswith(_JOURNAL) for name in names) or RECORD in names:
        return False
    mine = [note for note in notes(tag.parent).values() if note.tag == tag.name]
    if not any(map(is_state_file, names)):
        return bool(mine) or any(hidden_files(items))
    return any(note.in_place for note in mine)


def is_not_whole(folder: Path) -> bool:
    """Whether a folder has nothing but what a save leaves that was killed, or still runs.

    Folders of checkpoints that DeepSpeed has not written are never of that kind, unless they are empty.
    """
    try:
        inside = {item.name: item for item in map(folder.joinpath, listed(folder))}
    except OSError:
        return False
    if "latest" not in inside:
        others = {name for name in inside if not name.startswith((OURS, "zero_to_", ".latest."))}
        return others <= {"checkpoint"} or any(map(is_unfinished, inside.values()))
    with suppress(OSError):
        tag = folder / (folder / "latest").read_text(errors="replace").strip()
        return is_unfinished(tag) or not tag.is_dir()
    return False

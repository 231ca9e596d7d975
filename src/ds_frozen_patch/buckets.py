"""Checkpoints at addresses such as s3://bucket/run, through fsspec. Nothing imports this where no address is used.

A checkpoint in a bucket has the files of one on a disk, and code sees it as a scratch folder, whose path ends with its
address. A save uploads each file from there as soon as it is written, the record last, and removes it. A load, or a
tool, gets such a folder with the files that it needs; in place of the others are empty ones that cannot be read, whose
content is read from the bucket in ranges.

Objects are not renamed. Over a checkpoint, the files of a save have hidden names until its record is there, which
says by the id of its save which files are its own. Then they are copied to their names, and what they replace is
removed.

    s3://bucket/run/last.ckpt/
    ├── .ds_frozen_patch-3f2a9c01d4e8                   a note: which process runs the save of this id
    ├── latest                                          written after the record
    └── checkpoint/
        ├── .mp_rank_00_model_states.pt.3f2a9c01d4e8    a file of this save
        ├── ds_frozen_patch.json                        the record
        └── mp_rank_00_model_states.pt                  a file of the save before
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .common import files
from .common.errors import CheckpointError
from .common.files import EXPORTS, OFFLOADED, RECORD, SCRATCH, is_brought, is_state, is_state_file
from .publish.journal import hidden
from .publish.notes import OURS, Note, note_of
from .publish.publication import INCOMPLETE, NOTHING, UNCHANGED, Publication
from .record import File

T = TypeVar("T")

_ATTEMPTS = 5
_SECONDS = 0.25
"""How often a request is made, beside what the implementation does by itself, and the first pause; each is longer."""
_LASTING = (FileNotFoundError, IsADirectoryError, PermissionError, ImportError, ValueError, TypeError)
_SMALL_BYTES = 1 << 20
"""Files that are not the engine's are brought down up to this size."""
_BLOCK_BYTES = 1 << 16
_OLD_SECONDS = 86400.0
_HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{12})")


# Scratch folders


def scratch_of(address: str | os.PathLike[str]) -> Path:
    """A new folder whose path ends with an address; `release` removes it, or the end of the process."""
    root = Path(os.environ.get("DS_FROZEN_PATCH_SCRATCH") or tempfile.gettempdir())
    for left in root.glob("ds_frozen_patch-scratch-*"):  # by a killed process
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix="ds_frozen_patch-scratch-", dir=root)
    _scratch[made] = os.getpid()
    return Path(made, str(address))


_scratch: dict[str, int] = {}
"""The scratch folders, and which process has made each."""


def release(path: Path) -> None:
    """Remove a scratch folder, given a path in it."""
    if (match := SCRATCH.fullmatch(str(path))) is not None:
        shutil.rmtree(match[1], ignore_errors=True)
        _scratch.pop(match[1], None)
        if not _scratch:
            _keys.clear()
            files.open_remote = None


@atexit.register
def _release_all() -> None:
    for folder, process in _scratch.items():
        if process == os.getpid():  # and not the one from which it was forked
            shutil.rmtree(folder, ignore_errors=True)


def address_of(path: str | os.PathLike[str]) -> str:
    """The address of a path in a scratch folder, or of one from which `Path` has taken a slash."""
    protocol, _, rest = SCRATCH.sub(r"\2", os.fspath(path)).partition(":")
    return f"{protocol}:{'///' if protocol in ('file', 'local') else '//'}{rest.lstrip('/')}"


# Requests


def file_system(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The file system of an address, or of a path in a scratch folder, and how it calls the place.

    Raises:
        CheckpointError: fsspec or its implementation for this kind of address is not installed.
    """
    address = address_of(path)
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{address} cannot be opened: {error}.") from None
    return found


def _try(request: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Make a request, again after an error that may be over soon; the last one is raised."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return request(*args, **kwargs)
        except Exception as error:  # every implementation has exceptions of its own
            if isinstance(error, (*_LASTING, CheckpointError)) or "Credential" in type(error).__name__:
                raise
            time.sleep(_SECONDS * 2**attempt * random.uniform(0.5, 1))
    return request(*args, **kwargs)


def _sizes(folder: Path) -> dict[str, int]:
    """The objects right below a place, and their sizes."""
    fs, place = file_system(folder)
    fs.invalidate_cache()
    try:
        items = _try(fs.ls, place, detail=True)
    except FileNotFoundError:
        return {}
    inside = (item for item in items if item["type"] == "file" and item["name"].rstrip("/") != place.rstrip("/"))
    return {item["name"].rpartition("/")[2]: int(item["size"]) for item in inside}


def _read(path: Path) -> bytes | None:
    fs, place = file_system(path)
    try:
        content: bytes = _try(fs.cat_file, place)
    except FileNotFoundError:
        return None
    return content


def _write(path: Path, content: str) -> None:
    fs, place = file_system(path)
    _try(fs.pipe_file, place, content.encode())


def _remove(paths: Collection[Path]) -> None:
    """Remove objects that are there."""
    for path in paths:
        fs, place = file_system(path)
        with suppress(FileNotFoundError):
            _try(fs.rm_file, place)


def _hidden(names: Collection[str]) -> list[tuple[str, str, str]]:
    """The names of hidden files of states: each with the name that it is to have, and the id of its save."""
    matches = (match for match in map(_HIDDEN.fullmatch, names) if match and is_state_file(match[1]))
    return [(match[0], match[1], match[2]) for match in matches]


def _save_of(record: bytes | None) -> str:
    """The id of the save that has written a record."""
    try:
        return str(json.loads(record or b"{}")["save"])
    except (ValueError, LookupError, TypeError):
        return ""


# Saves


@dataclass
class Upload(Publication):
    """What one save writes at an address; `target` and `folder` are in a scratch folder of the rank.

    `in_place` says that nothing was there, so that no file needs a hidden name.
    """

    _running: set[str] = field(default_factory=set)
    _dead: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.upload = self
        self.home.mkdir(parents=True, exist_ok=True)

    def follow(self, paths: Sequence[str]) -> None:
        """Write to the place of another rank, in this one's scratch folder."""
        scratch = SCRATCH.sub(r"\1", str(self.target))
        self.target, self.folder, self.shown = (Path(scratch, SCRATCH.sub(r"\2", path)) for path in paths)
        self.home.mkdir(parents=True, exist_ok=True)

    def release(self) -> None:
        """Remove the scratch folder."""
        release(self.target)

    def is_on_another_disk(self) -> bool:
        """Never: there is only one bucket."""
        return False

    def open(self) -> None:
        """Look for what is there, remove what killed saves have left, and leave a note."""
        if not self.is_tag:
            return
        there = set(_sizes(self.home))
        has_record = RECORD in there
        for name in _sizes(self.folder):
            if re.fullmatch(rf"{re.escape(OURS)}-[0-9a-f]{{12}}", name):
                there -= self._look_at(self.folder / name, set() if has_record else there)
        self.in_place = not any(map(is_state, there))
        kept = {*self._running, _save_of(_read(self.home / RECORD)) if has_record else ""}
        _remove([self.home / name for name, _, save in _hidden(there) if save not in kept])
        note = Note.of_this_process(self.target.name, self.is_tag, self.in_place)
        _write(note_of(self.folder, self.id), json.dumps(vars(note)))

    def _look_at(self, path: Path, there: set[str]) -> set[str]:
        """Look at the note of another save; return what it has left in `there`, which is removed."""
        try:
            note = Note(**json.loads(_read(path) or b""))
        except (ValueError, TypeError):
            return set()
        save = path.name.rpartition("-")[2]
        if note.tag == self.target.name and note.is_running():
            self._running.add(save)
            self._warn_of_other_job()
        if note.tag != self.target.name or note.is_running():
            return set()
        self._dead |= {path, *(hidden(folder / name, save) for folder in (self.folder, self.home) for name in EXPORTS)}
        left = set(filter(is_state, there)) if note.in_place else set()
        _remove([self.home / name for name in left])
        return left

    def note(self, written: dict[Path, File], path: Path, file: File) -> None:
        """Upload a file that is written, and note what it is."""
        written[path] = file
        self.deliver(path)

    def deliver(self, file: Path | None = None) -> None:
        """Upload a file that is written, or all that are left, and remove it from the scratch folder."""
        left = [item for item in self.folder.rglob("*") if item.is_file() and is_brought(item)] if self.is_tag else []
        if any(OFFLOADED in item.parts for item in left):
            raise CheckpointError(f"{self.shown} cannot be saved: a bucket cannot have optimizer states on NVMe.")
        for item in [file] if file else left:
            fs, place = file_system(item)
            _try(fs.put_file, str(item), place)
            item.unlink()

    def written(self) -> dict[str, Path]:
        """What the ranks have written, by final names."""
        there = _sizes(self.home)
        names = there if self.in_place else [name for _, name, save in _hidden(there) if save == self.id]
        written = {name: self.path(name) for name in names if is_state_file(name)}
        for path in written.values():
            _stand_in(path, path, there[path.name])
        return written

    def prepare(self, record: str | None) -> None:
        """Upload what is exported; nothing else is there yet that could get a name."""
        self._record = record
        if self.is_tag:
            self.deliver()

    def give_names(self) -> None:
        """Let the new checkpoint exist by its record, write `latest`, and remove what it replaces."""
        fs, place = file_system(self.target)
        if not self.is_tag:
            _try(fs.put_file, str(self.path(self.target.name)), place)
            self.is_decided = True
            fs.invalidate_cache()
            if older := [name for name in _try(fs.find, place) if name != place]:  # a checkpoint of this name
                _try(fs.rm, older)
            return
        _write(self.home / RECORD, self._record or "")
        self.is_decided = True
        if self.latest is not None:
            _write(self.folder / "latest", self.latest)
        with suppress(Exception):  # the next save does it
            self._clean_up()

    def _clean_up(self) -> None:
        names = set(json.loads(self._record or "{}")["files"])
        there = set() if self.in_place else set(_sizes(self.home))
        beside, (fs, _) = self.folder if self._exports_beside else self.home, file_system(self.home)
        exported = {beside / name: self.export(name) for name, is_written in self.exports.items() if is_written}
        mine = {self.home / name: self.path(name) for _, name, save in _hidden(there) if save == self.id} | exported
        for final, path in () if self.in_place else mine.items():
            _try(fs.cp_file, file_system(path)[1], file_system(final)[1])
        old = {name for name in there if is_state_file(name)} - names
        old |= {name for name, _, save in _hidden(there) if save not in self._running}
        removed = {beside / name for name, is_written in self.exports.items() if not is_written}
        removed |= set() if self.in_place else set(exported.values())
        _remove([*(self.home / name for name in old), *removed, *self._dead, note_of(self.folder, self.id)])
        if self.in_place and self.is_alone:
            _remove([self.folder])  # a single file of this name

    def discard(self) -> None:
        """Remove what was written, unless it is the new checkpoint."""
        with suppress(Exception):  # perhaps the bucket cannot be reached; the next save does it
            if self.is_tag and not self.state_of_target()[1]:
                there = _sizes(self.home)
                mine = [name for name, _, save in _hidden(there) if save == self.id]
                mine += filter(is_state, there) if self.in_place else ()
                _remove([*(self.home / name for name in mine), note_of(self.folder, self.id)])

    def state_of_target(self) -> tuple[str, bool]:
        """What is at the address now, as a sentence, and whether it is the new checkpoint."""
        try:
            if self.is_decided or (self.is_tag and _save_of(_read(self.home / RECORD)) == self.id):
                return f"{self.shown} is the new checkpoint, and complete.", True
            fs, place = file_system(self.target)
            there = any(map(is_state, _sizes(self.home))) if self.is_tag else _try(fs.exists, place)
        except Exception:  # the bucket cannot be reached
            there = True
        return (NOTHING if not there else INCOMPLETE if self.in_place else UNCHANGED), False


# Checkpoints, as frameworks look for them


def objects_of(folder: str | os.PathLike[str], names: Collection[str]) -> set[str]:
    """Of the checkpoints with these names, the address of the file `latest` of each that is whole, or its single file.

    Args:
        folder: that has them.
        names: of checkpoints that may be there.
    """
    found = set()
    for name in names:
        fs, place = file_system(Path(folder, name))
        fs.invalidate_cache()
        objects = (address for address in (f"{place}/latest", place) if _try(fs.isfile, address))
        found |= {str(fs.unstrip_protocol(address)) for address in [*objects][:1]}
    return found


def remove_latest(path: str | os.PathLike[str]) -> None:
    """Begin to remove a checkpoint: half of it must not be loaded meanwhile."""
    _remove([Path(path, "latest")])
    file_system(path)[0].invalidate_cache()


# Loads, and tools


Needed = Callable[[Path, bytes | None], Collection[str] | None]


def bring_down(root: Path, tag: str | None, needed: Needed, others: bool = False) -> None:
    """Fill a scratch folder with a checkpoint.

    Args:
        root: of the checkpoint, in a scratch folder.
        tag: the folder in it; None for that in `latest`.
        needed: returns the names of the files of states that are brought down, given the folder of the tag and the
            record; None for all.
        others: whether to bring down small files of others too.
    """
    for attempt in range(_ATTEMPTS):
        try:
            if _bring(root, tag, needed, _SMALL_BYTES if others else -1):
                return
        except FileNotFoundError:  # a save is replacing it
            if attempt == _ATTEMPTS - 1:
                raise
        shutil.rmtree(root, ignore_errors=True)


def view(address: str | os.PathLike[str], tag: str | None) -> Path:
    """A scratch folder, until the process ends, in which empty files stand in for the files of states."""
    place = scratch_of(address)
    bring_down(place, tag, lambda *_: (), others=True)
    return place


def _bring(root: Path, tag: str | None, needed: Needed, small: int) -> bool:
    """Bring a checkpoint down; returns whether no save has replaced it meanwhile."""
    fs, place = file_system(root)
    there = _sizes(root)
    if _try(fs.isfile, place) and not ("latest" in there and fs.modified(f"{place}/latest") > fs.modified(place)):
        root.parent.mkdir(parents=True, exist_ok=True)
        if needed(root, None) is None:
            _try(fs.get_file, place, str(root))
        else:
            _stand_in(root, root, fs.size(place))
        return True
    _get(root, {key: root / key for key in there if key == "latest" or key.startswith(OURS) or there[key] <= small})
    if tag is None and not (root / "latest").is_file():
        return True
    folder = root / (tag or (root / "latest").read_text(errors="replace").strip())
    if ".." in folder.parts or root not in folder.parents:
        return True  # it is no name, as is said later
    inside = _sizes(folder)
    record = _read(folder / RECORD) if RECORD in inside else None
    keys = {name: folder / name for name, size in inside.items() if is_state(name) or size <= small}
    keys |= {name: folder / key for key, name, save in _hidden(inside) if save == _save_of(record)}
    states = {name: key for name, key in keys.items() if is_state_file(name)}
    chosen = needed(folder, record)
    chosen = states if chosen is None or not set(chosen) <= states.keys() else chosen
    _get(folder, {name: key for name, key in keys.items() if name not in states or name in chosen})
    for name in states.keys() - set(chosen):
        _stand_in(folder / name, states[name], inside[states[name].name])
    return RECORD not in inside or _save_of(_read(folder / RECORD)) == _save_of(record)


def bring_rest(paths: Collection[Path]) -> None:
    """Bring down the files that others stand in for."""
    for path in paths:
        if not is_brought(path):
            path.unlink()
            _get(path.parent, {path.name: _keys[path]})


def _stand_in(path: Path, key: Path, size: int) -> None:
    """Make an empty file in place of an object; both are paths in a scratch folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    path.chmod(0)
    _keys[path] = key
    files.open_remote = _open


_keys: dict[Path, Path] = {}
"""The object of each empty file, as a path in the same scratch folder."""


def _open(path: Path) -> Any:
    """The content of the object that a file stands in for, read in ranges."""
    fs, place = file_system(_keys[path.resolve()])
    return _try(fs.open, place, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")


def _get(folder: Path, keys: Mapping[str, Path]) -> None:
    for name, key in keys.items():
        folder.mkdir(parents=True, exist_ok=True)
        fs, place = file_system(key)
        _try(fs.get_file, place, str(folder / name))

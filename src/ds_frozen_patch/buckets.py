"""Checkpoints at addresses such as s3://bucket/run, through fsspec. Nothing imports this where no address is used.

A checkpoint in a bucket has the files of one on a disk, and code sees it as a scratch folder, whose path ends with its
address. A save uploads each file from there as soon as it is written, the record last, and removes it. A load, or a
tool, gets such a folder with the files that it needs; in place of the others are empty ones that cannot be read, whose
content is read from the bucket in ranges.

Objects are not renamed, so there is no journal, but for the rest names are as in `publish.journal`: over a checkpoint,
the files of a save have hidden names until its record is there, which says by the id of its save which files are its
own. Then they are copied to their names, and what they replace is removed. While a single file and a folder have one
name, since one replaces the other, the folder counts if it has `latest`.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from .common import files
from .common.errors import CheckpointError
from .common.files import EXPORTS, RECORD, SCRATCH, is_brought, is_state, is_state_file
from .publish.journal import HIDDEN, hidden
from .publish.notes import NOTE, Note, note_of
from .publish.publication import INCOMPLETE, NOTHING, UNCHANGED, Publication
from .record import File

_ATTEMPTS = 5
"""How often a checkpoint is read that is replaced meanwhile. A request is made as often, beside retries by fsspec."""
_SECONDS = 0.25
"""The first pause between two requests; each is longer."""
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_LASTING = (IsADirectoryError, PermissionError, ImportError, ValueError, TypeError)
_BLOCK_BYTES = 1 << 16
_OLD_SECONDS = 86400.0
_SAVE = re.compile(rb'"save": "([^"]*)"')

Needed = Callable[[Path, bytes | None], Collection[str] | None]
"""Which files of states a load reads, given the folder of a tag and its record; None for all."""

_scratch: dict[str, int] = {}
"""The scratch folders, and which process has made each."""
_keys: dict[Path, Path] = {}
"""The object of each file that stands in for one, as a path in the same scratch folder."""


def scratch_of(address: str | os.PathLike[str]) -> Path:
    """A new folder whose path ends with an address; `release` removes it, or the end of the process."""
    root = Path(os.environ.get("DS_FROZEN_PATCH_SCRATCH") or tempfile.gettempdir()).resolve()
    for left in root.glob("ds_frozen_patch-scratch-*"):  # by a killed process
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(left)
    made = root / f"ds_frozen_patch-scratch-{uuid4().hex}"
    with suppress(OSError):  # raised by whoever writes there, once the ranks agree
        made.mkdir(0o700, parents=True)
    _scratch[str(made)] = os.getpid()
    return made / str(address)


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
    for folder in (folder for folder, process in _scratch.items() if process == os.getpid()):  # which may be a fork
        shutil.rmtree(folder, ignore_errors=True)


def address_of(path: str | os.PathLike[str]) -> str:
    """The address of a path in a scratch folder, or of one from which `Path` has taken a slash."""
    protocol, _, rest = SCRATCH.sub(r"\2", os.fspath(path)).partition(":")
    return f"{protocol}:{'///' if protocol in ('file', 'local') else '//'}{rest.lstrip('/')}"


def file_system(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The file system of an address, or of a path in a scratch folder, and how it calls the place."""
    address = address_of(path)
    try:
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{address} cannot be opened: {error}.") from None
    return found


def _ask(path: Path, request: str, *args: Any, **kwargs: Any) -> Any:
    """Make a request about a place, again after an error that may be over soon; raises CheckpointError if it lasts.

    Not one that hides what has failed, such as `isfile` and `exists`, nor `rm`, which takes `run[1]` for a pattern.
    """
    fs, place = file_system(path)
    arguments, pause = {"put_file": (*args, place), "copy": args}.get(request, (place, *args)), _SECONDS
    while True:
        if request in ("find", "info", "ls"):
            fs.invalidate_cache()
        try:
            return getattr(fs, request)(*arguments, **kwargs)
        except _NOT_THERE:
            raise
        except Exception as error:  # every implementation has exceptions of its own
            if isinstance(error, _LASTING) or "Credential" in type(error).__name__ or pause > 8 * _SECONDS:
                raise CheckpointError(f"{address_of(path)}: {type(error).__name__}: {error}") from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause *= 2


def look(path: Path, request: str, **kwargs: Any) -> Any:
    """Make a request about an object; None if there is none."""
    with suppress(*_NOT_THERE):
        return _ask(path, request, **kwargs)
    return None


def size_of(path: Path) -> int | None:
    """The size of an object; None if there is none."""
    item = look(path, "info")
    return int(item["size"]) if item is not None and item["type"] != "directory" else None


def _sizes(folder: Path) -> dict[str, int]:
    """The objects right below a place, and their sizes; what a link leads to is one too."""
    fs, place = file_system(folder)
    items = {item["name"]: item for item in look(folder, "ls", detail=True) or () if item["type"] != "directory"}
    names = (name for name in items if items[name]["type"] == "file" or fs.isfile(name))
    return {Path(name).name: int(items[name]["size"]) for name in names if name.rstrip("/") != place.rstrip("/")}


def below(folder: Path) -> set[Path]:
    """The objects below a place, with those in folders; not all, if the implementation hides what has failed."""
    place = file_system(folder)[1]
    return {Path(f"{folder}{name[len(place) :]}") for name in _ask(folder, "find") if name != place}


def _get(keys: Mapping[Path, Path]) -> None:
    """Bring objects down to paths; both are in the same scratch folder."""
    for path, key in keys.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        _ask(key, "get_file", str(path))


def put(files: Iterable[Path]) -> None:
    """Upload files, and remove them from their scratch folder."""
    for file in files:
        _ask(file, "put_file", str(file))
        file.unlink()


def remove(paths: Iterable[Path]) -> None:
    """Remove objects that are there."""
    for path in paths:
        look(path, "rm_file")


def _hidden(names: Iterable[str]) -> list[re.Match[str]]:
    """The names of hidden files of states, see `HIDDEN`."""
    return [match for match in map(HIDDEN.fullmatch, names) if match and is_state_file(match[1])]


def _hidden_of(save: str, names: Iterable[str]) -> dict[str, str]:
    """The names of hidden files of one save, by the names that they are to have."""
    return {match[1]: match[0] for match in _hidden(names) if match[2] == save}


def _save_of(record: bytes | None) -> str:
    """The id of the save that has written a record."""
    match = _SAVE.search(record or b"")
    return match[1].decode(errors="replace") if match else ""


@dataclass
class Upload(Publication):
    """What one save writes at an address; `target` and `folder` are in a scratch folder of the rank."""

    _running: set[str] = field(default_factory=set)
    _dead: set[Path] = field(default_factory=set)
    _there: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.upload = self

    def begin(self) -> None:
        """Make the folder in which files are written."""
        self.home.mkdir(parents=True, exist_ok=True)

    def follow(self, paths: Sequence[str]) -> None:
        """Write to the place of another rank, in this one's scratch folder."""
        scratch = SCRATCH.sub(r"\1", str(self.target))
        self.target, self.folder, self.shown = (Path(scratch, SCRATCH.sub(r"\2", path)) for path in paths)
        self.begin()

    def release(self) -> None:
        """Remove the scratch folder."""
        release(self.target)

    def open(self) -> None:
        """Look for what is there, remove what killed saves have left, and leave a note."""
        if not self.is_tag:
            return
        there = set(_sizes(self.home))
        for name in filter(NOTE.fullmatch, _sizes(self.folder)):
            there -= self._look_at(self.folder / name, there)
        self.in_place = not any(map(is_state, there))  # then no file needs a hidden name
        kept = {*self._running, _save_of(look(self.home / RECORD, "cat_file")) if RECORD in there else ""}
        remove([self.home / match[0] for match in _hidden(there) if match[2] not in kept])
        note = Note.of_this_process(self.target.name, self.is_tag, self.in_place)
        _ask(note_of(self.folder, self.id), "pipe_file", json.dumps(vars(note)).encode())

    def _look_at(self, path: Path, there: set[str]) -> set[str]:
        """Look at the note of another save; return what it has left in `there`, which is removed."""
        try:
            note = Note(**json.loads(look(path, "cat_file") or b""))
        except (ValueError, TypeError, RecursionError):
            return set()
        save, is_running = path.name.rpartition("-")[2], note.is_running() and note.process != os.getpid()
        if is_running and note.tag == self.target.name:  # by another process: the save before of this one is over
            self._running.add(save)
            self._warn_of_other_job()
        if is_running or note.tag != self.target.name:
            return set()
        exports = [self.final(self.export(name)) for name in EXPORTS]
        self._dead |= {path, *(hidden(export, save) for export in exports)}
        left = set(filter(is_state, there)) if note.in_place and RECORD not in there else set()
        remove([*(self.home / name for name in left), *(exports if left else ())])
        return left

    def note(self, written: dict[Path, File], path: Path, file: File) -> None:
        """Upload a file that is written, and note what it is."""
        written[path] = file
        put([path])

    def deliver(self) -> None:
        """Upload what else is written."""
        if self.is_tag:
            put([item for item in self.folder.rglob("*") if item.is_file() and is_brought(item)])

    def written(self) -> dict[str, Path]:
        """What the ranks have written, by final names."""
        there = _sizes(self.home)
        self._there = {} if self.in_place else there
        names = filter(is_state_file, there) if self.in_place else _hidden_of(self.id, there)
        written = {name: self.path(name) for name in names}
        for path in written.values():
            _stand_in(path, path, there[path.name])
        return written

    def prepare(self, record: str | None) -> None:
        """Upload what is exported; nothing else is there yet that could get a name."""
        self._record = record
        self.deliver()

    def give_names(self) -> None:
        """Let the new checkpoint exist, write `latest`, and remove what it replaces; else the next save does that."""
        if not self.is_tag:
            is_decided = "latest" not in _sizes(self.target)
            _ask(self.target, "put_file", str(self.path(self.target.name)))
            self.is_decided = is_decided
            remove([self.target / "latest"])  # of a checkpoint of this name
            self.is_decided = True
            with suppress(Exception):
                remove(below(self.target))
            return
        _ask(self.home / RECORD, "pipe_file", (self._record or "").encode())
        self.is_decided = True
        self._rename(self.export(name) for name, is_written in self.exports.items() if is_written)
        remove(self.final(self.export(name)) for name, is_written in self.exports.items() if not is_written)
        if self.latest is not None:
            _ask(self.folder / "latest", "pipe_file", self.latest.encode())
        with suppress(Exception):
            self._clean_up()

    def _rename(self, paths: Iterable[Path]) -> None:
        if hidden_paths := sorted(path for path in paths if self.final(path) != path):
            finals = [file_system(self.final(path))[1] for path in hidden_paths]
            _ask(self.home, "copy", [file_system(path)[1] for path in hidden_paths], finals)  # at the same time
            remove(hidden_paths)

    def _clean_up(self) -> None:
        self._rename(self.home / key for key in _hidden_of(self.id, self._there).values())
        names, kept = json.loads(self._record or "{}")["files"], {*self._running, self.id}
        old = {name for name in self._there if is_state_file(name) and name not in names}
        old |= {match[0] for match in _hidden(self._there) if match[2] not in kept}
        remove([*(self.home / name for name in old), *self._dead, note_of(self.folder, self.id)])
        if self.in_place and self.is_alone:
            remove([self.folder])  # a single file of this name

    def discard(self) -> None:
        """Remove what was written, unless it is the new checkpoint."""
        with suppress(Exception):  # perhaps the bucket cannot be reached; the next save does it
            if self.is_tag and not self.state_of_target()[1]:
                there = _sizes(self.home)
                mine = {*_hidden_of(self.id, there).values()}
                mine |= set(filter(is_state_file, there)) if self.in_place and RECORD not in there else set()
                exports = [self.export(name) for name, is_written in self.exports.items() if is_written]
                remove([*(self.home / name for name in mine), *exports, note_of(self.folder, self.id)])

    def state_of_target(self) -> tuple[str, bool]:
        """What is at the address now, as a sentence, and whether it is the new checkpoint."""
        try:
            if self.is_decided or (self.is_tag and _save_of(look(self.home / RECORD, "cat_file")) == self.id):
                return f"{self.shown} is the new checkpoint, and complete.", True
            there = any(map(is_state, _sizes(self.home))) if self.is_tag else size_of(self.target) is not None
        except Exception:  # the bucket cannot be reached
            there = True
        return (NOTHING if not there else INCOMPLETE if self.in_place else UNCHANGED), False


def bring_down(root: Path, tag: str | None, needed: Needed) -> None:
    """Fill a scratch folder with a checkpoint: that of a tag, or of the one in `latest`."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(root, ignore_errors=True)
        with suppress(FileNotFoundError):
            if _bring(root, tag, needed):
                return
    raise CheckpointError(f"{root} cannot be read: saves replace it all the time, or files of it cannot be found.")


def _bring(root: Path, tag: str | None, needed: Needed) -> bool:
    """Bring a checkpoint down; returns whether no save has replaced it meanwhile."""
    there = _sizes(root)
    if "latest" not in there and (size := size_of(root)) is not None:
        if needed(root, None) is None:
            _get({root: root})
        else:
            _stand_in(root, root, size)
        return True
    _get({root / name: root / name for name in there if name == "latest" or NOTE.fullmatch(name)})
    if tag is None and "latest" not in there:
        return True
    folder = root / (tag or (root / "latest").read_text(errors="replace").strip())
    if ".." in folder.parts or root not in folder.parents:
        return True  # it is no name, as is said later
    record = look(folder / RECORD, "cat_file")  # first: the list has its files then, under one name or another
    inside = _sizes(folder)
    keys = {name: name for name in inside if is_state_file(name)}
    keys |= _hidden_of(_save_of(record), inside)
    chosen = needed(folder, record)
    chosen = keys if chosen is None or not set(chosen) <= keys.keys() else chosen
    _get({folder / name: folder / keys[name] for name in chosen})
    for name in keys.keys() - set(chosen):
        _stand_in(folder / name, folder / keys[name], inside[keys[name]])
    if record is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_bytes(record)
    return _save_of(look(folder / RECORD, "cat_file")) == _save_of(record)


def bring_rest(paths: Collection[Path]) -> None:
    """Bring down the files that others stand in for."""
    for path in (path for path in paths if not is_brought(path)):
        path.unlink()
        _get({path: _keys[path]})


def bring_others(root: Path, tag: str = "", is_needed: Callable[[str], bool] = lambda _: True) -> None:
    """Bring down what is not the engine's: all in the folder of a tag, and the files beside it; or all there is."""
    paths = {root / name for name in _sizes(root)} | below(root / tag)
    others = [path for path in paths if ".." not in path.parts and not HIDDEN.fullmatch(path.name)]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
    _get({path: path for path in others if is_needed(path.name) and not path.exists()})


def _stand_in(path: Path, key: Path, size: int) -> None:
    """Make an empty file in place of an object; both are paths in a scratch folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    path.chmod(0)
    _keys[path] = key
    files.open_remote = _open


def _open(path: Path) -> Any:
    """The content of the object that a file stands in for, read in ranges; the last one first, with the directory."""
    file = _ask(_keys[path.resolve()], "open", "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
    file.seek(max(file.size - _BLOCK_BYTES, 0))
    file.read()
    file.seek(0)
    return file

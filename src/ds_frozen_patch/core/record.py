"""The record beside the files of a checkpoint: which save they are of, what each must be, and what was left out.

    checkpoint/
    ├── ds_frozen_patch.json        this record, written once all files are there
    ├── mp_rank_00_model_states.pt
    └── ...

It is JSON, described in docs/reference/format.md. A load reads it before DeepSpeed opens a file. Where it is missing, a
load takes what it needs from what DeepSpeed has read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import hash_directory
from ..checkpoint.names import RECORD, is_state_file
from ..common.errors import CheckpointError
from ..common.text import json_lines
from ..manifest import Manifest
from ..ranks import digest

FORMAT = 1


@dataclass(frozen=True)
class File:
    """What a file must be.

    Attributes:
        size: in bytes.
        directory: the SHA-256 of it from its zip directory on, which has the checksum of each record; None for the
            format that torch wrote before 1.6.
    """

    size: int
    directory: str | None


@dataclass(frozen=True)
class Record:
    """What a save says of its files.

    Attributes:
        save: the id of the save, which is also in the label of each file.
        world_size: the number of ranks that saved.
        zero_stage: 0 to 3.
        step: how many steps DeepSpeed has counted.
        versions: the release of each package that took part.
        files: what DeepSpeed has written into the folder on this disk, by name; see `listing`.
        manifest: what was left out; None for a full checkpoint.
    """

    save: str
    world_size: int
    zero_stage: int
    step: int
    versions: Mapping[str, str]
    files: Mapping[str, File]
    manifest: Manifest | None

    def to_json(self) -> str:
        """The content of the record's file; `read_record` is the inverse."""
        values = {
            "format": FORMAT,
            "save": self.save,
            "world_size": self.world_size,
            "zero_stage": self.zero_stage,
            "step": self.step,
            "versions": dict(self.versions),
            "files": {name: asdict(file) for name, file in self.files.items()},
            "manifest": None if self.manifest is None else self.manifest.to_state(),
        }
        return json_lines({**values, "digest": digest_of(values)}, 3)


def listing(record: Record, files: Mapping[str, Path], described: Mapping[int, File] | None = None) -> str:
    """The content of a record that lists files, by name; `described` has some by the digests of their names."""
    known = described or {}
    content = {name: known.get(digest(name)) or describe_file(files[name]) for name in sorted(files)}
    return replace(record, files=content).to_json()


def write_record(folder: Path, record: Record) -> None:
    """Write a record that lists the files of states in a folder."""
    files = {item.name: item for item in folder.iterdir() if is_state_file(item.name)}
    (folder / RECORD).write_text(listing(record, files), encoding="utf-8")


def identify(files: Iterable[Path]) -> str:
    """An id of these files by their content, as short as that of a save."""
    return sha256(repr([describe_file(file) for file in files]).encode()).hexdigest()[:12]


def describe_file(file: Path) -> File:
    """What a file is.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return File(file.stat().st_size, hash_directory(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of a record's values, which shows that nobody has edited them."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

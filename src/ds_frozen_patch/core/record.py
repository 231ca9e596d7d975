"""The record beside the files of a checkpoint: which save they are of, what each must be, and what was left out.

    checkpoint/
    ├── ds_frozen_patch.json        this record, written once all files are there
    ├── mp_rank_00_model_states.pt
    └── ...

It is JSON, and docs/format.md describes it. A load reads it before DeepSpeed opens a file. Where it is missing, a load
takes what it needs from what DeepSpeed has read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..checkpoint.format.zip_directory import hash_directory, open_regular
from ..checkpoint.names import RECORD, is_state_file
from ..common.collectives import digest
from ..common.errors import CheckpointError, CheckpointMismatchError, named
from ..manifest import Manifest

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
        files: what DeepSpeed has written into the folder on this disk, by name; see `write_record`.
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
        return _lines({**values, "digest": _digest(values)}, 3)

    def check_names(self, folder: Path, names: set[str], *, with_optimizer: bool = True) -> None:
        """Raise CheckpointError if the files in a folder are not those of the save.

        Args:
            folder: of the files.
            names: of what is there.
            with_optimizer: whether the states of the optimizer must be there too.
        """
        needed = {name for name in self.files if with_optimizer or not name.endswith("_optim_states.pt")}
        if missing := needed - names:
            raise CheckpointError(f"{folder} lacks {named(missing)}. Get a complete copy of the checkpoint.")
        if extra := names - self.files.keys():
            raise CheckpointError(
                f"{folder} has {named(extra)}, which its save has not written. Take all files from one checkpoint."
            )

    def check_file(self, file: Path) -> None:
        """Raise CheckpointError if a file is not the one that was saved."""
        if describe_file(file) != self.files.get(file.name):
            raise CheckpointError(
                f"{file} is of another save than {RECORD} beside it, was changed, or is being replaced. Take all files"
                " from one checkpoint. (If you have changed it on purpose: remove that record, or"
                " patch(verify_files=False).)"
            )


def write_record(folder: Path, record: Record, known: Mapping[int, File] | None = None) -> None:
    """Write a record, once all other files of a checkpoint are in its folder: it will list them.

    Args:
        folder: of the files.
        record: without files.
        known: files that need not be read, as `unpack` returns them.
    """
    with os.scandir(folder) as found:
        names = sorted(item.name for item in found if is_state_file(item.name) and item.is_file())
    files = {name: (known or {}).get(digest(name)) or describe_file(folder / name) for name in names}
    (folder / RECORD).write_text(replace(record, files=files).to_json(), encoding="utf-8")


def pack(files: Mapping[str, File]) -> list[int]:
    """The first two files as twelve integers of 64 bits, which ranks can gather. As a rule a rank writes no more."""
    numbers: list[int] = []
    for name, file in [*files.items()][:2]:
        numbers += [digest(name), file.size, *_FOUR.unpack(bytes.fromhex(file.directory or "0" * 64))]
    return numbers + [0] * (12 - len(numbers))


def unpack(numbers: Sequence[int]) -> dict[int, File]:
    """The files in what `pack` returned, by the digests of their names."""
    found = {}
    for name, size, *parts in (numbers[:6], numbers[6:]):
        found[name] = File(size, _FOUR.pack(*parts).hex() if any(parts) else None)
    return found


_FOUR = struct.Struct("<4q")


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


def read_record(folder: Path) -> Record | None:
    """The record in the folder of a tag, or None.

    Raises:
        CheckpointError: it is damaged, or its format is unknown to this release.
    """
    path = folder / RECORD
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged ({error}). {_REMEDY}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has an unknown format; this release of ds_frozen_patch reads format {FORMAT}. Update it:"
            " pip install -U ds_frozen_patch"
        )
    try:
        if values.pop("digest", None) != _digest(values):
            raise ValueError("it does not match its digest")
        return _from_values(values)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, CheckpointMismatchError) as error:
        raise CheckpointError(f"{path} was edited, or is damaged ({error}). {_REMEDY}") from None


def _from_values(values: dict[str, Any]) -> Record:
    del values["format"]
    manifest, files = values.pop("manifest"), values.pop("files")
    record = Record(
        **values,
        files={name: File(**file) for name, file in files.items()},
        manifest=None if manifest is None else Manifest.from_state(manifest),
    )
    numbers = [record.world_size, record.zero_stage, record.step, *(file.size for file in record.files.values())]
    if not isinstance(record.save, str) or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a value has the wrong type")
    return record


_MOST_BYTES = 1 << 26
"""The largest record that is read. Each file and each left-out parameter takes about 150 bytes."""
_REMEDY = "Get a complete copy of the checkpoint. Without this file, its files load unverified."


def _digest(values: Mapping[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _lines(value: Any, levels: int) -> str:
    """A value as JSON, on a line for each file and for each parameter, since people read it."""
    if levels > 1 and value and isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_lines(item, levels - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if levels and value and isinstance(value, list):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)

"""The record of a checkpoint: which save its files are of, what each must be, and what was left out.

    checkpoint/
    ├── ds_frozen_patch.json        the record, written once all files are there
    ├── mp_rank_00_model_states.pt  has the id of the save, under `KEY` in DeepSpeed's client state
    └── ...

It is JSON, described in docs/reference/format.md. A load reads it before DeepSpeed opens a file. A single file has the
text of the record under `KEY`, and so have files that somebody else writes, or moves to a bucket.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common.errors import UPDATE, CheckpointError, named
from .common.files import RECORD, hash_directory, is_state_file, open_regular
from .common.probing import version_of
from .common.text import human_bytes, json_lines
from .parameters import BUFFER, PARAMETER, PART, is_name, part_name, part_suffix, plain
from .ranks import digest

if TYPE_CHECKING:
    import torch

KEY = "ds_frozen_patch"
UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""What DeepSpeed's universal converter requires in the state of a checkpoint of ZeRO 1 or 2."""
FORMAT = 1
TRAINABLE_ONLY, FULL, UNKNOWN = KINDS = ("trainable-only", "full", "unknown")
_MOST_BYTES = 1 << 26
"""The size of a record that is too large to be read. Each file and each left-out parameter takes about 200 bytes."""


@dataclass(frozen=True)
class LeftOut:
    """Something of the base that a checkpoint does not contain: a frozen parameter, a part of one, or a buffer.

    Attributes:
        names: all its names in the user's module (see `parameters.plain`): the one in `named_parameters()`, then its
            tied aliases.
        shape: the shape of the whole tensor, even if ZeRO-3 has partitioned it.
        dtype: torch's name of the dtype, such as "bfloat16", or the name of a tensor subclass.
        fingerprint: of its content (see `ds_frozen_patch.fingerprint`), or None if that could not be read.
        kind: "parameter", "part" (such as a scale of a quantized one) or "buffer".
        group: for a part, the first name of its parameter; else empty.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str | None
    kind: str = PARAMETER
    group: str = ""

    @property
    def name(self) -> str:
        """The name in `named_parameters()`."""
        return self.names[0]


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
    """What a save says of its checkpoint.

    Attributes:
        save: the id of the save, which is also in each file of model states.
        world_size: the number of ranks that saved.
        zero_stage: 0 to 3, of the run that saved.
        step: how many steps DeepSpeed has counted.
        versions: the release of each package that took part, by its name on the package index.
        kind: "trainable-only", "full", or "unknown" if somebody else's checkpoint was resharded.
        left_out: everything that was left out.
        total_bytes: its size; tied parameters count once.
        adapters: the configuration of each PEFT adapter, as the JSON of an `adapter_config.json`: by the name of its
            module, then by the name of the adapter.
        compiled: the plain names of the modules that `torch.compile` has wrapped, as `compiled_modules` returns them.
        loss_factor: of `engine.loss`, by which the run multiplies its loss.
        trained_world_size: of the run that trained a resharded checkpoint; 0 if it is not resharded.
        files: what DeepSpeed has written into the folder on this disk, by name; empty if they are not verified.
    """

    save: str
    world_size: int
    zero_stage: int
    step: int
    versions: Mapping[str, str]
    kind: str = FULL
    left_out: tuple[LeftOut, ...] = ()
    total_bytes: int = 0
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()
    loss_factor: float = 1.0
    trained_world_size: int = 0
    files: Mapping[str, File] = field(default_factory=dict)

    @property
    def is_trainable_only(self) -> bool:
        """Whether it says what was left out."""
        return self.kind == TRAINABLE_ONLY

    @property
    def is_lost(self) -> bool:
        """Whether a file has named its save, and there is no record of it."""
        return bool(self.save) and not self.world_size

    @property
    def names(self) -> frozenset[str]:
        """All names that the checkpoint does not contain, including tied aliases."""
        return frozenset(name for entry in self.left_out for name in entry.names)

    @property
    def parameters(self) -> tuple[LeftOut, ...]:
        """The parameters among what was left out."""
        return tuple(entry for entry in self.left_out if entry.kind == PARAMETER)

    def __str__(self) -> str:
        """How much was left out: "56 frozen parameters, 91.6 MB"."""
        counts = Counter(entry.kind for entry in self.left_out)
        parts = f", {counts[PART]} parts of them" if counts[PART] else ""
        buffers = f", {counts[BUFFER]} buffers" if counts[BUFFER] else ""
        return f"{counts[PARAMETER]} frozen parameters{parts}{buffers}, {human_bytes(self.total_bytes)}"

    def to_values(self) -> dict[str, Any]:
        """The record as plain values, of which JSON can be made."""
        left_out: list[dict[str, Any]] = []
        parts: dict[str, list[Any]] = {}  # in a short form: a quantized layer can have twenty
        for entry in self.left_out:
            if entry.kind == PART:
                suffix = part_suffix(entry.name, entry.group)
                parts.setdefault(entry.group, []).append([suffix, entry.shape, entry.dtype, entry.fingerprint])
            else:
                left_out.append({key: value for key, value in vars(entry).items() if key != "group"})
        files = {name: vars(file) for name, file in self.files.items()}
        more = {"left_out": left_out, "parts": parts, "compiled": sorted(self.compiled), "files": files}
        return {"format": FORMAT, **vars(self), **more}

    def to_json(self) -> str:
        """The content of the record's file; `from_json` is the inverse."""
        values = self.to_values()
        return json_lines({**values, "digest": digest_of(values)}, 3)

    @classmethod
    def from_json(cls, text: str | bytes, place: object) -> Record:
        """The record that `to_json` was called on.

        Args:
            text: the JSON.
            place: that it is from, for messages.

        Raises:
            CheckpointError: it is damaged, or its format is unknown to this release.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{place} cannot be read, or is damaged ({error}). {_REMEDY}") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise CheckpointError(
                f"{place} has an unknown format; this release of ds_frozen_patch reads format {FORMAT}. To read it,"
                f" {UPDATE}"
            )
        try:
            if values.pop("digest", None) != digest_of({"format": FORMAT, **values}):
                raise ValueError("it does not match its digest")
            return cls._from_values(values)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(f"{place} was edited, or is damaged ({error}). {_REMEDY}") from None

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Record:
        if missing := {"parts", *(item.name for item in fields(cls))} - values.keys():
            raise ValueError(f"it lacks {named(missing)}")
        left_out, parts = list[LeftOut](), dict(values.pop("parts"))
        for item in values["left_out"]:
            entry = LeftOut(**{**item, "names": tuple(item["names"]), "shape": tuple(item["shape"])})
            left_out += [entry, *_parts_of(entry.names, parts.pop(next(iter(entry.names), ""), ()))]
        for group, items in parts.items():  # of a parameter that is not listed, since it consists of its parts
            left_out += _parts_of((group,), items)
        files = {name: File(**file) for name, file in values["files"].items()}
        compiled = frozenset(values["compiled"])
        record = cls(**{**values, "left_out": tuple(left_out), "files": files, "compiled": compiled})
        record._check_values()
        return record

    def _check_values(self) -> None:
        """Raise ValueError if a value has the wrong type or an impossible size."""
        told = {**self.versions, **{k: v for adapters in self.adapters.values() for k, v in adapters.items()}}
        texts = [text for entry in self.left_out for text in (entry.dtype, entry.fingerprint or "", entry.group)]
        texts += [self.save, *told, *told.values(), *(file.directory or "" for file in self.files.values())]
        numbers = [size for entry in self.left_out for size in entry.shape]
        numbers += [self.world_size, self.zero_stage, self.step, self.total_bytes, self.trained_world_size]
        numbers += [file.size for file in self.files.values()]
        names = [*self.compiled, *(name for entry in self.left_out for name in entry.names)]
        if not all(isinstance(text, str) for text in texts) or not all(map(is_name, names)):
            raise ValueError("a value has the wrong type: a name is no text, or too long")
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            raise ValueError("a value has the wrong type: a size is no number")
        if not isinstance(self.loss_factor, int | float) or not 0 < self.loss_factor < inf:
            raise ValueError("a value has the wrong type: loss_factor")
        if not all(entry.names and len(entry.shape) <= 64 for entry in self.left_out):
            raise ValueError("a parameter has no name, or no shape")
        if self.kind not in KINDS or not {entry.kind for entry in self.left_out} <= {PARAMETER, PART, BUFFER}:
            raise ValueError("of an unknown kind")
        if not all(map(is_state_file, self.files)):
            raise ValueError("a file that DeepSpeed does not write")

    # Whether files are those that it describes

    def check_names(self, folder: Path, names: set[str], *, with_optimizer: bool = True) -> None:
        """Raise CheckpointError if the files in a folder are not those of the save.

        Args:
            folder: of the files.
            names: of what is there.
            with_optimizer: whether the states of the optimizer must be there too.
        """
        of_optimizer = {name for name in self.files if name.endswith("_optim_states.pt")}
        if missing := self.files.keys() - names - (set() if with_optimizer else of_optimizer):
            raise CheckpointError(f"{folder} lacks {named(missing)}. Get a complete copy of the checkpoint.")
        is_of_one_disk = len(of_optimizer) not in (0, self.world_size)  # the folder may have the files of all nodes
        if self.files and not is_of_one_disk and (extra := names - self.files.keys()):
            raise CheckpointError(
                f"{folder} has {named(extra)}, which its save has not written. Take all files from one checkpoint."
            )

    def check_content(self, file: Path) -> None:
        """Raise CheckpointError if a file is not the one that was saved."""
        if describe_file(file) != self.files.get(file.name):
            raise CheckpointError(
                f"{file} is of another save than {RECORD} beside it, was changed, or is being replaced. Take all files"
                " from one checkpoint. (If you have changed it on purpose: remove that record, or"
                " patch(verify_files=False).)"
            )

    def check_file(self, file: Path, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a file that was read is of another save."""
        if file.name in self.files:
            self.check_content(file)
        self.check_state(file, state)

    def check_state(self, file: Path, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a file's state names another save, or another world size."""
        save, ranks = carried(state, file).save, state.get("dp_world_size")
        if save not in ("", self.save) or (self.world_size and ranks not in (None, self.world_size)):
            other = f"{RECORD} beside it" if self.world_size else "the files beside it"
            raise CheckpointError(f"{file} is of another save than {other}. Take all files from one checkpoint.")


def _parts_of(names: Sequence[str], parts: Iterable[Any]) -> Iterator[LeftOut]:
    for suffix, shape, dtype, fingerprint in parts:
        part_names = dict.fromkeys(part_name(name, suffix) for name in names)
        yield LeftOut(tuple(part_names), tuple(shape), dtype, fingerprint, PART, names[0])


_REMEDY = "Get a complete copy of the checkpoint. Without its record, it loads unverified."


def unknown(save: str = "") -> Record:
    """What is known without a record: at most the id of the save."""
    return Record(save, 0, 0, 0, {}, UNKNOWN)


def carried(state: Mapping[str, Any], file: object) -> Record:
    """What the state of a file says: the whole record, or the id of its save, or nothing.

    Raises:
        CheckpointError: the record is damaged, or its format is unknown to this release.
    """
    value = state.get(KEY)
    if isinstance(value, str) and value.startswith("{"):
        return Record.from_json(value, f"{KEY!r} in {file}")
    return unknown(value if isinstance(value, str) else "")


def read_record(folder: Path) -> Record | None:
    """The record in the folder of a tag, or None.

    Raises:
        CheckpointError: it is damaged, or its format is unknown to this release.
    """
    path = folder / RECORD
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES)
            if len(text) == _MOST_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged ({error}). {_REMEDY}") from None
    return Record.from_json(text, path)


def write_record(folder: Path, record: Record) -> None:
    """Write a record that lists the files of states in a folder."""
    files = {item.name: item for item in folder.iterdir() if is_state_file(item.name)}
    (folder / RECORD).write_text(listing(record, files), encoding="utf-8")


def listing(record: Record, files: Mapping[str, Path], described: Mapping[int, File] | None = None) -> str:
    """The content of a record that lists files, by name; `described` has some by the digests of their names."""
    known = described or {}
    content = {name: known.get(digest(name)) or describe_file(files[name]) for name in sorted(files)}
    return replace(record, files=content).to_json()


def describe_file(file: Path) -> File:
    """What a file is.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return File(file.stat().st_size, hash_directory(file))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def identify(files: Iterable[Path]) -> str:
    """An id of these files by their content, as short as that of a save."""
    return sha256(repr([describe_file(file) for file in files]).encode()).hexdigest()[:12]


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of a record's values, which shows that nobody has edited them."""
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# What wrote a checkpoint


def adapters_of(layers: Mapping[str, torch.nn.Module]) -> dict[str, dict[str, str]]:
    """The configurations of the PEFT adapters of a module, given its layers by path, for `Record.adapters`."""
    configurations: dict[str, dict[str, str]] = {}
    paths: dict[torch.nn.Module, str] = {}
    for path, layer in layers.items():
        # Accessing a missing attribute of a module is slow: it searches three dictionaries and raises.
        if "peft_config" in vars(layer) or hasattr(type(layer), "peft_config"):
            paths.setdefault(layer, path)
    models: list[str] = []
    for layer, path in paths.items():
        configs = getattr(layer, "peft_config", None)
        if not isinstance(configs, dict) or any(f"{path}.".startswith(model) for model in models):
            continue  # PEFT's inner modules have the same configurations
        models.append(f"{path}." if path else "")
        configurations[plain(path)] = {
            adapter: json.dumps(config.to_dict(), default=_plain_value, sort_keys=True)
            for adapter, config in configs.items()
            if hasattr(config, "to_dict")
        }
    return configurations


def _plain_value(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


@cache
def versions() -> dict[str, str]:
    """The release of each package that this process has imported, by its name on the package index."""
    releases = {name: version_of(name) for name, module in _PACKAGES.items() if module in sys.modules}
    return {name: version for name, version in releases.items() if version}


_PACKAGES = {
    "ds_frozen_patch": "ds_frozen_patch",
    "lightning": "lightning",
    "pytorch-lightning": "pytorch_lightning",
    "lightning-fabric": "lightning_fabric",
    "deepspeed": "deepspeed",
    "torch": "torch",
}
"""The name of the module of each package that can take part in a save."""

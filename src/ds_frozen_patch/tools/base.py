"""A base on disk: the frozen parameters' values in the files that a program builds its model from.

The names in these files differ from those in the trained module, which wraps the model: a LightningModule adds the
name of an attribute in front, and PEFT adds names in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.format.archive import read_archive
from ..checkpoint.format.records import Records, TensorSource, from_stored
from ..checkpoint.format.safetensors import MAX_HEADER, read_header
from ..checkpoint.format.stored import StoredTensor
from ..checkpoint.quantization import group_with_parts, is_subclass, parse_subclass
from ..checkpoint.zero.states import check_same_save, read_states
from ..checkpoint.zero.weights import locate_weights
from ..common.errors import CheckpointError, named
from ..parameters import PARAMETER, is_name, plain
from ..record import LeftOut, Record
from .loaded_names import CONFIG, loaded_names
from .tensors import OutputTensor

_PEFTS_OWN = ("base_model.model.", "base_layer.", "original_module.", "quant_linear_module.", "token_adapter.")
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_REWRITING_INITS = re.compile(r'"init_lora_weights": *"((?:pissa|olora|corda|loftq|lora_ga)\w*)"')


@dataclass(frozen=True)
class Base:
    """The path of a base, and its tensors by name."""

    path: Path
    tensors: dict[str, TensorSource]

    def verify(
        self, values: memoryview, tensor: TensorSource, entry: LeftOut, record: Record, records: Records
    ) -> memoryview:
        """The values of a tensor in the dtype that the run had it in; its program may have converted the base.

        Raises:
            CheckpointError: they do not match the fingerprint.
        """
        values = dtypes.convert(values, tensor.dtype, entry.dtype)
        if not dtypes.matches_fingerprint(entry, values):
            for piece in tensor.pieces:
                records.check(piece.storage)  # a damaged file gets a message of its own
            message = wrong_values(self, [entry.name], record)
            raise CheckpointError(f"{message} Pass the base that the run was built from.")
        return values

    def verified(self, tensor: TensorSource, entry: LeftOut, record: Record, dtype: str | None = None) -> OutputTensor:
        """A tensor of an output, which is compared with its fingerprint when it is read."""
        to = dtypes.output_dtype(entry.dtype, dtype)

        def read(records: Records) -> memoryview:
            return dtypes.convert(self.verify(records.read(tensor), tensor, entry, record, records), entry.dtype, to)

        return OutputTensor(to, tensor.shape, read, tensor.nbytes)

    def find(self, entry: LeftOut) -> TensorSource | None:
        """The tensor of a parameter that was left out, under any of its names; None if there is none."""
        for name in entry.names:
            in_file = name if name in self.tensors else self._in_files.find(without_wrappers(name))
            if in_file is not None:
                return self.tensors[in_file]
        names = map(self._in_model.find, map(without_wrappers, entry.names))
        return next((self.loaded[name] for name in names if name is not None), None)

    def __getitem__(self, name: str) -> TensorSource:
        """A tensor by its name in the files, or in the model that transformers makes of them."""
        return self.tensors[name] if name in self.tensors else self.loaded[name]

    def name_of(self, name: str) -> str | None:
        """The base's own name for a parameter of a trained module; None if it has none."""
        name = without_wrappers(name)
        return self._in_files.find(name) or self._in_model.find(name)

    @cached_property
    def loaded(self) -> dict[str, TensorSource]:
        """The tensors that have other names in the model that transformers makes of the files."""
        return loaded_names(self.path, self.tensors) if (self.path / CONFIG).is_file() else {}

    @cached_property
    def _in_files(self) -> _Names:
        return _Names(self.tensors)

    @cached_property
    def _in_model(self) -> _Names:
        return _Names(self.loaded)


@dataclass(frozen=True)
class _Names:
    """The tensors of a base by name, to be found by the names that they have in a larger or smaller module."""

    tensors: Mapping[str, TensorSource]

    def find(self, name: str) -> str | None:
        """The name that is, or ends with, the given name or an ending of it."""
        # The trained module contains the model as an attribute, so its names have prefixes. Or the files are those of a
        # larger model, such as one with a head, and their names have prefixes.
        for ending in (name, *endings(name)):
            if ending in self.tensors:
                return ending
        for ending in (name, *endings(name)):
            if "." in ending and (longer := self._longer.get(ending)) is not None:
                return longer
        return None

    @cached_property
    def _longer(self) -> dict[str, str | None]:
        """The name with each ending; None if several names have it."""
        by_ending: dict[str, str | None] = {}
        for name in filter(is_name, self.tensors):
            for ending in endings(name):
                by_ending[ending] = None if ending in by_ending else name
        return by_ending


def endings(name: str) -> Iterator[str]:
    """The endings of a dotted name, the longest first."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def without_wrappers(name: str) -> str:
    for part in _PEFTS_OWN:
        name = name.replace(part, "")
    return name


def locate_base(base: str | Path) -> Path:
    """The path of a base; that of a model's id on the hub, such as `org/name` or `org/name@revision`, is in the cache.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(base)
    hub_id = _HUB_ID.fullmatch(str(base))
    if path.exists() or hub_id is None:
        return path
    name, revision = hub_id.groups()
    missing = f"There is no base at {base}"
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except ImportError as error:
        raise CheckpointError(f"{missing}, and no cache of the hub: pip install huggingface_hub ({error}).") from None
    except (OSError, ValueError):  # what is not in the cache, and what is no id
        download = f"hf download {name}{f' --revision {revision}' if revision else ''}"
        raise CheckpointError(f"{missing}, nor in the hub's cache. Check the path, or get it: {download}") from None


def open_base(path: str | Path) -> Base:
    """Read which tensors a base has, but not the tensors.

    Args:
        path: a directory of safetensors files, one such file, a file of `torch.save` (a state dict, or one with a
            state dict under "state_dict"), the directory of a full DeepSpeed checkpoint, or a model's id on the hub.

    Raises:
        CheckpointError: it is none of these, or is damaged.
    """
    base = locate_base(path)
    if base.is_dir():
        return Base(base, _read_folder(base))
    if not base.is_file():
        raise CheckpointError(f"There is no base at {base}. Check the path.")
    return Base(base, _read_file(base))


def _read_folder(folder: Path) -> dict[str, TensorSource]:
    if (folder / "latest").is_file():
        states = read_states(folder)
        check_same_save(states)
        # What no optimizer has is frozen; stage 0 may not tell what was trained.
        weights = locate_weights(states, () if states.zero_stage else ("*",))
        tensors = {**weights.buffers, **weights.base, **({} if states.zero_stage else weights.trained)}
        return {**tensors, **{alias: tensors[to] for alias, to in weights.aliases.items() if to in tensors}}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            if index.stat().st_size > MAX_HEADER:
                raise ValueError("it is too large")
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if odd := [name for name in files if name != Path(name).name]:
                raise ValueError(f"it names {odd[0][:100]!r}, which is not a file in the same directory")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged ({error}). Get a complete copy of it.") from None
        paths = [folder / name for name in files]
        if missing := [item.name for item in paths if not item.is_file()]:
            raise CheckpointError(f"{folder} lacks {named(missing)}, which its index names. Get a complete copy of it.")
    else:
        items = sorted(filter(Path.is_file, folder.iterdir()))
        paths = [item for item in items if item.match("*.safetensors")]
        paths = paths or [item for item in items if item.match("pytorch_model*.bin")]
    if not paths:
        raise CheckpointError(
            f"{folder} contains no base: no *.safetensors, no pytorch_model*.bin and no DeepSpeed checkpoint."
        )
    return {name: tensor for item in paths for name, tensor in _read_file(item).items()}


def _read_file(file: Path) -> dict[str, TensorSource]:
    """The tensors of one file, including the tied aliases that the metadata of a safetensors file list."""
    if file.suffix == ".safetensors":
        header, about = read_header(file)
        tensors = {name: from_stored(item) for name, item in header.items()}
        tied = {alias: tensors[to] for alias, to in about.items() if to in tensors and alias not in tensors}
        return {**tensors, **tied}
    state: Any = read_archive(file).state
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not any(isinstance(item, StoredTensor) for item in state.values()):
        raise CheckpointError(f"{file} contains no weights: it is not a state dict and contains none. Check the path.")
    tensors = {plain(str(name)): from_stored(item) for name, item in state.items() if isinstance(item, StoredTensor)}
    for name, item in state.items():
        if (subclass := parse_subclass(item)) is not None:
            tensors |= {f"{plain(str(name))}.{rest}": from_stored(tensor) for rest, tensor in subclass.inner.items()}
    return tensors


def without_quantized(record: Record, base: Base) -> Record:
    """The record without the weights that the run quantized and the base has unquantized: a load compares those."""
    kept = [group for group in group_with_parts(record.left_out) if not _is_unquantized(group, base)]
    return replace(record, left_out=tuple(entry for group in kept for entry in group))


def _is_unquantized(group: tuple[LeftOut, ...], base: Base) -> bool:
    """Whether the run had a parameter in parts or in buffers, and the base has nothing of that."""
    if len(group) == 1 and not is_subclass(group[0]) and group[0].kind == PARAMETER:
        return False
    tensors = {entry: base.find(entry) for entry in group if not is_subclass(entry)}
    return bool(tensors) and not any(
        tensor is not None
        and tensor.shape == entry.shape
        and (tensor.dtype == entry.dtype or {tensor.dtype, entry.dtype} <= dtypes.FLOATING)
        for entry, tensor in tensors.items()
    )


def match_base(record: Record, base: Base) -> dict[LeftOut, TensorSource]:
    """Find the base's tensor for everything that was left out.

    A parameter that consists of other tensors has no tensor of its own, and may be missing.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    there: dict[LeftOut, TensorSource] = {}
    missing, reshaped = [], []
    for group in group_with_parts(record.left_out):
        tensors = {entry: base.find(entry) for entry in group if not is_subclass(entry)}
        for entry, tensor in tensors.items():
            if tensor is not None and tensor.shape == entry.shape:
                there[entry] = tensor
            elif tensor is not None:
                reshaped.append(f"{entry.name!r} has shape {list(tensor.shape)} instead of {list(entry.shape)}")
            else:
                missing.append(entry)
    if missing:
        was_quantized = ": it was quantized" if any(entry.kind != PARAMETER for entry in missing) else ""
        raise CheckpointError(
            f"{base.path} lacks {named([entry.name for entry in missing])}. Pass the base that the run was built from"
            f"{was_quantized}."
        )
    if reshaped:
        raise CheckpointError(f"{base.path} is not the base that the run used: {'; '.join(reshaped[:5])}.")
    return there


def wrong_values(base: Base, names: Iterable[str], record: Record) -> str:
    """The message for a base whose values differ from those of the run."""
    message = f"{base.path} is not the base that the run used: the values differ in {named(list(names))}."
    configs = [config for adapters in record.adapters.values() for config in adapters.values()]
    inits = sorted({init for config in configs for init in _REWRITING_INITS.findall(config)})
    return message + (f" A possible cause: init_lora_weights={inits[0]!r} changes the base's weights." if inits else "")

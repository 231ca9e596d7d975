"""Plan a merge: what becomes of each tensor of a base, from names, shapes and dtypes alone.

A *weight* is a tensor as the model has it. Most are one tensor of a file; some are several, such as all experts of a
layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from math import prod
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.format.records import Piece, TensorSource
from ..checkpoint.format.stored import ITEM_SIZES
from ..checkpoint.quantization import PACKED, group_with_parts, is_subclass, quant_type
from ..common.errors import CheckpointError, named
from ..manifest import LeftOut, Manifest
from ..parameters import PARAMETER
from .base import Base, match_base, without_wrappers
from .folding import Folding, Layer, split_name
from .model_folder import ModelFolder
from .tuned import Tuned


@dataclass(frozen=True)
class Change:
    """What becomes of a weight: it gets another value, some rows of one, or an adapter is folded in.

    Attributes:
        source: the value that the run has trained, instead of the base's.
        rows: the values of some rows, instead of the base's.
        indices: of these rows.
        module: the adapted module, of which this is the weight `parameter`.
        parameter: its name in the module.
    """

    source: TensorSource | None = None
    rows: TensorSource | None = None
    indices: tuple[int, ...] = ()
    module: str | None = None
    parameter: str = ""


@dataclass(frozen=True)
class Part:
    """A tensor of a file: `shape` elements of a weight, from `begin` on."""

    weight: str
    begin: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class MergePlan:
    """What the output contains.

    Attributes:
        files: the tensors of each file.
        base: the source of each weight in the base.
        changes: what becomes of a weight; the others stay as they are.
        compared: what the manifest says of a weight, and the base's tensors to compare with it.
        folding: the adapter, if there is one.
        dtype: what floating-point tensors are converted to; None to keep their dtypes.
        is_untied: whether weights that the base shares differ in the output.
        was_quantized: whether the run had quantized the base.
        outside: the trained parameters that have no place in the base.
        manifest: what was left out.
    """

    files: dict[str, dict[str, Part]]
    base: dict[str, TensorSource]
    changes: dict[str, Change]
    compared: dict[str, list[tuple[LeftOut, TensorSource]]]
    folding: Folding | None
    dtype: str | None
    is_untied: bool
    was_quantized: bool
    outside: list[str]
    manifest: Manifest | None

    def dtype_of(self, weight: str) -> str:
        """The dtype of a weight in the output."""
        return dtypes.output_dtype(self.base[weight].dtype, self.dtype)

    @cached_property
    def weights(self) -> dict[tuple[str, str], str]:
        """The weights that an adapter is folded into, by the adapted module and their name in it."""
        changes = self.changes.items()
        return {(change.module, change.parameter): weight for weight, change in changes if change.module is not None}

    @property
    def size(self) -> int:
        """The size of all tensors, in bytes."""
        parts = [part for parts in self.files.values() for part in parts.values()]
        return sum(part.numel * ITEM_SIZES[self.dtype_of(part.weight)] for part in parts)

    @property
    def unverified(self) -> tuple[str, ...]:
        """The weights whose values are the base's, and that nothing can be compared with."""
        used = {part.weight for parts in self.files.values() for part in parts.values()}
        verified = {weight for weight, pairs in self.compared.items() if any(entry.fingerprint for entry, _ in pairs)}
        replaced = {weight for weight, change in self.changes.items() if change.source is not None}
        return tuple(sorted(used - verified - replaced))


def plan_merge(folder: ModelFolder, tuned: Tuned, dtype: str | None) -> MergePlan:
    """Plan a merge.

    Raises:
        CheckpointError: the base lacks something, or has it in another shape; the adapter cannot be merged.
    """
    places = _Places(folder, tuned)
    layers = _adapted_layers(folder, tuned, places)
    folding = Folding(tuned.config, layers, folder.model_type) if tuned.config is not None and layers else None
    wanted = _changes(tuned, layers, folding)
    changes = {weight: change for name, change in wanted.items() if (weight := places.find(name)) is not None}
    untied = _untied(tuned, wanted, places)
    new = {name: places.renamed(name) for name in untied if places.find(name) is None}
    added = {weight: folder.base[untied[name]] for name, weight in new.items()}
    changes |= {weight: wanted[name] for name, weight in new.items() if name in wanted}
    compared, was_quantized = _comparable(folder.base, tuned, places)
    base = {weight: folder.base[weight] for weight in (*compared, *changes) if weight not in added}
    compared |= {weight: compared[shared] for name, weight in new.items() if (shared := untied[name]) in compared}
    files = places.files(base)
    base |= {part.weight: folder.base[part.weight] for parts in files.values() for part in parts.values()} | added
    [*files.values()][-1].update({name: Part(name, 0, tensor.shape) for name, tensor in added.items()})
    _check_shapes(folder, changes, base)
    return MergePlan(
        files=files,
        base=base,
        changes=changes,
        compared=compared,
        folding=folding,
        dtype=dtype,
        is_untied=bool(untied),
        was_quantized=was_quantized,
        outside=tuned.outside + _without_place(folder, tuned, changes, places),
        manifest=tuned.manifest,
    )


class _Places:
    """Finds the weights of a base by the names that a run's model has for them."""

    def __init__(self, folder: ModelFolder, tuned: Tuned) -> None:
        self._base, self._files = folder.base, folder.files
        self._there = dict.fromkeys(name for file in folder.files.values() for name in file.names)
        self._at: dict[tuple[Piece, ...], list[str]] = defaultdict(list)
        for name in self._there:
            self._at[folder.base.tensors[name].pieces].append(name)
        # A module may have several models. What was trained tells which one it is, if there is no adapter.
        trained = self._prefixes(tuned.trained) if tuned.config is None else None
        self._own, self._bases = trained or self._prefixes(name for names in tuned.names for name in names) or ("", "")
        self._tied = {name: names for names in tuned.names if len(names) > 1 for name in names}

    def find(self, name: str) -> str | None:
        """The base's name of a weight; None if the base has none. It is that of a tensor in a file, if it is one."""
        for candidate in (self.renamed(name), name):
            if candidate in self._there:
                return candidate
        for candidate in (self.renamed(name), name):
            if candidate in self._base.loaded:
                return self.at(self._base.loaded[candidate])[0]
        return None

    def find_tied(self, name: str) -> str | None:
        """The base's name of a weight, or of one that it is tied to; None if the base has none."""
        return next(filter(None, map(self.find, (name, *self._tied.get(name, ())))), None)

    def at(self, tensor: TensorSource) -> list[str]:
        """The names of a tensor of the base."""
        return self._at.get(tensor.pieces) or [name for name, loaded in self._base.loaded.items() if loaded == tensor]

    def renamed(self, name: str) -> str:
        """A name as the base would have it."""
        return self._bases + name.removeprefix(self._own) if name.startswith(self._own) else name

    def is_inside(self, name: str) -> bool:
        """Whether a parameter can belong to the base's model."""
        return without_wrappers(name).startswith(self._own)

    def names(self) -> list[str]:
        """All names that the base has."""
        return [*self._base.loaded, *self._there]

    def files(self, weights: Mapping[str, TensorSource]) -> dict[str, dict[str, Part]]:
        """The tensors of each file, as parts of weights."""
        parts: dict[str, tuple[str, int]] = {}
        for weight, tensor in weights.items():
            begin = 0
            for piece in tensor.pieces if weight not in self._there else ():
                parts |= dict.fromkeys(self._at[(piece,)], (weight, begin))
                begin += piece.count
        return {
            file_name: {name: Part(*parts.get(name, (name, 0)), self._base.tensors[name].shape) for name in file.names}
            for file_name, file in self._files.items()
        }

    def _prefixes(self, names: Iterable[str]) -> tuple[str, str] | None:
        """What most of the names begin with, and what the base's names for them begin with."""
        counts: Counter[tuple[str, str]] = Counter()
        for name in names:
            words, base_words = name.split("."), (self._base.name_of(name) or "").split(".")
            while words and base_words and words[-1] == base_words[-1]:
                words.pop()
                base_words.pop()
            if base_words != [""]:
                counts["".join(f"{word}." for word in words), "".join(f"{word}." for word in base_words)] += 1
        return counts.most_common(1)[0][0] if counts else None


def _adapted_layers(folder: ModelFolder, tuned: Tuned, places: _Places) -> dict[str, Layer]:
    """The modules that the adapter is on, with the shapes of their parameters in the base."""
    adapted: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in tuned.adapter.items():
        if (split := split_name(name)) is not None:
            adapted.setdefault(split[0], {})[split[1]] = tensor.shape
    shapes: dict[str, dict[str, tuple[int, ...]]] = {module: {} for module in adapted}
    for name in (*(name for names in tuned.names for name in names), *places.names()):
        module, _, parameter = name.rpartition(".")
        if module in shapes and (weight := places.find_tied(name)) is not None:
            shapes[module].setdefault(parameter, folder.base[weight].shape)
            if folder.base[weight].dtype not in dtypes.FLOATING:
                raise CheckpointError(
                    f"{folder.path} has {weight!r} in {folder.base[weight].dtype}: it is quantized, and an adapter can"
                    " only be merged into unquantized weights. Pass the folder of the unquantized model."
                )
    if missing := [module for module, parameters in shapes.items() if not parameters]:
        raise CheckpointError(
            f"{folder.path} lacks the weights of {named(missing)}, which the adapter is on. Pass the base that the run"
            " was built from."
        )
    return {module: Layer(shapes[module], tensors) for module, tensors in adapted.items()}


def _changes(tuned: Tuned, layers: Mapping[str, Layer], folding: Folding | None) -> dict[str, Change]:
    """What becomes of each weight, by the run's names."""
    changes = {name: Change(source=tensor) for name, tensor in {**tuned.buffers, **tuned.trained}.items()}
    for module, layer in layers.items():
        for parameter in layer.parameters:
            if folding is not None and folding.adapts(module, parameter):
                before = changes.get(f"{module}.{parameter}", Change())
                changes[f"{module}.{parameter}"] = replace(before, module=module, parameter=parameter)
    for module, rows in tuned.tokens.items():
        indices = _token_indices(tuned.config or {}, module)
        if len(indices) != rows.shape[0]:
            raise CheckpointError(
                f"The adapter's configuration names {len(indices)} tokens of {module!r}, and there are {rows.shape[0]}."
                " Pass the adapter_config.json that belongs to it: --adapter-config."
            )
        names = {f"{module}.weight"}
        # PEFT trains the rows of tied weights together.
        names = names.union(*(group for group in tuned.names if not names.isdisjoint(group)))
        changes |= {name: replace(changes.get(name, Change()), rows=rows, indices=indices) for name in names}
    return changes


def _token_indices(config: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """The rows that PEFT trains of an embedding."""
    indices = config.get("trainable_token_indices")
    if isinstance(indices, dict):
        indices = next((of_module for name, of_module in indices.items() if f".{module}".endswith(f".{name}")), None)
    if not isinstance(indices, list) or not all(type(index) is int and index >= 0 for index in indices):
        raise CheckpointError(
            f"The adapter's configuration does not say which tokens of {module!r} were trained. Pass the"
            " adapter_config.json that belongs to it: --adapter-config."
        )
    return tuple(indices)


def _untied(tuned: Tuned, wanted: Mapping[str, Change], places: _Places) -> dict[str, str]:
    """The names of tied weights that differ from now on, each with the weight of the base that they share."""
    untied: dict[str, str] = {}
    for names in tuned.names:
        shared = places.find_tied(names[0])
        if shared is not None and len({wanted.get(name) for name in names}) > 1:
            untied |= dict.fromkeys(names, shared)
    return untied


def _check_shapes(folder: ModelFolder, changes: Mapping[str, Change], base: Mapping[str, TensorSource]) -> None:
    wrong = [
        f"{weight!r} has shape {list(base[weight].shape)} instead of {list(change.source.shape)}"
        for weight, change in changes.items()
        if change.source is not None and change.source.shape != base[weight].shape
    ]
    wrong += [
        f"{weight!r} has no rows of {change.rows.shape[1:]} at {max(change.indices)}"
        for weight, change in changes.items()
        if change.rows is not None
        and change.indices
        and (change.rows.shape[1:] != base[weight].shape[1:] or max(change.indices) >= base[weight].shape[0])
    ]
    if wrong:
        raise CheckpointError(
            f"{folder.path} is not the base that the run used: {'; '.join(wrong[:5])}. If the run has resized its"
            " embeddings, resize the base in the same way and save it by save_pretrained."
        )


def _without_place(folder: ModelFolder, tuned: Tuned, changes: Mapping[str, Change], places: _Places) -> list[str]:
    """The trained parameters that the base has no name for."""
    missing = [name for name in tuned.trained if places.find_tied(name) is None]
    if not changes or (missing and tuned.config is not None):
        raise CheckpointError(
            f"{folder.path} has no weights called {named(missing)}, which the run has trained. Pass the base that the"
            " run was built from."
        )
    return missing


def _comparable(
    base: Base, tuned: Tuned, places: _Places
) -> tuple[dict[str, list[tuple[LeftOut, TensorSource]]], bool]:
    """What the manifest says of each weight of the base; and whether the run had quantized the base."""
    if tuned.manifest is None:
        return {}, False
    left_out: list[LeftOut] = []
    was_quantized = False
    for group in group_with_parts(tuned.manifest.left_out):
        if tuned.config is None and not any(map(places.is_inside, group[0].names)):
            continue  # of another model
        is_there = _is_there(group, base)
        if not is_there and _is_quantized(group):
            was_quantized = True
            is_there = bool(quant_type(group) and find_spec("bitsandbytes"))  # which quantizes the base again
        if is_there or (group[0].kind == PARAMETER and not _is_quantized(group)):
            left_out += group
    manifest = replace(tuned.manifest, left_out=tuple(left_out))
    compared: dict[str, list[tuple[LeftOut, TensorSource]]] = defaultdict(list)
    for entry, tensor in match_base(manifest, base).items():
        for name in places.at(tensor):
            compared[name].append((entry, tensor))
    return dict(compared), was_quantized


def _is_quantized(group: tuple[LeftOut, ...]) -> bool:
    """Whether a run had a parameter in parts, or packed into buffers."""
    return len(group) > 1 or is_subclass(group[0]) or group[0].name.rpartition(".")[2] in PACKED[:-1]


def _is_there(group: tuple[LeftOut, ...], base: Base) -> bool:
    """Whether a base has all of a quantized parameter, as the run had it."""
    matches = [(entry, base.find(entry)) for entry in group if not is_subclass(entry)]
    return bool(matches) and all(tensor is not None and tensor.shape == entry.shape for entry, tensor in matches)

"""What a run has trained, by the names of its model: from a DeepSpeed checkpoint, or from a folder of PEFT's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.adapters import (
    PEFTS_PREFIX,
    Adapter,
    choose_adapter,
    match_adapter,
    parse_recorded_config,
    read_config,
)
from ..checkpoint.format.records import TensorSource
from ..checkpoint.format.zip_directory import open_regular
from ..checkpoint.zero.opening import Checkpoint, open_checkpoint
from ..checkpoint.zero.weights import Weights
from ..common.errors import CheckpointError
from ..manifest import Manifest
from .base import open_base, without_wrappers
from .folding import check_foldable, split_name
from .loaded_names import parameter_names

_TOKENS = ".token_adapter.trainable_tokens_delta"
_MOST_CONFIG = 1 << 24


@dataclass(frozen=True)
class Tuned:
    """What a run has trained. Names are those of its model, without those of PEFT's layers and of the adapter.

    Attributes:
        root: the path that was read.
        name: of the adapter; None if there is none.
        config: of the adapter.
        names: all names of each parameter, as far as they are known, in the model's order.
        trained: the source of each parameter that the run has trained, under all its names.
        adapter: the source of each tensor of the adapter.
        tokens: the source of the rows of each embedding of which only some were trained.
        buffers: the source of each buffer.
        manifest: what it says of the parameters of this model that were left out; None if nothing is known.
        outside: trained parameters that belong to no adapter, or to another one.
    """

    root: Path
    name: str | None
    config: dict[str, Any] | None
    names: list[tuple[str, ...]]
    trained: dict[str, TensorSource]
    adapter: dict[str, TensorSource] = field(default_factory=dict)
    tokens: dict[str, TensorSource] = field(default_factory=dict)
    buffers: dict[str, TensorSource] = field(default_factory=dict)
    manifest: Manifest | None = None
    outside: list[str] = field(default_factory=list)


def read_tuned(
    source: str | Path,
    tag: str | None,
    base: Path,
    adapter: str | None,
    adapter_config: str | Path | None,
    trust: bool,
) -> Tuned:
    """Read what there is, but no tensors.

    Args:
        source: the directory of a DeepSpeed checkpoint, or one that PEFT or `patch(export="peft")` has written.
        tag: of a DeepSpeed checkpoint.
        base: the folder of the base, whose model tells which parameters are tied if the source does not.
        adapter: the name of the adapter, if there are several.
        adapter_config: an `adapter_config.json`, or its directory, if the source contains none.
        trust: as for `read_states`.

    Raises:
        CheckpointError: as `choose_adapter` and `open_checkpoint` do.
    """
    folder = Path(source)
    if (folder / "adapter_config.json").is_file() and not (folder / "latest").exists() and tag is None:
        return _of_peft(folder, base, adapter, adapter_config, trust)
    checkpoint = open_checkpoint(folder, tag, trust=trust)
    manifest, names = checkpoint.states.manifest, checkpoint.weights.trained
    if adapter or adapter_config or (manifest and manifest.adapters) or any(PEFTS_PREFIX in name for name in names):
        return _of_adapter(checkpoint, adapter, adapter_config)
    return _without_adapter(checkpoint)


def _of_peft(folder: Path, base: Path, name: str | None, adapter_config: str | Path | None, trust: bool) -> Tuned:
    if name not in (None, "default"):
        raise CheckpointError(f"{folder} has one adapter, whose name its files do not say. Do without --adapter.")
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {file.name}. Save the adapter with safe_serialization=True.")
    with _quiet():
        text = _text(folder / "adapter_config.json")
        config = read_config(adapter_config) if adapter_config else parse_recorded_config(text)
    check_foldable(config)
    tensors = {name.removeprefix(PEFTS_PREFIX): tensor for name, tensor in open_base(file, trust).tensors.items()}
    return _of_file(Tuned(folder, "default", config, parameter_names(base), {}), tensors)


def _text(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            return opened.read(_MOST_CONFIG).decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def _of_adapter(checkpoint: Checkpoint, name: str | None, adapter_config: str | Path | None) -> Tuned:
    weights, manifest = checkpoint.weights, checkpoint.states.manifest
    with _quiet():
        adapter = choose_adapter(weights, manifest, name, adapter_config, "Export what was trained, and use PEFT.")
    check_foldable(adapter.config or {})
    members, outside = match_adapter(weights, manifest, adapter)
    tensors = _with_aliases(weights, weights.all)
    # The base lacks the value of a frozen parameter that was kept.
    more = [*(alias for key in members.values() for alias in weights.names_of(key)[1:])]
    more += [name for key in (weights.frozen if manifest else ()) for name in weights.names_of(key)]
    inner = {key: name for key in (*more, *weights.buffers) if (name := _in_model(key, adapter)) is not None}
    trained = {inner[key]: tensors[key] for key in more if key in inner and key in tensors}
    names = [tuple(filter(None, (_in_model(key, adapter) for key in group))) for group in _groups(weights, manifest)]
    if manifest:
        left_out = [entry for entry in manifest.left_out if any(_in_model(key, adapter) for key in entry.names)]
        manifest = replace(manifest, left_out=tuple(left_out))
    tuned = Tuned(
        root=checkpoint.states.layout.root,
        name=adapter.name,
        config=adapter.config,
        names=[*filter(None, names)],
        trained=trained,
        buffers={inner[key]: tensor for key, tensor in weights.buffers.items() if key in inner},
        manifest=manifest,
        outside=outside,
    )
    return _of_file(tuned, {name.removeprefix(PEFTS_PREFIX): tensors[key] for name, key in members.items()})


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning of what has to be left out of an adapter's folder: none is written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _in_model(key: str, adapter: Adapter) -> str | None:
    """A parameter's name in the model that the adapter is on; None if it is elsewhere, or is an adapter's."""
    name = adapter.peft_name(key)
    if name is None or split_name(name) or name.endswith(_TOKENS) or ".modules_to_save." in name:  # of another one
        return None
    return without_wrappers(name.removeprefix(PEFTS_PREFIX))


def _with_aliases(weights: Weights, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    return tensors | {alias: tensors[first] for alias, first in weights.aliases.items() if first in tensors}


def _groups(weights: Weights, manifest: Manifest | None) -> list[tuple[str, ...]]:
    """All names of each parameter: of those that were left out, and of those that the checkpoint has."""
    there = map(weights.names_of, (*weights.frozen, *weights.trained))
    return [*(entry.names for entry in (manifest.left_out if manifest else ())), *there]


def _without_adapter(checkpoint: Checkpoint) -> Tuned:
    weights, manifest = checkpoint.weights, checkpoint.states.manifest
    # A frozen parameter in a trainable-only checkpoint was kept on purpose: the base lacks its value.
    trained = {**weights.trained, **(weights.frozen if manifest else {})}
    return Tuned(
        root=checkpoint.states.layout.root,
        name=None,
        config=None,
        names=_groups(weights, manifest),
        trained=_with_aliases(weights, trained),
        buffers=weights.buffers,
        manifest=manifest,
    )


def _of_file(tuned: Tuned, tensors: dict[str, TensorSource]) -> Tuned:
    """Add the tensors that an adapter's file has: those of the adapter, and other trained parameters."""
    tokens = {name.removesuffix(_TOKENS): tensor for name, tensor in tensors.items() if name.endswith(_TOKENS)}
    adapter = {name: tensor for name, tensor in tensors.items() if split_name(name)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in adapter and not name.endswith(_TOKENS)}
    trained = {without_wrappers(name): tensor for name, tensor in rest.items()}
    return replace(tuned, trained=tuned.trained | trained, adapter=adapter, tokens=tokens)

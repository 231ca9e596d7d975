"""The names of weights in a model that transformers has loaded, where they differ from those in its files.

Since transformers 5, a model may have other names than its files, and one tensor where they have many: the experts of
a layer. Its own rules are applied here, to names: the elements of such a tensor are those of the tensors in the files,
one after another.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.format.records import TensorSource
from ..common.errors import CheckpointError
from ..parameters import Contents

CONFIG = "config.json"
_MOST_CONFIG = 1 << 24
_MOST_PARTS = 100_000
"""A model is made of at most so many layers and experts: a configuration from elsewhere could say any number."""


def loaded_names(folder: Path, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of a base that have another name, or are parts of another tensor, once they are loaded.

    Args:
        folder: of the base. Its own code is not run.
        tensors: the base's, by their names in the files.

    Returns:
        The tensors by their names in the model; none if transformers does not know the model, or has other rules.
    """
    model = empty_model(folder)
    if model is None:
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = get_model_conversion_mapping(model)
    except Exception:  # transformers 4, which has none, or a release whose rules look different
        return {}
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    loaded: dict[str, TensorSource] = {}
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in tensors:
        renamed = name
        for rule in renamings:
            renamed = rule.rename_source_key(renamed)[0]
        for place, rule in enumerate(converters):
            target, pattern = rule.rename_source_key(renamed)
            if pattern is not None:
                groups[target, place][pattern].append(name)
                break
        else:
            if renamed != name:
                loaded[renamed] = tensors[name]
    for (target, place), parts in groups.items():
        if joined := _join(converters[place], parts, tensors):
            loaded[target] = joined
    return loaded


def parameter_names(folder: Path) -> list[tuple[str, ...]]:
    """All names of each parameter of the model in a folder; none if transformers does not know the model."""
    model = empty_model(folder)
    if model is None:
        return []
    with suppress(Exception):
        model.tie_weights()
    return list(Contents(model).names.values())


def empty_model(folder: Path) -> Any:
    """The model that a folder's configuration describes, without values; None if transformers does not know it."""
    try:
        import torch
        import transformers

        if _count_parts(read_model_config(folder)) > _MOST_PARTS:
            return None
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        if not issubclass(kind, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            return kind(config)
    except Exception:  # it is not installed, or the model needs code of its own
        return None


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of a model's `config.json`; raises CheckpointError if it has none that can be read."""
    file = folder / CONFIG
    if not folder.is_dir() or not file.is_file():
        raise CheckpointError(
            f"{folder} is not the folder of a Hugging Face model: it has no {CONFIG}. Pass the folder that"
            " save_pretrained wrote, or that was downloaded."
        )
    try:
        if file.stat().st_size > _MOST_CONFIG:
            raise ValueError("it is too large")
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}). Get a complete copy of it.") from None
    return config


def _count_parts(config: Any) -> int:
    """At most how many layers, each with its experts, a configuration describes."""
    most = {"layer": 1, "expert": 1}
    values = [("", config)]
    while values:
        key, value = values.pop()
        if isinstance(value, dict):
            values += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, int):
            most |= {part: max(count, value) for part, count in most.items() if part in key}
    return prod(most.values())


def _join(rule: Any, parts: Mapping[str, list[str]], tensors: Mapping[str, TensorSource]) -> TensorSource | None:
    """The tensor that a rule makes of others, if its elements are theirs in some order; else None."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
    columns = [sorted(parts.get(pattern, ()), key=_natural) for pattern in rule.source_patterns]
    shapes = {tensors[name].shape for column in columns for name in column}
    kinds = {tensors[name].dtype for column in columns for name in column}
    if len({len(column) for column in columns}) != 1 or len(shapes) != 1 or len(kinds) != 1 or not columns[0]:
        return None
    (shape,), (dtype,) = shapes, kinds
    count = len(columns[0])
    if steps == [("MergeModulelist", 0)] and len(columns) == 1:
        whole: tuple[int, ...] = (count, *shape)
    elif steps == [("MergeModulelist", 0), ("Concatenate", 1)] and shape:
        whole = (count, shape[0] * len(columns), *shape[1:])
    elif steps == [("Concatenate", 0)] and count == 1 and shape:
        whole = (shape[0] * len(columns), *shape[1:])
    else:
        return None
    pieces = [piece for row in zip(*columns, strict=True) for name in row for piece in tensors[name].pieces]
    if any(tensors[name].view for column in columns for name in column):
        return None
    return TensorSource(dtype, whole, tuple(pieces))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"\.", name)]

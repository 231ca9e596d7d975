"""PEFT's adapters in checkpoints: which there are, their configurations, and the names in PEFT's own files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointError, named
from ..record import Record
from .zero.weights import Weights

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names of the files in an adapter's folder."""
PEFTS_PREFIX = "base_model.model."
# For these kinds, PEFT's files contain values computed from the weights, not the weights themselves.
_COMPUTED = frozenset(
    ["PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT", "SHIRA"]
)
_COMPUTED_WITH = {"ADALORA": "rank_pattern", "VBLORA": "save_only_topk_weights"}
"""The kinds for which they do so with this setting only."""
# The model has one of each, which PEFT saves; every layer refers to it under a name of its own.
_SHARED_BY_LAYERS = frozenset(
    ["vera_A", "vera_B", "pvera_A", "pvera_B", "vblora_vector_bank", "unilora_theta_d", "tinylora_v"]
)


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter: the name of the module that has it, its own name, and its configuration if known."""

    module: str
    name: str
    config: dict[str, Any] | None

    def peft_name(self, name: str) -> str | None:
        """A parameter's name in an adapter file, without the names of module and adapter; None if it is outside."""
        prefix = f"{self.module}." if self.module else ""
        if not name.startswith(prefix):
            return None
        inner = name.removeprefix(prefix)
        inner = inner if inner.startswith("base_model.") else PEFTS_PREFIX + inner
        stem, _, last = inner.replace(f"modules_to_save.{self.name}.", "").rpartition(".")
        if last == self.name:
            return stem
        stem = stem.removesuffix(f".{self.name}")
        return stem if stem.endswith(".lora_magnitude_vector") else f"{stem}.{last}"

    @property
    def config_json(self) -> str:
        """The content of its `adapter_config.json`."""
        return json.dumps({**(self.config or {}), "inference_mode": True}, indent=2, sort_keys=True)

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer belongs to the adapter and to its file."""
        parts = name.split(".")
        if self.peft_name(name) is None or "ranknum" in parts or _is_layer_alias(name):  # PEFT does not save AdaLoRA's
            return False
        if any(f".{part}.{self.name}." in name for part in ("modules_to_save", "prompt_encoder")):
            return True
        return self.name in parts[-2:]

    def members(
        self, trained: Iterable[str], aliases: Iterable[str], others: Iterable[str], adapters: Iterable[str]
    ) -> dict[str, str]:
        """Map the names in the adapter's file to the names in the module.

        Args:
            trained: the first name of each trained parameter.
            aliases: the other names of tied parameters: PEFT saves tied `modules_to_save` under each of their names.
            others: the names of other parameters and of buffers; those that the adapter owns are included.
            adapters: the names of all adapters of the model; what the others own is not included.
        """
        rivals = {name: Adapter(self.module, name, None) for name in adapters if name != self.name}

        def has_other_owner(name: str) -> bool:
            return any(part in rivals and rivals[part].owns(name) for part in name.split("."))

        chosen = [name for name in trained if not _is_layer_alias(name) and not has_other_owner(name)]
        chosen += [name for name in aliases if self.owns(name) and ".token_adapter." not in name]
        chosen += [name for name in others if self.owns(name)]
        return {in_file: name for name in chosen if (in_file := self.peft_name(name)) is not None}

    def check_exportable(self) -> None:
        """Raise CheckpointError if PEFT's files contain something else than the weights of a checkpoint."""
        config = self.config or {}
        kind = str(config.get("peft_type"))
        if kind in _COMPUTED or config.get(_COMPUTED_WITH.get(kind, "")):
            raise CheckpointError(
                "PEFT's adapter format cannot be written from this checkpoint: PEFT computes the content of"
                f" {kind} files from the weights. Use --format safetensors."
            )


def _is_layer_alias(name: str) -> bool:
    """Whether this is a layer's name for a tensor of the whole model."""
    return any(part in _SHARED_BY_LAYERS and holder != "base_model" for holder, part in pairwise(name.split(".")))


def choose_adapter(
    weights: Weights,
    record: Record,
    name: str | None,
    file: str | Path | None,
    otherwise: str = "Use --format safetensors.",
) -> Adapter:
    """The requested adapter, as the record has it, or else as the names of the trained parameters tell.

    Args:
        weights: those of the checkpoint.
        record: of the checkpoint.
        name: of the adapter; by default the only one, or "default".
        file: an `adapter_config.json`, or its directory, to use instead of the recorded configuration.
        otherwise: what to do if there is not exactly one model with adapters.

    Raises:
        CheckpointError: there is no such adapter, or no configuration of it.
    """
    recorded = dict(record.adapters)
    if len(recorded) > 1:
        raise CheckpointError(
            f"The run had several models with adapters: {named(list(recorded))}. A PEFT folder contains only one."
            f" {otherwise}"
        )
    for module, adapters in recorded.items():
        name = name or (next(iter(adapters)) if len(adapters) == 1 else "default")
        if name not in adapters:
            raise CheckpointError(
                f"The run had no adapter {name!r}, but {named(list(adapters))}. Choose one with --adapter."
            )
        return Adapter(module, name, read_config(file) if file else _parse_recorded(adapters[name]))
    prefixes = {parameter.partition(PEFTS_PREFIX)[0] for parameter in weights.trained if PEFTS_PREFIX in parameter}
    if len(prefixes) != 1:
        raise CheckpointError(
            f"The names of the trained parameters are not those of exactly one PEFT model. {otherwise}"
        )
    if file is None:
        raise CheckpointError(
            "The checkpoint does not contain the adapter's configuration. Pass a file with it: --adapter-config"
            " adapter_config.json (PeftConfig.save_pretrained writes one)."
        )
    return Adapter(prefixes.pop().removesuffix("."), name or "default", read_config(file))


def read_config(path: str | Path) -> dict[str, Any]:
    """Read an `adapter_config.json`, or the one in a directory; it is trusted."""
    file = Path(path) / "adapter_config.json" if Path(path).is_dir() else Path(path)
    try:
        return _parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not an adapter_config.json of PEFT ({error}).") from None


def _parse(text: str) -> dict[str, Any]:
    config = json.loads(text)
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise ValueError("it has no peft_type")
    return config


def _parse_recorded(text: str) -> dict[str, Any]:
    try:
        return _parse(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The adapter's configuration in the checkpoint is damaged: {error}. Pass another one:"
            " --adapter-config adapter_config.json (PeftConfig.save_pretrained writes one)."
        ) from None


def match_adapter(weights: Weights, record: Record, adapter: Adapter) -> tuple[dict[str, str], list[str]]:
    """Map the names in the adapter's file to those in the checkpoint; also return what was trained outside of it."""
    left_out = [name for name in record.names if adapter.owns(name)]
    if left_out:
        raise CheckpointError(
            f"Parts of the adapter were frozen and are not in the checkpoint: {named(left_out)}. Save them with"
            " patch(keep=[...]), or use a full checkpoint."
        )
    adapters = record.adapters.get(adapter.module, {})
    members = adapter.members(weights.trained, weights.aliases, (*weights.frozen, *weights.buffers), adapters)
    if not any(adapter.owns(name) for name in members.values()):
        raise CheckpointError(f"The checkpoint contains no adapter {adapter.name!r}. Choose one with --adapter.")
    inside = set(members.values())
    return members, [name for name in weights.trained if inside.isdisjoint(weights.names_of(name))]

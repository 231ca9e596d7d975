"""What was trained, for others to use: an adapter folder as PEFT's own, or a plain file of safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, named
from ...common.progress import progress
from ...common.text import human_bytes, printable_lines
from ...manifest import Manifest
from .. import dtypes as converting
from ..format.records import Records
from ..zero.states import check_together, load
from ..zero.weights import Weights, check_one_run, weights
from .consolidate import Plan, Reader, write_shard
from .output import check_output, new_output
from .regex_cost import steps

FORMATS = ("peft", "safetensors")
_PEFTS_PREFIX = "base_model.model."
# What PEFT's files have of these kinds is computed from the weights, not the weights themselves.
_PROMPTS = frozenset(
    ["PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT"]
)
# The model has one of each, which PEFT saves, and every layer refers to it under a name of its own.
_SHARED_BY_LAYERS = frozenset(
    ["vera_A", "vera_B", "pvera_A", "pvera_B", "vblora_vector_bank", "unilora_theta_d", "tinylora_v"]
)


@dataclass(frozen=True)
class Exported:
    """What `export` has done, or would do.

    Attributes:
        source: the checkpoint's path, as it was given.
        target: the output's path, as it was given.
        format: "peft" or "safetensors".
        tensors: their names in the output.
        size: the bytes of these tensors.
        outside: the names of what was trained and has no place in an adapter.
    """

    source: str
    target: str
    format: str
    tensors: tuple[str, ...]
    size: int
    outside: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.target}: {len(self.tensors)} tensors, {human_bytes(self.size)}."]
        if self.outside:
            lines.append(f"Not included, because they are outside the adapter's model: {named(self.outside, 3)}.")
        return printable_lines(lines)


@dataclass(frozen=True)
class Adapter:
    """One of PEFT's adapters: the name of the module that has it, its own, and its configuration, if it is known."""

    module: str
    name: str
    config: dict[str, Any] | None

    def peft_name(self, name: str) -> str | None:
        """A parameter's name in an adapter's file, which has neither the module's nor the adapter's; None outside."""
        prefix = f"{self.module}." if self.module else ""
        if not name.startswith(prefix):
            return None
        inner = name.removeprefix(prefix)
        inner = inner if inner.startswith("base_model.") else _PEFTS_PREFIX + inner
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
        """Whether a parameter or buffer is the adapter's own, and in its file."""
        parts = name.split(".")
        if self.peft_name(name) is None or "ranknum" in parts or _is_a_layers(name):  # PEFT does not save AdaLoRA's
            return False
        if any(f".{part}.{self.name}." in name for part in ("modules_to_save", "prompt_encoder")):
            return True
        return self.name in parts[-2:]

    def members(
        self, trained: Iterable[str], aliases: Iterable[str], others: Iterable[str], adapters: Iterable[str]
    ) -> dict[str, str]:
        """The module's names of what goes into the adapter's file, by the names there.

        Args:
            trained: the first name of each parameter that was trained.
            aliases: the other names of tied parameters: PEFT saves tied `modules_to_save` under each of their names.
            others: names of what was not trained, and of buffers; the adapter's own are taken.
            adapters: the names of all adapters of its model; what other ones own is not taken.
        """
        rivals = {name: Adapter(self.module, name, None) for name in adapters if name != self.name}

        def has_other_owner(name: str) -> bool:
            return any(part in rivals and rivals[part].owns(name) for part in name.split("."))

        chosen = [name for name in trained if not _is_a_layers(name) and not has_other_owner(name)]
        chosen += [name for name in aliases if self.owns(name) and ".token_adapter." not in name]
        chosen += [name for name in others if self.owns(name)]
        found = {self.peft_name(name): name for name in chosen}
        return {name: own for name, own in found.items() if name is not None}

    def check_exportable(self) -> None:
        """Raise CheckpointError where PEFT's file holds something else than the weights in a checkpoint."""
        config = self.config or {}
        kind = str(config.get("peft_type"))
        why = None
        if kind in _PROMPTS:
            why = f"it computes the content of its {kind} files from the weights"
        elif kind == "VBLORA" and config.get("save_only_topk_weights"):
            why = "with save_only_topk_weights, it computes the content of its VBLORA files from the weights"
        elif kind == "SHIRA":
            why = "its SHIRA files hold shira_indices, which are in no state dict"
        elif kind == "ADALORA" and config.get("rank_pattern"):
            why = "its ADALORA files lack the ranks that rank_pattern has dropped"
        if why:
            raise CheckpointError(
                f"No adapter folder of PEFT can be made from this checkpoint: {why}. Use the other format:"
                " --format safetensors"
            )


def _is_a_layers(name: str) -> bool:
    """Whether this is a layer's name for what belongs to the whole model."""
    return any(part in _SHARED_BY_LAYERS and holder != "base_model" for holder, part in pairwise(name.split(".")))


def export(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    format: str = "safetensors",
    dtype: str | None = None,
    adapter: str | None = None,
    adapter_config: str | Path | None = None,
    trainable: Sequence[str] = (),
    trust: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> Exported:
    """Write what a checkpoint's run has trained, without its optimizer.

    Args:
        source: the directory of a DeepSpeed checkpoint, full or trainable-only. It stays as it is.
        target: for "peft" a folder to make, which `PeftModel.from_pretrained` takes; for "safetensors" a file to make,
            with the module's own names, buffers too, which `load_trainable` takes.
        tag: the folder in the source; without one, what its file `latest` says.
        format: "peft" or "safetensors".
        dtype: "fp32", "bf16" or "fp16", of all floating tensors. Without it, what was trained is in fp32, as the
            optimizer's masters are, and all else in the dtype that it was saved in.
        adapter: the name of the adapter, for "peft"; by default the only one, or "default".
        adapter_config: an `adapter_config.json`, or its folder, where the run has not recorded its own: `patch()` does.
        trainable: as for `prune`.
        trust: also read files that name classes which do not belong in a checkpoint. Nothing of them is run.
        dry_run: write nothing and read no tensor.
        quiet: show no progress on stderr.

    Returns:
        What is in the output.

    Raises:
        CheckpointError: a file of the source is missing, damaged or of another run; there is no such adapter, no
            configuration of it, or a part of it was left out as frozen; there is something at the target already, or it
            cannot be written. Nothing is left there then.
        CheckpointMismatchError: its manifest is damaged, or of a format that this release does not know.
        ValueError: the format or the dtype is not known.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    kind = converting.named_dtype(dtype)
    states = load(source, tag, trust)
    check_together(states)
    found = weights(states, trainable)
    check_one_run(found)
    chosen = None
    if format == "peft":
        chosen = _adapter(found, states.manifest, adapter, adapter_config)
        chosen.check_exportable()
        named_, outside = _of_adapter(found, states.manifest, chosen)
    else:
        # A frozen parameter in a trainable-only checkpoint is one that was kept: no base holds its value.
        kept = found.frozen if states.manifest else {}
        named_, outside = {name: name for name in (*found.trained, *kept, *found.buffers)}, []
    tensors = found.all
    tensors |= {alias: tensors[first] for alias, first in found.aliases.items() if first in tensors}
    plan = Plan(
        tensors={name: tensors[own] for name, own in named_.items()},
        aliases=found.aliases if format == "safetensors" else {},
        from_base={},
        base=None,
        dtype=kind,
    )
    path = Path(target)
    size = plan.size
    done = Exported(str(source), str(target), format, tuple(plan.tensors), size, tuple(outside))
    if dry_run:
        check_output(path, states.layout.root)
        return done
    with new_output(path, states.layout.root) as made, Records() as records, progress("writing", size, quiet) as told:
        file = made
        if chosen is not None:
            made.mkdir()
            file = made / "adapter_model.safetensors"
            (made / "adapter_config.json").write_text(chosen.config_json, encoding="utf-8")
        write_shard(file, plan.tensors, plan, Reader(records, plan, told))
    return done


def _adapter(found: Weights, manifest: Manifest | None, name: str | None, file: str | Path | None) -> Adapter:
    """The adapter that is meant: as the run has recorded it, else as the names of what was trained give it away."""
    recorded = dict(manifest.adapters) if manifest else {}
    if len(recorded) > 1:
        raise CheckpointError(
            f"The run had several models with adapters: {named(list(recorded))}. One folder of PEFT holds one; take the"
            " other format: --format safetensors"
        )
    for module, adapters in recorded.items():
        known = name or (next(iter(adapters)) if len(adapters) == 1 else "default")
        if known not in adapters:
            raise CheckpointError(f"The run had no adapter {known!r}, but {named(list(adapters))}. Say it: --adapter")
        return Adapter(module, known, _config(file) if file else _recorded(adapters[known]))
    prefixes = {own.partition(_PEFTS_PREFIX)[0] for own in found.trained if _PEFTS_PREFIX in own}
    if len(prefixes) != 1:
        raise CheckpointError(
            "The names of what was trained are of no model of PEFT, or of several. Take the other format:"
            " --format safetensors"
        )
    if file is None:
        raise CheckpointError(
            "The run has not recorded the adapter's configuration. Name a file with it: --adapter-config"
            " adapter_config.json (PeftConfig.save_pretrained writes one)."
        )
    return Adapter(prefixes.pop().removesuffix("."), name or "default", _config(file))


def _config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "adapter_config.json" if Path(path).is_dir() else Path(path)
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(said, dict) or "peft_type" not in said:
            raise ValueError("it has no peft_type")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no adapter_config.json of PEFT ({error}).") from None
    return said


def _recorded(text: str) -> dict[str, Any]:
    """A configuration that the checkpoint holds, without what PEFT would import or take for ever on by it."""
    try:
        said = json.loads(text)
        if not isinstance(said, dict) or not isinstance(said.get("peft_type"), str):
            raise ValueError("it has no peft_type")
        _check_patterns(said)
        if said.get("megatron_core") not in (None, "megatron.core"):  # a module that PEFT imports
            raise ValueError(f"it names {said['megatron_core']!r:.100} as its megatron_core")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The adapter's configuration in the checkpoint is damaged, or could harm: {error}. Pass one that you"
            " trust: --adapter-config adapter_config.json (PeftConfig.save_pretrained writes one)."
        ) from None
    mapping = said.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    if not (library is None or (isinstance(library, str) and library.startswith(_LIBRARIES))):
        said["auto_mapping"] = None
        warnings.warn(
            f"The adapter_config.json is without auto_mapping, by which AutoPeftModel would import {library!r:.100}."
            " Load it by PeftModel.from_pretrained, or export with --adapter-config and one that you trust.",
            stacklevel=4,
        )
    return said


_LIBRARIES = ("transformers.", "diffusers.")


def _check_patterns(config: dict[str, Any]) -> None:
    """Raise ValueError for regular expressions with which PEFT would never end."""
    for key, value in config.items():
        most = 10**7  # the time for one name is seconds then, at the very worst
        patterns = [value] if isinstance(value, str) else []
        if key.endswith("_pattern"):  # which PEFT puts into another
            most = 10**5
            patterns = list(value) if isinstance(value, list | dict) else patterns
        elif not key.endswith(("_modules", "_parameters")):
            continue
        for pattern in patterns:
            if not isinstance(pattern, str) or steps(pattern) > most:
                raise ValueError(f"{key} has {pattern!r:.100}, with which a match could take for ever")


def _of_adapter(found: Weights, manifest: Manifest | None, adapter: Adapter) -> tuple[dict[str, str], list[str]]:
    """The names in the checkpoint by those in the adapter's file, and what was trained besides."""
    left_out = [name for name in (manifest.names if manifest else ()) if adapter.owns(name)]
    if left_out:
        raise CheckpointError(
            f"Parts of the adapter were frozen and so are not in the checkpoint: {named(left_out)}. Save them with"
            " patch(keep=[...]), or take a full checkpoint."
        )
    adapters = manifest.adapters.get(adapter.module, {}) if manifest else ()
    members = adapter.members(found.trained, found.aliases, (*found.frozen, *found.buffers), adapters)
    if not any(adapter.owns(name) for name in members.values()):
        raise CheckpointError(f"The checkpoint holds nothing of an adapter {adapter.name!r}. Say which: --adapter")
    inside = set(members.values())
    return members, [name for name in found.trained if inside.isdisjoint(found.names_of(name))]

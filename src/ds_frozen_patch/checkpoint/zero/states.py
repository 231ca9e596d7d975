"""The states of a checkpoint's files: its settings, and whether all files are from the same save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, CheckpointMismatchError, named
from ...core.record import Record
from ...manifest import KEY, Manifest, digest_of, reference
from ...parameters import compiled_modules, is_name
from ..format.archive import Contents, read_archive
from ..format.records import Records, from_stored
from ..format.stored import StandIn, StoredTensor, expanded_size, is_shape, is_size, iter_tensors
from ..quantization import parse_subclass
from .labels import PLAIN_GROUPS, get_label
from .layout import Layout, check_links_stay_inside, find_layout
from .partitions import Shapes, with_gaps

DEEPSPEEDS_OWN = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    ]
)
"""The keys that DeepSpeed writes into a file of model states; the rest is client state."""


@dataclass(frozen=True)
class States:
    """The states of all files of a checkpoint, in the order of `layout.files`."""

    layout: Layout
    contents: tuple[Contents, ...]

    @property
    def models(self) -> list[dict[str, Any]]:
        """The model states of each rank."""
        return [contents.state for contents in self.contents[: len(self.layout.model)]]

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """The state of each rank's DeepSpeed optimizer."""
        return [contents.state["optimizer_state_dict"] for contents in self.contents[len(self.layout.model) :]]

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None if ds_frozen_patch did not make the checkpoint trainable-only."""
        state = self.models[0]
        # If files were swapped, the first one may contain only a reference.
        return None if reference(state.get(KEY)) is not None else Manifest.from_checkpoint(state)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return as_integer(self.models[0].get("dp_world_size")) or len(self.layout.optimizer) or 1

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        for state in self.optimizers:
            stage = state.get("zero_stage")
            stage = stage.arguments[0] if isinstance(stage, StandIn) and stage.arguments else stage  # DeepSpeed's enum
            if stage in (1, 2, 3):
                return int(stage)
        return configured_stage(self.models[0]) or int(bool(self.optimizers))  # DeepSpeed's BF16_Optimizer is as ZeRO-1

    @property
    def quantizes_frozen(self) -> bool:
        """Whether ZeRO++ keeps the partitions of frozen parameters in int8, whose scales it does not save."""
        return bool(zero_config(self.models[0]).get("zero_quantized_nontrainable_weights"))

    @property
    def leaves_out_frozen(self) -> bool:
        """Whether DeepSpeed itself left out the frozen parameters; known from ZeRO-2 on."""
        return self.zero_stage >= 2 and self.models[0].get("frozen_param_shapes") is None

    def make_record(self, save: str, manifest: Manifest | None, world_size: int) -> Record:
        """The record of a checkpoint that is made from this one."""
        step = as_integer(self.models[0].get("global_steps")) or 0
        return Record(save, world_size, self.zero_stage, step, self.versions, {}, manifest)

    @property
    def compiled(self) -> frozenset[str]:
        """The plain names of the modules that `torch.compile` had wrapped."""
        model = self.models[0]
        names = [*model["module"], *(name for group in parameter_groups(model) for name in group)]
        return compiled_modules(names) | (self.manifest.compiled if self.manifest else frozenset())

    @property
    def versions(self) -> dict[str, str]:
        """The releases that saved it, by package."""
        if self.manifest:
            return dict(self.manifest.versions)
        # Both packages of Lightning save their release under this key.
        recorded = {"deepspeed": "ds_version", "lightning": "pytorch-lightning_version"}
        releases = {name: self.models[0].get(key) for name, key in recorded.items()}
        return {name: version for name, version in releases.items() if isinstance(version, str)}


def read_states(path: str | Path, tag: str | None, trust: bool) -> States:
    """Read the states of all files of a checkpoint, but no tensors.

    Args:
        path: the directory.
        tag: the subdirectory to read; by default the one named in `latest`.
        trust: read files that are links out of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, truncated, damaged or unexpected.
    """
    layout = find_layout(path, tag)
    if not trust:
        check_links_stay_inside(layout)
    contents = tuple(read_archive(file) for file in layout.files)
    for file, content in zip(layout.files, contents, strict=True):
        check_file_kind(file, content)
        if "module" in content.state:
            _check_value_types(file, content.state)
    return States(layout, contents)


def check_file_kind(file: Path, contents: Contents) -> None:
    """Raise CheckpointError if a file does not contain the states that its name promises."""
    part = "optimizer_state_dict" if file.name.endswith("_optim_states.pt") else "module"
    if not isinstance(contents.state, dict) or not isinstance(contents.state.get(part), dict):
        raise CheckpointError(f"{file} is not a file of a DeepSpeed checkpoint: it has no {part!r}. Check the path.")


def _check_value_types(file: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if DeepSpeed's own values in the model states do not have the types that it writes."""

    def are_shapes(value: Any) -> bool:
        return _is_mapping(value, lambda shape: is_shape(tuple(shape) if isinstance(shape, list) else shape))

    groups, plain = state.get("param_shapes"), state.get(PLAIN_GROUPS)
    sound = {
        "module": _is_mapping(state["module"]),
        "param_shapes": not isinstance(groups, list) or all(are_shapes(group) for group in groups),
        PLAIN_GROUPS: not isinstance(plain, list) or all(are_shapes(group) for group in plain),
        "shared_params": _is_mapping(state.get("shared_params"), is_name),
        "frozen_param_shapes": are_shapes(state.get("frozen_param_shapes")),
        "frozen_param_fragments": _is_mapping(
            state.get("frozen_param_fragments"), lambda part: isinstance(part, StoredTensor) or parse_subclass(part)
        ),
        "dp_world_size": is_size(state.get("dp_world_size", 0)),
    }
    if wrong := [name for name, is_sound in sound.items() if not is_sound]:
        raise CheckpointError(f"{file} is damaged: unexpected values for {named(wrong)}. Get a complete copy of it.")


def _is_mapping(value: Any, holds: Callable[[Any], object] = lambda _: True) -> bool:
    """Whether a value is None, or a dict from names to suitable values."""
    return value is None or (
        isinstance(value, dict) and all(is_name(name) and holds(item) for name, item in value.items())
    )


def check_same_save(states: States) -> None:
    """Raise CheckpointError if files are missing or are not from the same save."""
    check_shard_count(states.layout, states.models[0], states.zero_stage)
    _check_manifest_references(states)
    check_digests_agree(
        [digest_file(file, contents) for file, contents in zip(states.layout.files, states.contents, strict=True)]
    )


def _check_manifest_references(states: States) -> None:
    """Raise CheckpointError if a file refers to another one for the manifest, and that has none."""
    have, named_by = set(), {}
    for file, state in zip(states.layout.model, states.models, strict=True):
        try:
            referred = reference(state.get(KEY))
            manifest = Manifest.from_checkpoint(state) if referred is None else None
        except CheckpointMismatchError as error:
            raise CheckpointError(f"{file}: {error}") from None
        if referred is not None:
            named_by[referred[0]] = file
        elif manifest is not None:
            have.add(file.name)
    for name, file in named_by.items():
        if name not in have:
            raise CheckpointError(
                f"{file} refers to {name!r} for the manifest, which has none. Get a complete copy of the checkpoint."
            )


def check_shard_count(layout: Layout, model: Mapping[str, Any], stage: int) -> None:
    """Raise CheckpointError if the number of optimizer states is not the world size."""
    count, ranks = len(layout.optimizer), as_integer(model.get("dp_world_size"))
    # In some cases of stage 1, DeepSpeed uses a plain optimizer; its state is in the model states.
    if stage and model.get("optimizer") is None and ranks and count != ranks and parameter_groups(model):
        raise CheckpointError(
            f"{layout.root} was saved by {ranks} ranks and has the optimizer states of {count}."
            " Get a complete copy of it, without files of another save."
        )


@dataclass(frozen=True)
class FileDigests:
    """Digests of the fields that must match across all files of one kind in a save, and the file's label."""

    file: Path
    kind: str
    alike: dict[str, str]
    save: str | None
    name: str | None
    has_record: bool = False


def digest_file(file: Path, contents: Contents) -> FileDigests:
    """Compute the digests of a file."""
    is_model = "module" in contents.state
    alike = _model_fields(contents.state) if is_model else _optimizer_fields(contents)
    digests = {key: sha256(value.encode()).hexdigest() for key, value in alike.items()}
    label = get_label(contents.state)
    return FileDigests(file, "model" if is_model else "optimizer", digests, label.get("save"), label.get("file"))


def check_digests_agree(digests: Sequence[FileDigests]) -> None:
    """Raise CheckpointError if a file is from another save than the others, or has another file's name."""
    first: dict[str, FileDigests] = {}
    for entry in digests:
        if entry.name not in (None, entry.file.name):
            raise CheckpointError(
                f"{entry.file} was saved as {entry.name}: files of the checkpoint were swapped or renamed. Give each"
                " the name that it was saved under, or get a complete copy."
            )
        if entry.save != digests[0].save:
            raise CheckpointError(
                f"{entry.file} is of another save than {digests[0].file.name}, or is being replaced. Take all"
                " files from one checkpoint."
            )
        other = first.setdefault(entry.kind, entry)
        if differ := [key for key in entry.alike if entry.alike[key] != other.alike[key]]:
            raise CheckpointError(
                f"{entry.file} is of another save than {other.file.name}: they differ in {differ[0]}. Take all"
                f" {entry.kind} states from one checkpoint."
            )


def _model_fields(state: Mapping[str, Any]) -> dict[str, str]:
    keys = ("global_steps", "global_step", "epoch", "ds_version", "dp_world_size", "ds_config", "param_shapes")
    fields = {key: _to_comparable_text(state.get(key)) for key in keys}
    return {**fields, "the manifest": _to_comparable_text(digest_of(state.get(KEY)))}


def _optimizer_fields(contents: Contents) -> dict[str, str]:
    """What is the same in all ranks' optimizers: the settings, and the number of steps."""
    optimizer = contents.state["optimizer_state_dict"]
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    with Records() as records:
        steps = [
            bytes(records.read(from_stored(tensor))).hex()
            for path, tensor in iter_tensors(optimizer)
            if path[-1:] == ("step",) and tensor.numel == 1
        ]
    return {
        "ds_version": _to_comparable_text(contents.state.get("ds_version")),
        "ds_config": _to_comparable_text(contents.state.get("ds_config")),
        "partition_count": _to_comparable_text(optimizer.get("partition_count")),
        "the optimizer's settings": _to_comparable_text(groups),
        "the number of steps": _to_comparable_text(sorted(steps)),
    }


_MOST_VALUES = 10_000_000


def _to_comparable_text(value: Any) -> str:
    def to_text(item: Any) -> str:
        return "tensor" if isinstance(item, StoredTensor) else repr(item)

    try:
        if expanded_size(value) > _MOST_VALUES:
            raise ValueError("its values are too many")
        return json.dumps(value, default=to_text, skipkeys=True)
    except (ValueError, RecursionError) as error:  # a cycle, or a number that is too large
        raise CheckpointError(
            f"A file of the checkpoint is damaged: it contains a value that cannot be compared ({error})."
        ) from None


def configured_stage(model: Mapping[str, Any]) -> int:
    """The ZeRO stage in the configuration that the model states contain."""
    stage = zero_config(model).get("stage")
    return stage if stage in (1, 2, 3) else 0


def zero_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section on ZeRO in the configuration that the model states contain."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}


def zero_setting(states: States, name: str) -> Any:
    """A setting in the section on ZeRO of the run's configuration."""
    return zero_config(states.models[0]).get(name)


def parameter_groups(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """For each parameter group of the optimizer, the shapes of its parameters by name; in ZeRO-3 for each sub-group.

    DeepSpeed does not save them in stage 0; we do.
    """
    groups = model.get("param_shapes") or model.get(PLAIN_GROUPS)
    return [dict(group) for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


GAPS = "param_alignment_paddings"
"""The key of the gaps in the state of ZeRO's optimizer, see `groups_in_memory`."""
FLAT_MASTERS = "fp32_groups_flat"
_PLAIN_MASTERS = ("fp32_groups", FLAT_MASTERS)


def masters_key(optimizer: Any) -> str:
    """The key of the masters in the state of an optimizer that is not ZeRO's; empty if it has none, as in fp32.

    In 16 bits, stage 0 has a master for each parameter, or with FusedAdam a flat one for each group.
    """
    return next((key for key in _PLAIN_MASTERS if isinstance(optimizer, Mapping) and key in optimizer), "")


def groups_in_memory(states: States, groups: Sequence[Shapes]) -> Sequence[Shapes]:
    """The parameter groups as flat tensors have them: in ZeRO 1 and 2 with the gaps of `parameter_alignment`.

    Raises:
        CheckpointError: the gaps do not fit the groups.
    """
    gaps = states.optimizers[0].get(GAPS)  # since DeepSpeed 0.19.8
    if gaps is None:
        return groups
    if not isinstance(gaps, list) or [len(group) for group in groups] != [
        len(group_gaps) if isinstance(group_gaps, list) and all(map(is_size, group_gaps)) else None
        for group_gaps in gaps
    ]:
        raise CheckpointError(
            f"{states.layout.optimizer[0]} is damaged: {GAPS!r} does not fit the parameters. Get a complete copy of it."
        )
    return [with_gaps(group, group_gaps) for group, group_gaps in zip(groups, gaps, strict=True)]


def as_names(value: Any) -> set[str]:
    """The strings in a list or among the keys of a mapping; empty for anything else."""
    return {item for item in value if isinstance(item, str)} if isinstance(value, list | tuple | Mapping) else set()


def as_integer(value: Any) -> int | None:
    """The value if it is an integer of at most 64 bits, else None."""
    return value if isinstance(value, int) and abs(value) < 1 << 63 else None

"""The states of a checkpoint's files: its settings, and whether all files are from the same save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, named
from ...parameters import compiled_modules, is_name
from ...record import Record, carried, read_record
from ..format.archive import Contents, read_archive
from ..format.stored import StandIn, StoredTensor, is_shape, is_size
from ..quantization import parse_subclass
from .layout import Layout, find_layout
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
    """The states of all files of a checkpoint, in the order of `layout.files`, and its record."""

    layout: Layout
    contents: tuple[Contents, ...]
    record: Record

    @property
    def models(self) -> list[dict[str, Any]]:
        """The model states of each rank."""
        return [contents.state for contents in self.contents[: len(self.layout.model)]]

    @property
    def optimizers(self) -> list[dict[str, Any]]:
        """The state of each rank's DeepSpeed optimizer."""
        return [contents.state["optimizer_state_dict"] for contents in self.contents[len(self.layout.model) :]]

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

    @property
    def lacks_frozen(self) -> bool:
        """Whether frozen parameters were left out, by whomever."""
        return bool(self.record.left_out) if self.record.is_trainable_only else self.leaves_out_frozen

    @property
    def known(self) -> Record:
        """The record of a checkpoint that is made from this one: what it keeps of this one's."""
        step = as_integer(self.models[0].get("global_steps")) or 0
        saved = replace(self.record, world_size=self.world_size, zero_stage=self.zero_stage, step=step, files={})
        return replace(saved, versions=self.versions)

    @property
    def compiled(self) -> frozenset[str]:
        """The plain names of the modules that `torch.compile` had wrapped."""
        model = self.models[0]
        names = [*model["module"], *(name for group in parameter_groups(model) for name in group)]
        return compiled_modules(names) | self.record.compiled

    @property
    def versions(self) -> dict[str, str]:
        """The releases that saved it, by package."""
        if self.record.versions:
            return dict(self.record.versions)
        # Both packages of Lightning save their release under this key.
        recorded = {"deepspeed": "ds_version", "lightning": "pytorch-lightning_version"}
        releases = {name: self.models[0].get(key) for name, key in recorded.items()}
        return {name: version for name, version in releases.items() if isinstance(version, str)}


def read_states(
    path: str | Path, tag: str | None = None, record: Record | None = None, rank: int | None = None
) -> States:
    """Read the states of all files of a checkpoint, but no tensors.

    Args:
        path: the directory.
        tag: the subdirectory to read; by default the one named in `latest`.
        record: of the checkpoint; by default the one beside its files, or in the first one.
        rank: read of the model states only the first rank's and this one's, and take the first ones for the others
            unless each has shards of frozen parameters; by default all.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, truncated, damaged or unexpected.
    """
    layout = find_layout(path, tag)
    first = _read_file(layout.model[0])
    others = layout.model[1:]
    is_alone = rank is not None and not first.state.get("frozen_param_fragments")
    needed = {min(rank or 0, len(others))} if is_alone else range(len(layout.model))
    models = [_read_file(file) if index in needed else first for index, file in enumerate(others, 1)]
    contents = (first, *models, *map(_read_file, layout.optimizer))
    record = record or read_record(layout.model[0].parent)
    return States(layout, contents, record or carried(first.state, layout.files[0]))


def _read_file(file: Path) -> Contents:
    contents = read_archive(file)
    check_file_kind(file, contents)
    if "module" in contents.state:
        _check_value_types(file, contents.state)
    return contents


def check_file_kind(file: Path, contents: Contents) -> None:
    """Raise CheckpointError if a file does not contain the states that its name promises."""
    part = "optimizer_state_dict" if file.name.endswith("_optim_states.pt") else "module"
    if not isinstance(contents.state, dict) or not isinstance(contents.state.get(part), dict):
        raise CheckpointError(f"{file} is not a file of a DeepSpeed checkpoint: it has no {part!r}. Check the path.")


def _check_value_types(file: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if DeepSpeed's own values in the model states do not have the types that it writes."""

    def are_shapes(value: Any) -> bool:
        return _is_mapping(value, lambda shape: is_shape(tuple(shape) if isinstance(shape, list) else shape))

    groups = state.get("param_shapes")
    sound = {
        "module": _is_mapping(state["module"]),
        "param_shapes": not isinstance(groups, list) or all(are_shapes(group) for group in groups),
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
    states.record.check_names(states.layout.model[0].parent, {file.name for file in states.layout.files})
    check_contents(states)


def check_contents(states: States) -> None:
    """Raise CheckpointError if a file is of another save than the record."""
    for file, contents in zip(states.layout.files, states.contents, strict=True):
        states.record.check_file(file, contents.state)


def check_shard_count(layout: Layout, model: Mapping[str, Any], stage: int) -> None:
    """Raise CheckpointError if the number of optimizer states is not the world size."""
    count, ranks = len(layout.optimizer), as_integer(model.get("dp_world_size"))
    # In some cases of stage 1, DeepSpeed uses a plain optimizer; its state is in the model states.
    if stage and model.get("optimizer") is None and ranks and count != ranks and parameter_groups(model):
        raise CheckpointError(
            f"{layout.root} was saved by {ranks} ranks and has the optimizer states of {count}."
            " Get a complete copy of it, without files of another save."
        )


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
    groups = model.get("param_shapes")
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

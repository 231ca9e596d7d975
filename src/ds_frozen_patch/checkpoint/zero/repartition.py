"""Repartition a checkpoint: shard its states anew for a different number of ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import manifest
from ...common.errors import CheckpointError
from ...common.progress import progress
from ...core.record import Record, identify, write_record
from ...workarounds.for_deepspeed import ignores_round_robin
from ..format.records import Records
from ..format.stored import Storage, StoredTensor, iter_tensors, stand_in
from ..format.writing import write_archive
from .labels import ELASTIC_KEY, add_label, resharded_save_id
from .masters import check_masters_match
from .new_tensors import NewTensors
from .partitions import (
    SUB_GROUP_SIZE,
    Range,
    Shapes,
    group_shard_size,
    parameter_offsets,
    parameter_shard_size,
    parameter_slices,
    reshard_group,
    reshard_parameter,
    round_robin_order,
    split_into_sub_groups,
    sub_group_shard_size,
    undo_round_robin,
)
from .states import States, as_integer, check_same_save, parameter_groups
from .weights import locate_weights

_BASE_STATE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""The key of the wrapped optimizer's state in that of ZeRO's optimizer, by stage."""
_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


@dataclass(frozen=True)
class Repartition:
    """The state of each file to write, by name, what the new tensors in them consist of, and the record."""

    files: dict[str, Any]
    made: NewTensors
    record: Record | None = None

    @property
    def size(self) -> int:
        """The size of the tensors in all files, in bytes."""
        return sum(
            sum(storage.nbytes for storage in {tensor.storage for _, tensor in iter_tensors(state)})
            for state in self.files.values()
        )

    def write(self, folder: Path, quiet: bool) -> None:
        """Write the files into an existing folder."""
        with Records() as records, progress("writing", self.size, quiet) as done:

            def content(storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
                for chunk in self.made.content(records, storage, begin, count):
                    yield chunk
                    done(len(chunk))

            for name, state in self.files.items():
                write_archive(folder / name, state, content)
        if self.record is not None:
            write_record(folder, self.record)


def plan_repartition(states: States, ranks: int, sub_group_size: float | None = None) -> Repartition:
    """Compute what `ranks` ranks would have saved.

    Args:
        states: the states of the checkpoint.
        ranks: the new world size.
        sub_group_size: for ZeRO-3; by default that of the run.

    Raises:
        CheckpointError: the files are not from one save, or cannot be resharded.
        ValueError: `ranks` is less than 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {ranks}")
    check_same_save(states)
    try:
        _check_can_repartition(states)
        weights = locate_weights(states, ("*",))
        check_masters_match(weights.trained, weights.halves)
        return _repartition(states, ranks, sub_group_size)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # an optimizer's state can be anything
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: the format of its optimizer's state is unknown"
            f" ({type(error).__name__}: {error})."
        ) from error


def _repartition(states: States, ranks: int, sub_group_size: float | None) -> Repartition:
    made = NewTensors()
    if states.zero_stage == 3:
        groups, optimizers = _reshard_sub_groups(states, ranks, sub_group_size, made)
    else:
        groups, optimizers = _reshard_groups(states, ranks, made)
    first = states.layout.model[0].name, states.layout.optimizer[0].name
    files: dict[str, Any] = {}
    for rank in range(ranks if states.zero_stage == 3 else 1):
        # Except for their shards, all ranks after the first save the same.
        model = states.models[min(rank, len(states.models) - 1)]
        files[_name_for_rank(first[0], rank)] = {
            **model,
            **_changed_model_fields(states, model, groups, rank, ranks, made),
        }
    rest = states.contents[len(states.layout.model)].state
    for rank, optimizer in enumerate(optimizers):
        files[_name_for_rank(first[1], rank)] = {**rest, "optimizer_state_dict": optimizer}
    save = resharded_save_id(identify(states.layout.files), ranks)
    files = {name: add_label(state, save, name, has_record=True) for name, state in files.items()}
    before = states.manifest
    return Repartition(files, made, states.make_record(save, before and replace(before, world_size=ranks), ranks))


def _name_for_rank(name: str, rank: int) -> str:
    return name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")


def _check_can_repartition(states: States) -> None:
    """Raise CheckpointError, with the reason, if a checkpoint cannot be resharded."""
    root, stage = states.layout.root, states.zero_stage
    if not states.layout.optimizer or not parameter_groups(states.models[0]):
        raise CheckpointError(
            f"{root} has ZeRO stage {stage}, and its optimizer's state is not sharded by rank: any number of ranks can"
            " resume from it as it is."
        )
    first = states.optimizers[0]
    base = first.get(_BASE_STATE[stage])
    why = None
    if (as_integer(_zero_setting(states, "mics_shard_size")) or 0) > 0:
        why = "MiCS shards the optimizer's state over groups of ranks"
    elif isinstance(base, list):
        why = "zero_optimization.elastic_checkpoint saves the optimizer's state in another format; set it to false"
    elif any(map(any, first.get("param_alignment_paddings") or [])):
        why = "zero_optimization.parameter_alignment puts gaps between the parameters; set it to false"
    elif first.get("ds_zero_partition_groups") is not None:
        why = "it has groups of experts, which are sharded differently"
    elif not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        why = "the format of its optimizer's state is unknown"
    if why:
        raise CheckpointError(f"{root} cannot be resharded: {why}.")


def _zero_setting(states: States, name: str) -> Any:
    """A setting in the section on ZeRO of the run's configuration."""
    config = states.models[0].get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero.get(name) if isinstance(zero, Mapping) else None


def _changed_model_fields(
    states: States, model: Mapping[str, Any], groups: Sequence[Shapes], rank: int, ranks: int, made: NewTensors
) -> dict[str, Any]:
    """The fields that change in a file of model states."""
    changed: dict[str, Any] = {
        "dp_world_size": ranks,
        "param_shapes": [OrderedDict(group) for group in groups],
        ELASTIC_KEY: {"world_size": states.world_size, **(model.get(ELASTIC_KEY) or {})},
    }
    if rank and "shared_params" in model:
        changed["shared_params"] = {}  # only the first rank saves them
    if (before := states.manifest) is not None:
        now = replace(before, world_size=ranks)
        first = states.layout.model[0].name
        changed[manifest.KEY] = now.to_reference(first) if rank else now.to_state()
    if states.zero_stage == 3 and isinstance(model.get("frozen_param_fragments"), dict):
        changed["frozen_param_fragments"] = _reshard_fragments(states, rank, ranks, made)
    return changed


def _reshard_fragments(states: States, rank: int, ranks: int, made: NewTensors) -> dict[str, Any]:
    """A rank's shards of the frozen parameters of a full ZeRO-3 checkpoint."""
    found: dict[str, Any] = OrderedDict()
    before = len(states.models)
    for name, shape in states.models[0]["frozen_param_shapes"].items():
        size = parameter_shard_size(shape, before)
        parts = {
            (owner, 0): _require_shard(states, model["frozen_param_fragments"].get(name), size, name)
            for owner, model in enumerate(states.models)
        }
        if parts[0, 0].dtype == "int8":
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded: its frozen parameters are quantized shard by shard. Use a"
                " trainable-only checkpoint, or prune it."
            )
        found[name] = made.recut(parts, reshard_parameter(shape, before, ranks, rank))
    return found


def _require_shard(states: States, flat: Any, size: int, what: str) -> StoredTensor:
    if not isinstance(flat, StoredTensor) or flat.numel != size or not flat.is_contiguous:
        raise CheckpointError(
            f"{states.layout.root} is inconsistent: a rank's shard of {what!r} does not have {size} elements. It is"
            " from another run, or on NVMe; take all files from one checkpoint."
        )
    return flat


def _reshard_groups(states: States, ranks: int, made: NewTensors) -> tuple[list[Shapes], list[dict[str, Any]]]:
    """The new groups, and each rank's optimizer state, in ZeRO 1 and 2."""
    old, before = parameter_groups(states.models[0]), len(states.optimizers)
    plain: list[Shapes] = list(old)
    new = plain
    if _uses_round_robin(states):
        plain = [undo_round_robin(group, before) for group in old]
        new = [round_robin_order(group, ranks) for group in plain]
    held = _OptimizerShards(states, [group_shard_size(group, before) for group in old])
    first = states.optimizers[0]
    optimizers = []
    for rank in range(ranks):
        cut = [reshard_group(old[index], new[index], index, before, ranks, rank) for index in range(len(new))]
        changed = {
            _BASE_STATE[2]: {**first[_BASE_STATE[2]], "state": held.states(enumerate(cut), made)},
            # Masters are saved without padding.
            _MASTERS[2]: [held.master([item for item in ranges if isinstance(item, Range)], made) for ranges in cut],
            "group_paddings": [item for ranges in cut for item in ranges if isinstance(item, int)],
            "partition_count": [ranks] * len(new),
            "param_slice_mappings": [_fragment_addresses(group, ranks, rank) for group in plain],
        }
        optimizers.append({**first, **{key: value for key, value in changed.items() if key in first}})
    return new, optimizers


def _uses_round_robin(states: States) -> bool:
    """Whether groups have the order of `round_robin_gradients`."""
    saved_with = states.versions.get("deepspeed", "")
    return bool(_zero_setting(states, "round_robin_gradients")) and not ignores_round_robin(
        saved_with, states.zero_stage
    )


def _fragment_addresses(group: Shapes, ranks: int, rank: int) -> dict[str, Any]:
    """The places of parameters in a rank's shard of a group; DeepSpeed ignores `round_robin_gradients` in them."""
    address = stand_in("deepspeed.utils.tensor_fragment.fragment_address")
    return OrderedDict((name, address(count, begin)) for name, _, begin, count in parameter_slices(group, ranks, rank))


def _reshard_sub_groups(
    states: States, ranks: int, size: float | None, made: NewTensors
) -> tuple[list[Shapes], list[dict[str, Any]]]:
    """The new sub-groups, and each rank's optimizer state, in ZeRO-3."""
    old, before = parameter_groups(states.models[0]), len(states.optimizers)
    first = states.optimizers[0]
    base = first[_BASE_STATE[3]]
    held = _OptimizerShards(states, [sub_group_shard_size(group, before) for group in old])
    where = {
        name: (index, begin)
        for index, group in enumerate(old)
        for name, begin in parameter_offsets(group, before).items()
    }
    configured = _zero_setting(states, "sub_group_size")
    size = size or (configured if isinstance(configured, int | float) else SUB_GROUP_SIZE)
    new: list[Shapes] = []
    settings = []
    for hyperparameters in base["param_groups"]:
        group = {name: shape for index in hyperparameters["params"] for name, shape in old[index].items()}
        made_of_it = split_into_sub_groups(group, ranks, size) if group else []
        settings.append({**hyperparameters, "params": list(range(len(new), len(new) + len(made_of_it)))})
        new += made_of_it
    optimizers = []
    for rank in range(ranks):
        cut = [
            [item for name in group for item in reshard_parameter(group[name], before, ranks, rank, *where[name])]
            for group in new
        ]
        homes = [where[next(iter(group))][0] for group in new]
        state = held.states(zip(homes, cut, strict=True), made)
        optimizers.append(
            {
                **first,
                _BASE_STATE[3]: {**base, "state": state, "param_groups": settings},
                _MASTERS[3]: [held.master(ranges, made) for ranges in cut],
                "partition_count": ranks,
            }
        )
    return new, optimizers


class _OptimizerShards:
    """The ranks' shards of masters and optimizer state for each group, or in ZeRO-3 for each sub-group.

    Args:
        states: the states of the checkpoint.
        sizes: the number of elements in a rank's shard of each group.
    """

    def __init__(self, states: States, sizes: Sequence[int]) -> None:
        stage = states.zero_stage
        self.checkpoint, self.sizes = states, sizes
        self.own = [optimizer[_BASE_STATE[stage]]["state"] for optimizer in states.optimizers]
        self.masters = {
            (rank, group): flat
            for rank, optimizer in enumerate(states.optimizers)
            for group, flat in enumerate(optimizer.get(_MASTERS[stage]) or [])
            if isinstance(flat, StoredTensor)
        }
        if self.masters.keys() != {(rank, group) for rank in range(len(self.own)) for group in range(len(sizes))}:
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded: it lacks master weights; they may be on NVMe."
            )

    def master(self, ranges: Sequence[Range | int], made: NewTensors) -> StoredTensor:
        """The masters of a new shard."""
        return made.recut(self.masters, ranges)

    def states(self, parts: Iterable[tuple[int, Sequence[Range | int]]], made: NewTensors) -> dict[int, dict[str, Any]]:
        """The optimizer state of each new shard, which is described by an old group and ranges; without empty ones."""
        found = enumerate(self._state(group, ranges, made) for group, ranges in parts)
        return {index: kept for index, kept in found if kept}

    def _state(self, group: int, ranges: Sequence[Range | int], made: NewTensors) -> dict[str, Any]:
        """The state of one shard: elementwise values are resharded, others such as step counters are copied."""
        found: dict[str, Any] = {}
        groups = {item.group for item in ranges if isinstance(item, Range)} | {group}
        for key, value in self.own[0].get(group, {}).items():
            if isinstance(value, StoredTensor) and value.shape == (self.sizes[group],):
                flats = {
                    (rank, index): _require_shard(self.checkpoint, own.get(index, {}).get(key), self.sizes[index], key)
                    for rank, own in enumerate(self.own)
                    for index in groups
                }
                found[key] = made.recut(flats, ranges)
            elif not isinstance(value, StoredTensor) or value.numel == 1:
                found[key] = made.copy(value)
            else:
                raise CheckpointError(
                    f"{self.checkpoint.layout.root} cannot be resharded: {key!r} in the optimizer's state has"
                    f" {value.numel} elements for a shard of {self.sizes[group]}; how they correspond is unknown."
                )
        return found

"""What of a checkpoint is cut into parts by rank, cut anew for another number of ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ... import manifest
from ...common.errors import CheckpointError
from ...common.progress import progress
from ..format.records import Piece, Records, Whole
from ..format.stored import ITEM_SIZES, Storage, StoredTensor, stand_in, tensors
from ..format.writing import write_archive
from ..format.zip_directory import CHUNK_BYTES
from .labels import LABEL, labelled, resharded
from .partitions import (
    SUB_GROUP_SIZE,
    Range,
    Shapes,
    dealt,
    gathered,
    offsets,
    part_of_group,
    part_of_parameter,
    part_of_sub_group,
    recut_group,
    recut_parameter,
    slices,
    sub_groups,
)
from .states import States, check_together, names_of_groups, number
from .weights import check_one_run, weights

KEY = "ds_frozen_patch_elastic"
"""Where a checkpoint's state says, as "world_size", how many ranks have trained it, if it was resharded since."""

_BASE = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""Where in a rank's part the state of the optimizer is that ZeRO has wrapped, by stage."""
_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


class _Made:
    """Tensors that are in no file yet: each is pieces of others, and zeros among them."""

    def __init__(self) -> None:
        self.pieces: dict[Storage, list[Piece | int]] = {}

    def flat(self, dtype: str, pieces: Sequence[Piece | int]) -> StoredTensor:
        """A flat tensor of pieces and of zeros, where a number says how many."""
        count = sum(piece if isinstance(piece, int) else piece.count for piece in pieces)
        storage = Storage(None, str(len(self.pieces)), dtype, count)
        self.pieces[storage] = list(pieces)
        return StoredTensor(storage, dtype, 0, (count,), (1,))

    def recut(self, flats: Mapping[tuple[int, int], StoredTensor], ranges: Sequence[Range | int]) -> StoredTensor:
        """A flat tensor of ranges of others, which are given by rank and group."""

        def piece(item: Range) -> Piece:
            flat = flats[item.rank, item.group]
            return Piece(flat.storage, flat.offset + item.begin, item.count)

        taken = [flats[item.rank, item.group] for item in ranges if isinstance(item, Range)]
        like = (taken or list(flats.values()))[0]
        made = self.flat(like.dtype, [piece(item) if isinstance(item, Range) else item for item in ranges])
        return replace(like, storage=made.storage, offset=0, shape=made.shape, stride=made.stride)

    def copy(self, value: Any) -> Any:
        """A tensor of its own: of a count of steps that two share, each would count the other's."""
        if not isinstance(value, StoredTensor):
            return value
        made = self.flat(value.dtype, [Piece(value.storage, value.offset, value.extent)])
        return replace(value, storage=made.storage, offset=0)

    def content(self, records: Records, storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        """The bytes of a storage, in a file or not."""
        if storage not in self.pieces:
            yield from records.chunks(Whole("uint8", (count,), (Piece(storage, begin, count),)))
            return
        for piece in self.pieces[storage]:
            if isinstance(piece, int):
                size = piece * ITEM_SIZES[storage.dtype]
                yield from (bytes(min(CHUNK_BYTES, size - begin)) for begin in range(0, size, CHUNK_BYTES))
            else:
                yield from records.chunks(Whole(storage.dtype, (piece.count,), (piece,)))


@dataclass(frozen=True)
class Plan:
    """The state of each file that is to be made, by its name, and what the tensors that are new in them consist of."""

    files: dict[str, Any]
    made: _Made

    @property
    def size(self) -> int:
        """How many bytes of tensors the files have."""
        return sum(
            sum(storage.nbytes for storage in {tensor.storage for _, tensor in tensors(state)})
            for state in self.files.values()
        )

    def write(self, folder: Path, quiet: bool) -> None:
        """Make the files in a folder that is there."""
        with Records() as records, progress("writing", self.size, quiet) as done:

            def content(storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
                for chunk in self.made.content(records, storage, begin, count):
                    yield chunk
                    done(len(chunk))

            for name, state in self.files.items():
                write_archive(folder / name, state, content)


def plan(states: States, ranks: int, sub_group_size: float | None = None) -> Plan:
    """What `ranks` ranks would have saved, in ZeRO-3 with sub-groups of that size, or of the one that the run had.

    Raises:
        CheckpointError: the files do not fit together, or cannot be resharded.
        ValueError: `ranks` is no positive number.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {ranks}")
    check_together(states)
    try:
        _check(states)
        check_one_run(weights(states, ("*",)))
        return _plan(states, ranks, sub_group_size)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of what an optimizer's state can be made up
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: its optimizer's state is not in a form that is known"
            f" ({type(error).__name__}: {error})."
        ) from error


def _plan(states: States, ranks: int, sub_group_size: float | None) -> Plan:
    made = _Made()
    if states.zero_stage == 3:
        groups, optimizers = _cut_sub_groups(states, ranks, sub_group_size, made)
    else:
        groups, optimizers = _cut_groups(states, ranks, made)
    first = states.layout.model[0].name, states.layout.optimizer[0].name
    files: dict[str, Any] = {}
    for rank in range(ranks if states.zero_stage == 3 else 1):
        # But for their parts, all ranks of a run after the first save the same.
        model = states.models[min(rank, len(states.models) - 1)]
        files[_named(first[0], rank)] = {**model, **_model(states, model, groups, rank, ranks, made)}
    rest = states.contents[len(states.layout.model)].state
    for rank, optimizer in enumerate(optimizers):
        files[_named(first[1], rank)] = {**rest, "optimizer_state_dict": optimizer}
    if isinstance(label := rest.get(LABEL), dict):
        save = resharded(label.get("save"), ranks)
        files = {name: labelled(state, save, name) for name, state in files.items()}
    return Plan(files, made)


def _named(name: str, rank: int) -> str:
    return name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")


def _check(states: States) -> None:
    """Raise CheckpointError, with the reason, for what cannot be cut anew."""
    root, stage = states.layout.root, states.zero_stage
    if not states.layout.optimizer or not names_of_groups(states.models[0]):
        raise CheckpointError(
            f"{root} is of ZeRO stage {stage}, and its optimizer's state is not cut into parts by rank: any number of"
            " ranks can resume from it as it is."
        )
    first = states.optimizers[0]
    base = first.get(_BASE[stage])
    why = None
    if (number(_setting(states, "mics_shard_size")) or 0) > 0:
        why = "MiCS cuts the optimizer's state into parts by groups of ranks"
    elif isinstance(base, list):
        why = "zero_optimization.elastic_checkpoint saves the optimizer's state in a form of its own; set it to false"
    elif any(map(any, first.get("param_alignment_paddings") or [])):
        why = "zero_optimization.parameter_alignment puts gaps between the parameters; set it to false"
    elif first.get("ds_zero_partition_groups") is not None:
        why = "it has groups of experts, with parts of their own"
    elif not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        why = "it has no optimizer's state in a form that is known"
    if why:
        raise CheckpointError(f"{root} cannot be resharded: {why}.")


def _setting(states: States, name: str) -> Any:
    """What the run's configuration says in the section of ZeRO."""
    config = states.models[0].get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero.get(name) if isinstance(zero, Mapping) else None


def _model(
    states: States, model: Mapping[str, Any], groups: Sequence[Shapes], rank: int, ranks: int, made: _Made
) -> dict[str, Any]:
    """What a file of model states is to say otherwise."""
    changed: dict[str, Any] = {
        "dp_world_size": ranks,
        "param_shapes": [OrderedDict(group) for group in groups],
        KEY: {"world_size": states.world_size, **(model.get(KEY) or {})},
    }
    if rank and "shared_params" in model:
        changed["shared_params"] = {}  # the first rank says it
    if (before := states.manifest) is not None:
        now = replace(before, world_size=ranks)
        first = states.layout.model[0].name
        changed[manifest.KEY] = now.to_reference(first) if rank else now.to_state()
    if states.zero_stage == 3 and isinstance(model.get("frozen_param_fragments"), dict):
        changed["frozen_param_fragments"] = _fragments(states, rank, ranks, made)
    return changed


def _fragments(states: States, rank: int, ranks: int, made: _Made) -> dict[str, Any]:
    """A rank's parts of the frozen parameters of a full ZeRO-3 checkpoint."""
    found: dict[str, Any] = OrderedDict()
    before = len(states.models)
    for name, shape in states.models[0]["frozen_param_shapes"].items():
        size = part_of_parameter(shape, before)
        parts = {
            (owner, 0): _checked(states, model["frozen_param_fragments"].get(name), size, name)
            for owner, model in enumerate(states.models)
        }
        if parts[0, 0].dtype == "int8":
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded: its frozen parameters are quantized, each part on its own."
                " Take a trainable-only checkpoint, or prune it."
            )
        found[name] = made.recut(parts, recut_parameter(shape, before, ranks, rank))
    return found


def _checked(states: States, flat: Any, size: int, what: str) -> StoredTensor:
    if not isinstance(flat, StoredTensor) or flat.numel != size or not flat.is_contiguous:
        raise CheckpointError(
            f"{states.layout.root} does not fit together: a rank's part of {what!r} is not of the {size} elements that"
            " it should have. It is of another run, or on NVMe; take all files from one checkpoint."
        )
    return flat


def _cut_groups(states: States, ranks: int, made: _Made) -> tuple[list[Shapes], list[dict[str, Any]]]:
    """The groups of the optimizer, and what each rank has of it, in ZeRO 1 and 2."""
    old, before = names_of_groups(states.models[0]), len(states.optimizers)
    plain: list[Shapes] = list(old)
    new = plain
    if _deals(states):
        plain = [gathered(group, before) for group in old]
        new = [dealt(group, ranks) for group in plain]
    held = _Held(states, [part_of_group(group, before) for group in old])
    first = states.optimizers[0]
    optimizers = []
    for rank in range(ranks):
        cut = [recut_group(old[index], new[index], index, before, ranks, rank) for index in range(len(new))]
        changed = {
            _BASE[2]: {**first[_BASE[2]], "state": held.states(enumerate(cut), made)},
            # Masters are saved without the zeros at the end.
            _MASTERS[2]: [held.master([item for item in ranges if isinstance(item, Range)], made) for ranges in cut],
            "group_paddings": [item for ranges in cut for item in ranges if isinstance(item, int)],
            "partition_count": [ranks] * len(new),
            "param_slice_mappings": [_addresses(group, ranks, rank) for group in plain],
        }
        optimizers.append({**first, **{key: value for key, value in changed.items() if key in first}})
    return new, optimizers


def _deals(states: States) -> bool:
    """Whether the groups are in the order of `round_robin_gradients`, which stage 1 ignored before DeepSpeed 0.13."""
    if not _setting(states, "round_robin_gradients"):
        return False
    try:
        return states.zero_stage == 2 or Version(states.versions.get("deepspeed", "")) >= Version("0.13.0")
    except InvalidVersion:
        return True


def _addresses(group: Shapes, ranks: int, rank: int) -> dict[str, Any]:
    """Where each parameter is in a rank's part of a group, as DeepSpeed says it: as if none were ever dealt out."""
    address = stand_in("deepspeed.utils.tensor_fragment.fragment_address")
    return OrderedDict((name, address(count, begin)) for name, _, begin, count in slices(group, ranks, rank))


def _cut_sub_groups(
    states: States, ranks: int, size: float | None, made: _Made
) -> tuple[list[Shapes], list[dict[str, Any]]]:
    """The sub-groups of the optimizer, and what each rank has of it, in ZeRO-3."""
    old, before = names_of_groups(states.models[0]), len(states.optimizers)
    first = states.optimizers[0]
    base = first[_BASE[3]]
    held = _Held(states, [part_of_sub_group(group, before) for group in old])
    where = {name: (index, begin) for index, group in enumerate(old) for name, begin in offsets(group, before).items()}
    said = _setting(states, "sub_group_size")
    size = size or (said if isinstance(said, int | float) else SUB_GROUP_SIZE)
    new: list[Shapes] = []
    settings = []
    for hyperparameters in base["param_groups"]:
        group = {name: shape for index in hyperparameters["params"] for name, shape in old[index].items()}
        made_of_it = sub_groups(group, ranks, size) if group else []
        settings.append({**hyperparameters, "params": list(range(len(new), len(new) + len(made_of_it)))})
        new += made_of_it
    optimizers = []
    for rank in range(ranks):
        cut = [
            [item for name in group for item in recut_parameter(group[name], before, ranks, rank, *where[name])]
            for group in new
        ]
        homes = [where[next(iter(group))][0] for group in new]
        state = held.states(zip(homes, cut, strict=True), made)
        optimizers.append(
            {
                **first,
                _BASE[3]: {**base, "state": state, "param_groups": settings},
                _MASTERS[3]: [held.master(ranges, made) for ranges in cut],
                "partition_count": ranks,
            }
        )
    return new, optimizers


class _Held:
    """What the ranks' optimizers hold for each group, or in ZeRO-3 for each sub-group.

    Args:
        states: of the checkpoint.
        sizes: how many elements a rank's part of each group has.
    """

    def __init__(self, states: States, sizes: Sequence[int]) -> None:
        stage = states.zero_stage
        self.checkpoint, self.sizes = states, sizes
        self.own = [optimizer[_BASE[stage]]["state"] for optimizer in states.optimizers]
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

    def master(self, ranges: Sequence[Range | int], made: _Made) -> StoredTensor:
        """The masters of a new part."""
        return made.recut(self.masters, ranges)

    def states(self, parts: Iterable[tuple[int, Sequence[Range | int]]], made: _Made) -> dict[int, dict[str, Any]]:
        """What the optimizer keeps for each new part, of which an old group and the ranges are given; or nothing."""
        found = enumerate(self._state(group, ranges, made) for group, ranges in parts)
        return {index: kept for index, kept in found if kept}

    def _state(self, group: int, ranges: Sequence[Range | int], made: _Made) -> dict[str, Any]:
        """For one part: what is cut like it, and as the old group has it what is not, such as a count of steps."""
        found: dict[str, Any] = {}
        groups = {item.group for item in ranges if isinstance(item, Range)} | {group}
        for key, value in self.own[0].get(group, {}).items():
            if isinstance(value, StoredTensor) and value.shape == (self.sizes[group],):
                flats = {
                    (rank, index): _checked(self.checkpoint, own.get(index, {}).get(key), self.sizes[index], key)
                    for rank, own in enumerate(self.own)
                    for index in groups
                }
                found[key] = made.recut(flats, ranges)
            elif not isinstance(value, StoredTensor) or value.numel == 1:
                found[key] = made.copy(value)
            else:
                raise CheckpointError(
                    f"{self.checkpoint.layout.root} cannot be resharded: {key!r} in the optimizer's state has"
                    f" {value.numel} elements for a part of {self.sizes[group]}; which belong to which is not known."
                )
        return found

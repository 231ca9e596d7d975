"""Repartition a checkpoint: write its states as another ZeRO stage, world size or precision would have saved them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import manifest
from ...common.errors import CheckpointError
from ...common.progress import progress
from ...core.record import Record, identify, write_record
from ..format.records import Records
from ..format.stored import Storage, iter_tensors, stand_in
from ..format.writing import write_archive
from ..names import RECORD
from .labels import ELASTIC_KEY, PLAIN_GROUPS, add_label, resharded_save_id
from .masters import check_masters_match
from .model_states import ModelStates
from .new_tensors import NewTensors
from .partitions import SUB_GROUP_SIZE, Shapes
from .selection import Selection, select
from .shard import Sharded, in_groups, in_stage_0, in_sub_groups
from .states import GAPS, States, as_integer, check_same_save, masters_key, parameter_groups, zero_setting
from .trained import BASE_STATE, BLOCK, MASTERS_ALONE, Group, SharedBlockError, locate_trained, uses_round_robin
from .weights import Weights, locate_weights

_MODEL = {3: "zero_pp_rank_0_mp_rank_00_model_states.pt"}
_OF_ALL_RANKS = "mp_rank_00_model_states.pt"
_OPTIMIZER = {
    True: "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    False: "zero_pp_rank_0_mp_rank_00_optim_states.pt",
}
"""The names of rank 0's files; those of the optimizer by whether the run is in bf16."""
_PRECISIONS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}
"""The sections of DeepSpeed's configuration that enable a precision."""


@dataclass(frozen=True)
class Target:
    """What a checkpoint is written for; None stands for what the run had that saved it.

    Attributes:
        ranks: the world size.
        stage: of ZeRO, 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        sub_group_size: in ZeRO-3.
        round_robin: whether ZeRO 1 and 2 order parameters by `round_robin_gradients`.
        has_state: whether the optimizer's state is written, besides the masters.
        selection: what is trained from now on.
        optimizer: in stage 0 in 16 bits, what the state of DeepSpeed's optimizer has, with no tensors: the format
            depends on the release and on the wrapped optimizer. Empty in fp32, and in ZeRO 1 to 3.
    """

    ranks: int
    stage: int | None = None
    precision: str | None = None
    sub_group_size: float | None = None
    round_robin: bool | None = None
    has_state: bool = True
    selection: Selection | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Repartition:
    """The state of each file to write, by name, what the new tensors in them consist of, and the record."""

    files: dict[str, Any]
    tensors: NewTensors
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
                for chunk in self.tensors.content(records, storage, begin, count):
                    yield chunk
                    done(len(chunk))

            for name, state in self.files.items():
                write_archive(folder / name, state, content)
        if self.record is not None:
            write_record(folder, self.record)


def plan_repartition(states: States, target: Target) -> Repartition:
    """Compute what a run of another kind would have saved.

    Args:
        states: the states of the checkpoint.
        target: what the files are for.

    Raises:
        CheckpointError: the files are not from one save, or cannot be resharded.
        ValueError: there are no such ranks, or there is no such stage.
    """
    if target.ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {target.ranks}")
    if target.stage not in (None, 0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {target.stage}")
    check_same_save(states)
    try:
        _check_can_repartition(states)
        weights = locate_weights(states, ("*",))
        check_masters_match(weights.trained, weights.halves)
        completed = _completed(target, states)
        _check_can_be_loaded(states, completed)
        return _repartition(states, weights, completed)
    except SharedBlockError:
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: its 8-bit optimizer has a scale for each {BLOCK} elements, and"
            f" a parameter or a shard, then or now, does not begin at a multiple of them. {MASTERS_ALONE}"
        ) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # an optimizer's state can be anything
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded: the format of its optimizer's state is unknown"
            f" ({type(error).__name__}: {error})."
        ) from error


def _check_can_be_loaded(states: States, target: Target) -> None:
    """Raise CheckpointError for a target that keeps the optimizer's state in an unknown format."""
    if target.stage == 0 and target.precision != "fp32" and not target.optimizer:
        raise CheckpointError(
            f"{states.layout.root} cannot be resharded for {target.precision} in stage 0, which keeps the optimizer's"
            " state in a format that depends on the optimizer and on DeepSpeed's release. Load it with"
            " patch(elastic=True), which sees both, or choose stage 1, 2 or 3, or fp32."
        )


def _completed(target: Target, states: States) -> Target:
    """The target with what the run had that saved the checkpoint where it does not say."""
    size = zero_setting(states, "sub_group_size")
    stage = states.zero_stage if target.stage is None else target.stage
    round_robin = uses_round_robin(states) if states.zero_stage in (1, 2) else zero_setting(states, _ROUND_ROBIN)
    return Target(
        target.ranks,
        stage,
        target.precision or precision_of(states),
        target.sub_group_size or (size if isinstance(size, int | float) else SUB_GROUP_SIZE),
        bool(round_robin) if target.round_robin is None else target.round_robin,
        target.has_state,
        target.selection,
        target.optimizer,
    )


_ROUND_ROBIN = "round_robin_gradients"


def precision_of(states: States) -> str:
    """The precision of the run that saved a checkpoint: "bf16", "fp16" or "fp32"."""
    config = states.models[0].get("ds_config")
    for precision, sections in _PRECISIONS.items():
        for name in sections:
            section = config.get(name) if isinstance(config, Mapping) else None
            if isinstance(section, Mapping) and section.get("enabled"):
                return precision
    return "fp32"


def _repartition(states: States, weights: Weights, target: Target) -> Repartition:
    tensors = NewTensors()
    saved = locate_trained(states, target.has_state)
    groups = saved if target.selection is None else select(states, saved, target.selection)
    like = _optimizer_like(states, target)
    if target.stage == 0:
        sharded = Sharded([group.shapes for group in groups], [])
    elif target.stage == 3:
        sharded = in_sub_groups(groups, target.ranks, target.sub_group_size or SUB_GROUP_SIZE, like, tensors)
    else:
        sharded = in_groups(groups, target.ranks, bool(target.round_robin), like, tensors)
    stage = target.stage or 0
    contents = ModelStates(states, weights, saved, groups, stage, target.ranks, tensors)
    files = _model_files(states, contents, groups, sharded.groups, target, tensors)
    rest = {key: states.contents[-1].state[key] for key in ("ds_version",)}
    if states.optimizers:
        rest = states.contents[len(states.layout.model)].state
    for rank, optimizer in enumerate(sharded.optimizers):
        name = _name_for_rank(_OPTIMIZER[target.precision == "bf16"], rank)
        files[name] = {**rest, "optimizer_state_dict": optimizer, "ds_config": _config(states.models[0], target)}
    save = resharded_save_id(identify(states.layout.files), stage, target.ranks)
    # A record without manifest says that nothing was left out, which only a checkpoint of ours can tell.
    has_record = states.manifest is not None or (states.layout.model[0].parent / RECORD).is_file()
    files = {name: add_label(state, save, name, has_record) for name, state in files.items()}
    record = states.make_record(save, _manifest(states, target), target.ranks)
    return Repartition(files, tensors, replace(record, zero_stage=stage) if has_record else None)


def _manifest(states: States, target: Target) -> manifest.Manifest | None:
    before = states.manifest
    return before and replace(before, world_size=target.ranks, zero_stage=target.stage or 0)


def _name_for_rank(name: str, rank: int) -> str:
    return name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")


def _check_can_repartition(states: States) -> None:
    """Raise CheckpointError, with the reason, if a checkpoint cannot be resharded."""
    root, stage = states.layout.root, states.zero_stage
    if not states.layout.optimizer:
        optimizer: Any = states.models[0].get("optimizer")
        inner = optimizer.get(BASE_STATE[3]) if masters_key(optimizer) else optimizer
        if not isinstance(inner, dict) or "param_groups" not in inner:
            raise CheckpointError(
                f"{root} cannot be resharded: it has no optimizer state with fp32 masters. In bf16 in stage 0, some"
                " releases of DeepSpeed save none. Resume in stage 0 under patch(), and save again."
            )
        if not parameter_groups(states.models[0]):
            raise CheckpointError(
                f"{root} cannot be resharded: in stage 0, DeepSpeed does not save which parameter each optimizer state"
                " belongs to, and ds_frozen_patch does. Resume in stage 0 under patch(), at any world size, and save"
                " again."
            )
        return
    first = states.optimizers[0]
    base = first.get(BASE_STATE[stage])
    why = None
    if (as_integer(zero_setting(states, "mics_shard_size")) or 0) > 0:
        why = "MiCS shards the optimizer's state over groups of ranks"
    elif isinstance(base, list):
        why = "zero_optimization.elastic_checkpoint saves the optimizer's state in another format; set it to false"
    elif first.get("ds_zero_partition_groups") is not None:
        why = "it has groups of experts, which are sharded differently"
    elif (
        not isinstance(base, dict) or not isinstance(base.get("state"), dict) or not parameter_groups(states.models[0])
    ):
        why = "the format of its optimizer's state is unknown"
    if why:
        raise CheckpointError(f"{root} cannot be resharded: {why}.")


_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow")


def _optimizer_like(states: States, target: Target) -> Mapping[str, Any]:
    """What the state of a rank's optimizer has besides the shards."""
    base: dict[str, Any] = {"state": {}, "param_groups": []}
    stage = target.stage or 0
    first = states.optimizers[0] if states.optimizers else {}
    same = precision_of(states) == target.precision and all(key in first for key in _SCALING)
    scaling: dict[str, Any] = {key: first[key] for key in _SCALING if key in first}
    if not same:
        scaling = {"loss_scaler": _static_scaler(), "dynamic_loss_scale": False, "overflow": False}
    if first and (states.zero_stage == stage or {states.zero_stage, stage} == {1, 2}):
        like: dict[str, Any] = {**first, **scaling}
    elif stage == 3:
        like = {**scaling, "partition_count": None, BASE_STATE[3]: base, "fp32_flat_groups": None}
    else:
        last = {"ds_version": states.contents[-1].state.get("ds_version"), "param_slice_mappings": None}
        places = {"single_partition_of_fp32_groups": None, "group_paddings": None, "partition_count": None, **last}
        like = {**scaling, BASE_STATE[stage or 1]: base, **places}
    like.pop(GAPS, None)  # DeepSpeed then makes those that it needs
    if states.zero_stage != stage:
        like["zero_stage"] = stand_in("deepspeed.runtime.zero.config.ZeroStageEnum")(stage)
    return like


def _static_scaler() -> Any:
    """DeepSpeed's scaler of losses for bf16 and fp32, which does nothing; with fp16, a load keeps the run's own."""
    kind = stand_in("deepspeed.runtime.fp16.loss_scaler.LossScaler")
    scaler = kind.__new__(kind)
    scaler.state = {"cur_scale": 1.0, "dynamic": False}
    return scaler


def _config(model: Mapping[str, Any], target: Target) -> Any:
    """DeepSpeed's configuration of the run that saved, with what the target changes."""
    config = model.get("ds_config")
    if not isinstance(config, Mapping):
        config = {}
    section = config.get("zero_optimization")
    zero: dict[str, Any] = dict(section) if isinstance(section, Mapping) else {}
    if target.stage or zero:
        zero["stage"] = target.stage
    changed: dict[str, Any] = dict(config)
    if zero:
        changed["zero_optimization"] = zero
    for precision, sections in _PRECISIONS.items():
        for name in sections:
            if name in config or (precision == target.precision and name == sections[0]):
                section = config.get(name)
                section = section if isinstance(section, Mapping) else {}
                changed[name] = {**section, "enabled": precision == target.precision}
    return changed


def _model_files(
    states: States,
    contents: ModelStates,
    groups: Sequence[Group],
    shapes: Sequence[Shapes],
    target: Target,
    tensors: NewTensors,
) -> dict[str, Any]:
    """The files of model states, by name."""
    stage, first = target.stage or 0, _MODEL.get(target.stage or 0, _OF_ALL_RANKS)
    now = _manifest(states, target)
    files: dict[str, Any] = {}
    for rank in range(target.ranks if stage == 3 else 1):
        # Except for their shards, all ranks after the first save the same.
        model = states.models[min(rank, len(states.models) - 1)]
        state = {
            **model,
            **contents.fields(model, rank),
            "dp_world_size": target.ranks,
            "param_shapes": [OrderedDict(group) for group in shapes] if stage else None,
            "optimizer": None if stage else in_stage_0(groups, target.optimizer, tensors),
            "ds_config": _config(model, target),
            ELASTIC_KEY: {"world_size": states.world_size, **(model.get(ELASTIC_KEY) or {})},
        }
        state.pop(PLAIN_GROUPS, None)
        if stage == 0:
            state[PLAIN_GROUPS] = [OrderedDict(group) for group in shapes]
        if now is not None:
            state[manifest.KEY] = now.to_reference(first) if rank else now.to_state()
        files[_name_for_rank(first, rank)] = state
    return files

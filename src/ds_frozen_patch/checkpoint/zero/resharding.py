"""Reshard a checkpoint: its files as a run in another ZeRO stage, world size or precision would have saved them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from ...common.errors import CheckpointError
from ...parameters import plain
from ...record import Record
from ..format.records import from_stored
from ..format.stored import Size, StoredTensor, stand_in
from .entries import with_attributes
from .groups import BASE_STATE, MASTER, MASTERS, Group, UnsupportedError, read, uses_round_robin
from .partitions import SUB_GROUP_SIZE, ranges
from .shards import NewTensors, Target, cut, flat_shapes, shard
from .states import GAPS, States, as_integer, masters_key, parameter_groups, zero_config, zero_setting
from .weights import Weights

_PRECISIONS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}
"""The sections of DeepSpeed's configuration that enable a precision."""


def precision_of(config: Any) -> str:
    """The precision of a run with this configuration: "bf16", "fp16" or "fp32"."""
    for precision, names in _PRECISIONS.items():
        for name in names:
            section = config.get(name) if isinstance(config, Mapping) else None
            if isinstance(section, Mapping) and section.get("enabled"):
                return precision
    return "fp32"


def target_for(states: States, **given: Any) -> Target:
    """A target: what is not given, or None, is as in the run that saved the checkpoint."""
    stage, size = states.zero_stage, zero_setting(states, "sub_group_size")
    round_robin = uses_round_robin(states) if stage in (1, 2) else zero_setting(states, "round_robin_gradients")
    saved = {
        "ranks": states.world_size,
        "stage": stage,
        "precision": precision_of(states.models[0].get("ds_config")),
        "sub_group_size": size if isinstance(size, int | float) else SUB_GROUP_SIZE,
        "round_robin": bool(round_robin),
    }
    target = Target(**{**saved, **{key: value for key, value in given.items() if value is not None}})
    if target.ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {target.ranks}")
    if target.stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {target.stage}")
    return target


class Resharding:
    """A checkpoint as another run would have saved it. Only pickles are read; `tensors` says where its tensors are.

    In ZeRO-3 the module's state dict has placeholders for parameters: trained ones are with the optimizer, and each
    rank has a part of each frozen one beside the state dict. ZeRO-2 has frozen parameters there too, whole.

    Args:
        states: of the checkpoint.
        weights: where its weights are.
        target: the other run.
        select: returns the groups of what is trained from now on, given those that were saved.

    Raises:
        CheckpointError: files are missing, or it cannot be resharded.
    """

    def __init__(
        self,
        states: States,
        weights: Weights,
        target: Target,
        select: Callable[[list[Group]], list[Group]] = lambda saved: saved,
    ) -> None:
        self.states, self.weights, self.target, self.tensors = states, weights, target, NewTensors()
        with self._explaining_errors():
            _check_can_be_resharded(states, target)
            self.groups = select(read(states, target.has_state))
            trained = {plain(name): values for group in self.groups for name, values in group.parameters.items()}
            self._saved = {**weights.frozen, **weights.trained}
            self._values = self._saved | {name: values[MASTER] for name, values in trained.items()}
            self._rest = [name for name in self._saved if name not in trained]
            """What no optimizer has, or none has any more."""
            self._check_quantized()
        if target.stage and not target.like:
            self.target = replace(target, like=_like(states, target))
        self._whole: dict[str, StoredTensor] = {}

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        root = self.states.layout.root
        try:
            yield
        except UnsupportedError as error:
            raise CheckpointError(f"{root} cannot be resharded: {error}.") from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # an optimizer's state can be anything
            raise CheckpointError(
                f"{root} cannot be resharded: the format of its optimizer's state is unknown"
                f" ({type(error).__name__}: {error})."
            ) from error

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The name and the state of each file."""
        for rank in range(self.target.ranks if self.target.stage == 3 else 1):
            yield model_name(self.target, rank), self.model(rank)
        for rank in range(self.target.ranks if self.target.stage else 0):
            yield optimizer_name(self.target, rank), self.optimizer(rank)

    def optimizer(self, rank: int) -> dict[str, Any]:
        """The state in a rank's file of the optimizer."""
        states, first = self.states, len(self.states.layout.model)
        rest = states.contents[first].state if states.optimizers else {"ds_version": states.models[0]["ds_version"]}
        with self._explaining_errors():
            state = shard(self.groups, self.target, rank, self.tensors)
        return {**rest, "optimizer_state_dict": state, "ds_config": _config(states.models[0], self.target)}

    def model(self, rank: int) -> dict[str, Any]:
        """The model states in a rank's file."""
        states, target, stage = self.states, self.target, self.target.stage
        # Except for their shards, all ranks after the first save the same.
        model = states.models[min(rank, len(states.models) - 1)]
        shared = model.get("shared_params") if states.zero_stage else self.weights.aliases
        with self._explaining_errors():
            shapes = [OrderedDict(flat) for flats in flat_shapes(self.groups, target) for flat in flats]
            module, fragments = self._module(model["module"]), self._fragments(model, rank)
            sizes = OrderedDict((name, Size(self._values[plain(name)].shape)) for name in fragments)
            return {
                **model,
                "module": module,
                "shared_params": None if not stage else {} if rank else shared,  # only the first rank saves them
                "frozen_param_shapes": sizes if fragments else None,
                "frozen_param_fragments": fragments or None,
                "dp_world_size": target.ranks,
                "param_shapes": shapes,
                "optimizer": None if stage else shard(self.groups, target, rank, self.tensors),
                "ds_config": _config(model, target),
            }

    @property
    def record(self) -> Record:
        """The record of the other run's checkpoint, under the id of this one's."""
        saved = self.states.known
        trained_by = saved.trained_world_size or saved.world_size
        return replace(saved, world_size=self.target.ranks, zero_stage=self.target.stage, trained_world_size=trained_by)

    def _check_quantized(self) -> None:
        """Raise UnsupportedError if frozen parameters have a format that depends on the kind of stage."""
        weights, was_3, is_3 = self.weights, self.states.zero_stage == 3, self.target.stage == 3
        is_cut = weights.subclasses or any(source.dtype == "int8" for source in weights.frozen.values())
        is_packed = weights.parts or weights.packed or weights.subclasses
        if (was_3 and is_cut) or (was_3 != is_3 and self._rest and is_packed):
            raise UnsupportedError("its frozen parameters are quantized. Use a trainable-only checkpoint, or prune it")

    def _module(self, module: dict[str, Any]) -> dict[str, Any]:
        """The module's state dict; where values were in partitions, or in another precision, it has the masters."""
        is_rounded = precision_of(self.states.models[0].get("ds_config")) != self.target.precision
        changed = {}
        for name, item in module.items():
            first = self._first(name)
            if not isinstance(item, StoredTensor) or first not in self._values:
                changed[name] = item
            elif self.target.stage == 3:
                changed[name] = self.tensors.make(item.dtype, [])
            else:
                source = self._values[first]
                if item.shape == source.shape and (not is_rounded or from_stored(item) == source):
                    self._whole[first] = item  # it is there already
                changed[name] = self._make_whole(first)
        return with_attributes(module, changed)

    def _fragments(self, model: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """What a rank's file has of other parameters than the optimizer's, and below ZeRO-2 than the module's."""
        stage, names = self.target.stage, {plain(name): name for name in model["module"]}
        in_module = {*map(self._first, names)} if stage < 2 else {}
        names |= {plain(name): name for name in model.get("frozen_param_fragments") or ()}
        fragments: dict[str, Any] = OrderedDict()
        for first in self._rest if stage else self._saved:
            name, source = names.get(first, first), self._values[first]
            if stage == 3:
                (part,) = ranges({name: source.shape}, stage, self.target.ranks, rank)
                pieces = cut(source, part.begin, part.count)
                fragments[name] = self.tensors.make(source.dtype, chain(pieces, [part.padding]))
            elif first not in in_module:
                fragments[name] = self._make_whole(first)
        return fragments

    def _first(self, name: str) -> str:
        return self.weights.aliases.get(plain(name), plain(name))

    def _make_whole(self, name: str) -> StoredTensor:
        """A whole tensor, the same one for all names."""
        if name not in self._whole:
            source = self._values[name]
            self._whole[name] = self.tensors.make(source.dtype, cut(source, 0, source.numel), source.shape)
        return self._whole[name]


def model_name(target: Target, rank: int) -> str:
    """The name of a rank's file of model states."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if target.stage == 3 else "mp_rank_00_model_states.pt"


def optimizer_name(target: Target, rank: int) -> str:
    """The name of a rank's file of the optimizer."""
    return f"{'bf16_' if target.precision == 'bf16' else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _check_can_be_resharded(states: States, target: Target) -> None:
    """Raise UnsupportedError, with the reason, if a checkpoint cannot be resharded."""
    stage, groups = states.zero_stage, parameter_groups(states.models[0])
    why = None
    if target.stage == 0 and target.precision != "fp32" and not target.like:
        why = (
            f"for {target.precision} in stage 0, which keeps the optimizer's state in a format that depends on the"
            " optimizer and on DeepSpeed's release. Load it as it is under patch(), which sees both, or choose stage 1,"
            " 2 or 3, or fp32"
        )
    elif not states.layout.optimizer:
        optimizer: Any = states.models[0].get("optimizer")
        inner = optimizer.get(BASE_STATE[3]) if masters_key(optimizer) else optimizer
        if not isinstance(inner, dict) or "param_groups" not in inner:
            why = (
                "it has no optimizer state with fp32 masters. In bf16 in stage 0, some releases of DeepSpeed save none."
                " Resume in stage 0 under patch(), and save again"
            )
        elif not groups:
            why = (
                "in stage 0, DeepSpeed does not save which parameter each optimizer state belongs to, and"
                " ds_frozen_patch does. Resume in stage 0 under patch(), at any world size, and save again"
            )
    else:
        first = states.optimizers[0]
        if (as_integer(zero_setting(states, "mics_shard_size")) or 0) > 0:
            why = "MiCS shards the optimizer's state over groups of ranks"
        elif isinstance(first[BASE_STATE[stage]], list):
            why = "zero_optimization.elastic_checkpoint saves the optimizer's state in another format; set it to false"
        elif first.get("ds_zero_partition_groups") is not None:
            why = "it has groups of experts, which are sharded differently"
    if why:
        raise UnsupportedError(why)


_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow")


def _like(states: States, target: Target) -> Mapping[str, Any]:
    """What the state of a rank's optimizer has besides the shards, in ZeRO 1 to 3."""
    first = states.optimizers[0] if states.optimizers else {}
    scaling: dict[str, Any] = {key: first[key] for key in _SCALING if key in first}
    if precision_of(states.models[0].get("ds_config")) != target.precision or len(scaling) < len(_SCALING):
        # For bf16 and fp32, a scaler that does nothing; a run in fp16 keeps its own, see `load.elastic`.
        scaler = stand_in("deepspeed.runtime.fp16.loss_scaler.LossScaler")
        scaling = {"loss_scaler": scaler.__new__(scaler), "dynamic_loss_scale": False, "overflow": False}
        scaling["loss_scaler"].state = {"cur_scale": 1.0, "dynamic": False}
    is_alike = first and (states.zero_stage == 3) == (target.stage == 3)
    keys = [BASE_STATE[target.stage], MASTERS[target.stage], "partition_count"]
    keys += [] if target.stage == 3 else ["group_paddings", "param_slice_mappings", "ds_version"]
    like = {**(first if is_alike else dict.fromkeys(keys)), **scaling}
    if target.stage < 3:
        like["ds_version"] = states.contents[-1].state.get("ds_version")
    like.pop(GAPS, None)  # DeepSpeed then makes those that it needs
    if states.zero_stage != target.stage:
        like["zero_stage"] = stand_in("deepspeed.runtime.zero.config.ZeroStageEnum")(target.stage)
    return like


def _config(model: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """DeepSpeed's configuration of the run that saved, with what the target changes."""
    config = model.get("ds_config")
    changed: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
    if target.stage or zero_config(model):
        changed["zero_optimization"] = {**zero_config(model), "stage": target.stage}
    for precision, (usual, *others) in _PRECISIONS.items():
        for name in (usual, *others):
            if name in changed or (precision == target.precision and name == usual):
                section = changed.get(name)
                section = section if isinstance(section, Mapping) else {}
                changed[name] = {**section, "enabled": precision == target.precision}
    return changed

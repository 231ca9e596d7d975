"""Reshard a checkpoint: its files as a run in another ZeRO stage, world size or precision would have saved them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...parameters import plain
from ...record import Record
from ..format.stored import Size, StoredTensor, stand_in
from .groups import (
    BASE_STATE,
    BLOCK,
    MASTERS_ALONE,
    Group,
    SharedBlockError,
    Trained,
    Values,
    contiguous,
    read,
    uses_round_robin,
)
from .partitions import SUB_GROUP_SIZE, ranges
from .shards import NewTensors, Target, flat_shapes, pieces_of, shard
from .states import (
    GAPS,
    States,
    as_integer,
    check_shard_count,
    masters_key,
    parameter_groups,
    zero_config,
    zero_setting,
)
from .weights import check_masters_match, locate_weights

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
        target: the other run.
        select: returns the groups of what is trained from now on, given those that were saved.

    Raises:
        CheckpointError: files are missing, or it cannot be resharded.
    """

    def __init__(
        self, states: States, target: Target, select: Callable[[list[Group]], list[Group]] | None = None
    ) -> None:
        check_shard_count(states.layout, states.models[0], states.zero_stage)
        self.states, self.target, self.tensors = states, target, NewTensors()
        with self._explaining_errors():
            _check_can_be_resharded(states, target)
            self.weights = locate_weights(states, ("*",))
            check_masters_match(self.weights.trained, self.weights.halves)
            saved = read(states, target.has_state)
            self.groups = saved if select is None else select(saved)
            before, now = _by_plain_name(saved), _by_plain_name(self.groups)
            self._trained = {**before, **now}
            self._was_trained = {name: parameter for name, parameter in before.items() if name not in now}
            self._rest = self._find_rest()
        if target.stage and not target.like:
            self.target = replace(target, like=_like(states, target))
        self._whole: dict[str, StoredTensor] = {}

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        root = self.states.layout.root
        try:
            yield
        except SharedBlockError:
            raise CheckpointError(
                f"{root} cannot be resharded: its 8-bit optimizer has a scale for each {BLOCK} elements, and a"
                f" parameter or a shard, then or now, does not begin at a multiple of them. {MASTERS_ALONE}"
            ) from None
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
        states, target = self.states, self.target
        # Except for their shards, all ranks after the first save the same.
        model = states.models[min(rank, len(states.models) - 1)]
        with self._explaining_errors():
            shapes = [OrderedDict(flat) for flats in flat_shapes(self.groups, target) for flat in flats]
            return {
                **model,
                **self._parameters(model, rank),
                "dp_world_size": target.ranks,
                "param_shapes": shapes,
                "optimizer": None if target.stage else shard(self.groups, target, rank, self.tensors),
                "ds_config": _config(model, target),
            }

    @property
    def record(self) -> Record:
        """The record of the other run's checkpoint, under the id of this one's."""
        saved = self.states.known
        trained_by = saved.trained_world_size or saved.world_size
        return replace(saved, world_size=self.target.ranks, zero_stage=self.target.stage, trained_world_size=trained_by)

    @property
    def _crosses(self) -> bool:
        return (self.states.zero_stage == 3) != (self.target.stage == 3)

    def _find_rest(self) -> dict[str, StoredTensor]:
        """What the checkpoint contains of other parameters, by name: frozen ones, and any that no optimizer has."""
        states, before, now = self.states, self.states.zero_stage, self.target.stage
        model = states.models[0]
        fragments = model.get("frozen_param_fragments")
        if before == 3 or (before == 2 and now == 2):
            rest = dict(fragments) if isinstance(fragments, dict) else {}
        else:
            names = {*self.weights.frozen, *self.weights.trained} - self._trained.keys()
            rest = {name: item for name, item in model["module"].items() if plain(name) in names}
        if now == 3:  # below, the module's state dict has their values
            rest |= {name: parameter.master.like for name, parameter in self._was_trained.items()}
        is_quantized = self.weights.parts or self.weights.packed or self.weights.subclasses
        if self._crosses and rest and is_quantized:
            raise CheckpointError(
                f"{states.layout.root} cannot be resharded to another kind of stage: its frozen parameters are"
                " quantized. Use a trainable-only checkpoint, or prune it."
            )
        return rest

    def _parameters(self, model: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """What a rank's file has of parameters, given the model states of the same rank, if there are any."""
        stage, before = self.target.stage, self.states.zero_stage
        shared = model.get("shared_params") if before else self.weights.aliases
        is_full = isinstance(self.states.models[0].get("frozen_param_fragments"), dict)
        is_full = is_full if before >= 2 else not self.states.record.is_trainable_only
        has_fragments = stage >= 2 and (is_full or bool(self._rest))
        rest = {name: self._other(name, item) for name, item in self._rest.items()} if has_fragments else {}
        fragments: dict[str, Any] = OrderedDict()
        for name, parameter in rest.items():
            if stage == 3:
                (part,) = ranges({name: parameter.shape}, stage, self.target.ranks, rank)
                fragments[name] = self.tensors.make(parameter.master.like, pieces_of(part, parameter.master))
            else:
                fragments[name] = self._make_whole(name, parameter) if before == 3 else self._rest[name]
        return {
            "module": self._module(model["module"], model.get("optimizer")),
            "shared_params": None if not stage else {} if rank else shared,  # only the first rank saves them
            "frozen_param_shapes": OrderedDict((n, Size(p.shape)) for n, p in rest.items()) if has_fragments else None,
            "frozen_param_fragments": fragments if has_fragments else None,
        }

    def _other(self, name: str, stored: StoredTensor) -> Trained:
        """A parameter that no optimizer has, or none has any more."""
        first = self.weights.aliases.get(plain(name), plain(name))
        if first in self._was_trained:
            return self._was_trained[first]
        source = {**self.weights.frozen, **self.weights.trained}[first]
        if source.view is not None:
            contiguous(self.states, stored, name)
        if self.states.zero_stage == 3 and stored.dtype == "int8":
            raise CheckpointError(
                f"{self.states.layout.root} cannot be resharded: its frozen parameters are quantized shard by shard."
                " Use a trainable-only checkpoint, or prune it."
            )
        return Trained(source.shape, Values(source.pieces, stored))

    def _module(self, module: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """The module's state dict; in stage 0 in fp32, and in another precision than before, it has the masters."""
        stage = self.target.stage
        has_masters = not self.states.optimizers and not masters_key(optimizer)
        is_rounded = precision_of(self.states.models[0].get("ds_config")) != self.target.precision
        if not self._crosses and not is_rounded and (stage or has_masters):
            return module
        rest = {plain(name): name for name in self._rest}
        changed = {}
        for name, item in module.items():
            first = self.weights.aliases.get(plain(name), plain(name))
            parameter = self._trained.get(first)
            if parameter is None and first in rest and self._crosses:
                parameter = self._other(rest[first], self._rest[rest[first]])
            if not isinstance(item, StoredTensor) or parameter is None:
                changed[name] = item
            else:
                changed[name] = self.tensors.make(item, []) if stage == 3 else self._make_whole(first, parameter)
        return with_attributes(module, changed)

    def _make_whole(self, name: str, parameter: Trained) -> StoredTensor:
        """A whole tensor, the same one for all names."""
        key = self.weights.aliases.get(plain(name), plain(name))
        if key not in self._whole:
            pieces = parameter.master.part(0, prod(parameter.shape))
            self._whole[key] = self.tensors.make(parameter.master.like, pieces, parameter.shape)
        return self._whole[key]


def with_attributes(values: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of the same class as another, with what torch attaches to a state dict."""
    result = type(values)(changed)
    if hasattr(values, "__dict__"):
        vars(result).update(vars(values))
    return result


def model_name(target: Target, rank: int) -> str:
    """The name of a rank's file of model states."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if target.stage == 3 else "mp_rank_00_model_states.pt"


def optimizer_name(target: Target, rank: int) -> str:
    """The name of a rank's file of the optimizer."""
    return f"{'bf16_' if target.precision == 'bf16' else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _by_plain_name(groups: Iterable[Group]) -> dict[str, Trained]:
    return {plain(name): parameter for group in groups for name, parameter in group.parameters.items()}


def _check_can_be_resharded(states: States, target: Target) -> None:
    """Raise CheckpointError, with the reason, if a checkpoint cannot be resharded."""
    root, stage, groups = states.layout.root, states.zero_stage, parameter_groups(states.models[0])
    why = None
    if target.stage == 0 and target.precision != "fp32" and not target.like:
        raise CheckpointError(
            f"{root} cannot be resharded for {target.precision} in stage 0, which keeps the optimizer's state in a"
            " format that depends on the optimizer and on DeepSpeed's release. Load it as it is under patch(), which"
            " sees both, or choose stage 1, 2 or 3, or fp32."
        )
    if not states.layout.optimizer:
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
        base = first.get(BASE_STATE[stage])
        if (as_integer(zero_setting(states, "mics_shard_size")) or 0) > 0:
            why = "MiCS shards the optimizer's state over groups of ranks"
        elif isinstance(base, list):
            why = "zero_optimization.elastic_checkpoint saves the optimizer's state in another format; set it to false"
        elif first.get("ds_zero_partition_groups") is not None:
            why = "it has groups of experts, which are sharded differently"
        elif not isinstance(base, dict) or not isinstance(base.get("state"), dict) or not groups:
            why = "the format of its optimizer's state is unknown"
    if why:
        raise CheckpointError(f"{root} cannot be resharded: {why}.")


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
    if first and (states.zero_stage == target.stage or {states.zero_stage, target.stage} == {1, 2}):
        like: dict[str, Any] = {**first, **scaling}
    elif target.stage == 3:
        like = {**scaling, **dict.fromkeys(("partition_count", BASE_STATE[3], "fp32_flat_groups"))}
    else:
        keys = (BASE_STATE[2], "single_partition_of_fp32_groups", "group_paddings", "partition_count")
        version = states.contents[-1].state.get("ds_version")
        like = {**scaling, **dict.fromkeys(keys), "ds_version": version, "param_slice_mappings": None}
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

"""The names of DeepSpeed's that are not public, in functions that say what they give.

Each function declares the names that it uses, and `missing` looks for all of them on a new engine. One that lacks a
name is saved and loaded as without `patch()`, with a warning at its set-up: no save or load fails for that.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .common.names import Names
from .common.overrides import Attributes
from .common.probing import version_of

if TYPE_CHECKING:
    import torch

_ENGINE = "deepspeed.runtime.engine"
_MERGE = "deepspeed.utils.zero_to_fp32"

# What is used, and whether it is there

PUBLIC = (
    *("bfloat16_enabled", "fp16_enabled", "gradient_accumulation_steps", "load_universal_checkpoint"),
    *("train_micro_batch_size_per_gpu", "use_node_local_storage", "zero_elastic_checkpoint", "zero_optimization"),
    *("zero_optimization_partition_gradients", "zero_optimization_partition_weights", "zero_round_robin_gradients"),
    *("zero_sub_group_size", "global_steps", "config", "module_state_dict", "load_module_state_dict"),
)
"""What other modules use of an engine, apart from `module`, `optimizer`, `device`, ranks and the ZeRO stage."""
NAMES = Names()
uses = NAMES.uses
uses("the engine", *PUBLIC)


def missing(engine: Any) -> str:
    """What this release of DeepSpeed lacks on an engine, as messages name it; empty if it has everything."""
    lacking = NAMES.missing(_objects(engine))
    if not lacking and _is_of(engine.optimizer, "ZeROOptimizer") and has_plain_optimizer(engine):
        lacking = "the argument state_dict_list of load_state_dict of ZeRO's optimizer"
    return f"DeepSpeed {version_of('deepspeed')}, which lacks {lacking}" if lacking else ""


@uses("the engine", "_config", "checkpoint_engine", "has_moe_layers", "mp_world_size")
@uses("the engine's configuration", "zero_config")
@uses("partitioned parameters", "ds_tensor")
def _objects(engine: Any) -> dict[str, list[Any]]:
    """What an engine has of each kind, of which one must have a name; none where that is not needed."""
    config, optimizer = getattr(engine, "_config", None), engine.optimizer
    parameters, is_in_zero_3 = list(engine.module.parameters()), int(engine.zero_optimization_stage()) == 3
    is_zero = hasattr(optimizer, "step") and (_is_of(optimizer, "ZeROOptimizer") or not has_plain_optimizer(engine))
    wraps = is_zero or _is_of(optimizer, "DeepSpeedOptimizer")
    partitioned = parameters if is_in_zero_3 else []
    found: dict[str, list[Any]] = {
        "the engine": [engine],
        "the engine's configuration": [config],
        "the configuration of ZeRO": [getattr(config, "zero_config", None)],
        "the checkpoint engine": [getattr(engine, "checkpoint_engine", None)],
        "DeepSpeed's optimizer": [optimizer] if wraps else [],
        "ZeRO's optimizer": [optimizer] if is_zero else [],
        "the optimizer in ZeRO stage 3": [optimizer] if is_zero and is_in_zero_3 else [],
        "partitioned parameters": partitioned,
        "partitions": [getattr(parameter, "ds_tensor", None) for parameter in partitioned],
        "engines with experts": [engine] if getattr(engine, "has_moe_layers", False) else [],
        "parameters of experts": parameters if getattr(engine, "has_moe_layers", False) else [],
        "engines with tensor parallelism": [engine] if tensor_parallel_ranks(engine) > 1 else [],
    }
    return {kind: [one for one in objects if one is not None] for kind, objects in found.items()}


def _is_of(optimizer: Any, name: str) -> bool:
    """Whether it is of a class of this name, which DeepSpeed has moved between modules."""
    return any(cls.__name__ == name for cls in type(optimizer).__mro__)


# Ranks


@uses("the engine", "dp_world_size|seq_dp_world_size")
def optimizer_ranks(engine: Any) -> int:
    """The ranks that share the optimizer's state; DeepSpeed has no `dp_world_size` with some sequence parallelism."""
    return int(getattr(engine, "seq_dp_world_size", None) or getattr(engine, "dp_world_size", None) or 0)


@uses("the engine", "mp_world_size")
def tensor_parallel_ranks(engine: Any) -> int:
    """The ranks that tensor parallelism divides the module over."""
    return int(getattr(engine, "mp_world_size", None) or 1)


@uses("the engine", "has_moe_layers")
def has_experts(engine: Any) -> bool:
    """Whether the module has layers of `deepspeed.moe`."""
    return bool(getattr(engine, "has_moe_layers", False))


@uses("parameters of experts", "allreduce", "group_name")
def is_expert(parameter: Any) -> bool:
    """Whether it belongs to an expert of `deepspeed.moe`: other ranks may have other experts under its name."""
    return not getattr(parameter, "allreduce", True) and hasattr(parameter, "group_name")


_GROUPS = "deepspeed.utils.groups"


@uses("engines with tensor parallelism", "mpu", "seq_data_parallel_group|data_parallel_group")
@uses(_GROUPS, "_get_expert_parallel_rank", "_get_expert_parallel_world_size")
@uses(_GROUPS, "_get_expert_data_parallel_rank", "_get_expert_data_parallel_world_size")
def shard_of(engine: Any, parameter: Any) -> tuple[int, int, int, int]:
    """The index of this rank's shard of a parameter, of how many, and which copy of it this is, of how many.

    Args:
        engine: with tensor parallelism, unless the parameter is one of an expert.
        parameter: of which ranks have different values.
    """
    import torch.distributed as dist
    from deepspeed.utils import groups

    if not is_expert(parameter):
        copies = getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group
        index, count = engine.mpu.get_model_parallel_rank(), tensor_parallel_ranks(engine)
        return index, count, dist.get_rank(copies), dist.get_world_size(copies)
    name = parameter.group_name
    return (
        groups._get_expert_parallel_rank(name),
        groups._get_expert_parallel_world_size(name),
        groups._get_expert_data_parallel_rank(name),
        groups._get_expert_data_parallel_world_size(name),
    )


@uses("deepspeed.moe.layer", "MoE")
@uses(_GROUPS, "_get_expert_parallel_rank")
def experts(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """Each expert of this rank, with the prefix of its names in a file, which counts those of all ranks, and here."""
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    for path, layer in module.named_modules():
        if isinstance(layer, MoE):
            first = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts."
            for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                yield f"{prefix}{first + number}.", f"{prefix}{number}.", expert


# Configuration


@uses("the engine", "_config")
@uses("the engine's configuration", "_param_dict")
def config_of(engine: Any) -> Mapping[str, Any]:
    """The configuration as DeepSpeed has read it; empty if that is unknown."""
    config = getattr(getattr(engine, "_config", None), "_param_dict", None)
    return config if isinstance(config, Mapping) else {}


@uses("the engine", "_config")
@uses("the engine's configuration", "zero_config")
@uses("the configuration of ZeRO", "mics_shard_size?")
def uses_mics(engine: Any) -> bool:
    """Whether ZeRO-3 keeps several copies of the partitions."""
    return int(getattr(engine._config.zero_config, "mics_shard_size", 0)) > 0  # until DeepSpeed 0.19


# Parameters in ZeRO-3


@uses("partitioned parameters", "ds_tensor")
def partition_of(tensor: Any) -> Any:
    """This rank's partition of what ZeRO-3 has partitioned; anything else as it is."""
    return getattr(tensor, "ds_tensor", tensor)


@uses("partitions", "status", "ds_quant_scale?")
def is_in_memory(partition: Any) -> bool:
    """Whether a partition is there, and not on NVMe or quantized by ZeRO++."""
    return bool(partition.status.name == "AVAILABLE") and not hasattr(partition, "ds_quant_scale")


@uses("partitioned parameters", "ds_process_group", "ds_tensor", "comm?")
@uses("partitions", "ds_numel")
def range_of_partition(parameter: Any) -> tuple[int, int]:
    """Which elements of a partitioned parameter this rank has; none where another rank has the first copy (MiCS)."""
    import torch.distributed as dist

    mics = getattr(parameter, "comm", None)
    group = mics.param_shard_group if mics is not None else parameter.ds_process_group
    begin, size = dist.get_rank(group) * parameter.ds_tensor.ds_numel, parameter.ds_tensor.ds_numel
    whole = numel_of(parameter)  # what is beyond is padding
    return (min(begin, whole), min(begin + size, whole)) if 0 in dist.get_process_group_ranks(group) else (0, 0)


@uses("partitioned parameters", "ds_shape")
def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, even if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@uses("partitioned parameters", "ds_numel")
def numel_of(parameter: torch.Tensor) -> int:
    """The number of elements of the whole parameter, even if ZeRO-3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@uses("partitioned parameters", "ds_secondary_tensor")
def forget_second_copies(engine: Any) -> None:
    """Remove hpZ's copies within a node, after a load: without one, DeepSpeed makes a new one."""
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def gathered(parameters: Mapping[str, torch.nn.Parameter], on_this_rank: bool) -> Iterator[tuple[str, Any]]:
    """Each parameter's name with its whole value in CPU memory; every rank must go through all of them.

    Args:
        parameters: by name, in the same order on every rank.
        on_this_rank: whether this rank wants the values; the others get None.
    """
    from deepspeed import zero

    for name, parameter in parameters.items():
        with zero.GatheredParameters([parameter]):
            value = parameter.detach().to("cpu", copy=True) if on_this_rank else None
        yield name, value


# The optimizer


def has_plain_optimizer(engine: Any) -> bool:
    """True if the engine has an optimizer that is not one of ZeRO's, with partitions of its own on disk.

    Stage 1 does not always have one of ZeRO's: see `cures.forgets_optimizer`.
    """
    load = getattr(engine.optimizer, "load_state_dict", None)  # DeepSpeedZeRoOffload has none
    return load is not None and "state_dict_list" not in inspect.signature(load).parameters


@uses("DeepSpeed's optimizer", "bit16_groups|fp16_groups|bf16_groups")
@uses("the optimizer in ZeRO stage 3", "sub_group_to_group_id")
def optimized(engine: Any) -> dict[torch.nn.Parameter, int]:
    """The parameters that the engine's optimizer has, in its order, with the index of the group of each."""
    optimizer, names = engine.optimizer, ("bit16_groups", "fp16_groups", "bf16_groups")
    # In 16 bits, `param_groups` has the masters. In ZeRO-3, each group consists of sub-groups.
    groups = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
    groups = groups or [group["params"] for group in getattr(optimizer, "param_groups", [])]
    numbers = getattr(optimizer, "sub_group_to_group_id", range(len(groups)))
    return {parameter: numbers[index] for index, group in enumerate(groups) for parameter in group}


@uses("the engine", "param_names")
def trained_groups(engine: Any) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group by name, in the optimizer's own order; empty where that is unknown."""
    groups: list[dict[str, tuple[int, ...]]] = [{} for _ in getattr(engine.optimizer, "param_groups", ())]
    for parameter, index in optimized(engine).items():
        if parameter not in engine.param_names:
            return []
        groups[index][engine.param_names[parameter]] = shape_of(parameter)
    return groups


@uses("the engine", "_get_zero_param_shapes")
def groups_to_save(engine: Any) -> list[dict[str, Any]]:
    """The same as DeepSpeed saves it in `param_shapes` from ZeRO-1 on; there, sub-groups are groups."""
    return trained_groups(engine) if has_plain_optimizer(engine) else engine._get_zero_param_shapes()


@uses("DeepSpeed's optimizer", "fp16_groups?")
def copies_to_masters(engine: Any) -> bool:
    """Whether an optimizer in stage 0 in 16 bits has a copy in fp32 of each of its parameters, frozen or not."""
    return hasattr(engine.optimizer, "fp16_groups")


@uses("DeepSpeed's optimizer", "optimizer")
def inner_optimizer(engine: Any) -> Any:
    """The innermost optimizer."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


@uses("ZeRO's optimizer", "dp_process_group")
def optimizer_group(engine: Any) -> Any:
    """The ranks that share the optimizer's state; None for all of them, or if the optimizer is not partitioned."""
    return getattr(engine.optimizer, "dp_process_group", None)


@uses("ZeRO's optimizer", "round_robin_bit16_padding?")
def has_gaps(engine: Any) -> bool:
    """Whether `parameter_alignment` has put gaps between the parameters in ZeRO 1 and 2, since DeepSpeed 0.19.8."""
    return any(map(any, getattr(engine.optimizer, "round_robin_bit16_padding", ())))


@uses("DeepSpeed's optimizer", "refresh_fp32_params?")
def refresh_masters(engine: Any) -> bool:
    """Copy the parameters into the optimizer's masters, and return whether there are any."""
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()
    return refresh is not None


_SCALING = (
    *("loss_scaler", "loss_scale_config", "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter"),
    *("scale_factor", "scale_window"),
)


@uses("DeepSpeed's optimizer", *(f"{name}?" for name in _SCALING))
def loss_scaling(engine: Any) -> dict[str, Any]:
    """The attributes by which the optimizer scales losses in fp16, with their values now."""
    attributes = getattr(engine.optimizer, "__dict__", {})
    found = {name: attributes[name] for name in _SCALING if name in attributes}
    return {name: copy(value) if name == "loss_scale_config" else value for name, value in found.items()}


# What a save and a load ask the engine


@uses("the engine", "_get_ckpt_name")
def states_file(engine: Any, folder: str, tag: str) -> Path:
    """The file of the model's states that this rank loads."""
    return Path(engine._get_ckpt_name(folder, tag))


@uses("the engine", "_get_zero_ckpt_name")
def partition_file(engine: Any, folder: str, tag: str) -> Path | None:
    """The file of this rank's partition of the optimizer; None if it is not partitioned."""
    is_partitioned = optimizer_group(engine) is not None and engine.zero_optimization()
    return Path(engine._get_zero_ckpt_name(folder, tag)) if is_partitioned else None


@uses("the engine", "_get_all_ckpt_names", "_get_all_zero_checkpoint_names")
def with_files(engine: Any, states: Callable[..., list[str]], partitions: Callable[..., list[str]]) -> Attributes:
    """Lets these functions say which files there are, where each rank would look up those of all ranks."""
    return [(engine, "_get_all_ckpt_names", states), (engine, "_get_all_zero_checkpoint_names", partitions)]


@uses("the engine", "_get_ckpt_name", "_get_mp_rank_zero_checkpoint_names", "loaded_checkpoint_dp_world_size")
@uses("the engine", "_get_all_zero_checkpoint_names")
def with_listed_files(engine: Any, states: Iterable[str], partitions: Iterable[str]) -> Attributes:
    """The same by the names of all files. Requests to the file system grow with the square of the ranks otherwise."""
    ask = engine._get_all_zero_checkpoint_names

    def states_files(root: str, tag: str) -> list[str]:
        pattern = Path(engine._get_ckpt_name(root, tag, mp_placeholder="*"))
        return [str(pattern.with_name(name)) for name in sorted(fnmatch.filter(states, pattern.name))]

    def partition_files(root: str, tag: str, bf16_mode: bool) -> list[str]:
        ranks = engine.loaded_checkpoint_dp_world_size
        names: list[str] = engine._get_mp_rank_zero_checkpoint_names(root, tag, 0, ranks, bf16_mode)
        is_known = {Path(name).name for name in names} <= {*partitions}
        return names if is_known else ask(root, tag, bf16_mode)

    return with_files(engine, states_files, partition_files)


@uses("the engine", "_get_param_shape_func", "_get_param_fragment_func")
def fragments_of(engine: Any, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shape of each parameter, and this rank's fragment of it, as DeepSpeed saves those of frozen parameters."""
    shape, fragment = engine._get_param_shape_func, engine._get_param_fragment_func
    return (
        {name: shape(parameter) for name, parameter in parameters.items()},
        {name: fragment(parameter) for name, parameter in parameters.items()},
    )


@uses("the engine", "checkpoint_engine")
@uses("the checkpoint engine", "save", "load", "makedirs?")
def checkpoint_engine(engine: Any) -> Any:
    """What reads and writes the engine's files; None without an optimizer, where DeepSpeed creates it later."""
    return getattr(engine, "checkpoint_engine", None)


@uses("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine")
@uses("the engine", "checkpoint_engine")
@uses("the checkpoint engine", "load")
def with_reader(engine: Any, load: Callable[..., Any]) -> Attributes:
    """Lets `load` read the engine's files; it gets what reads them otherwise, and that one's arguments."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    reader = checkpoint_engine(engine) or TorchCheckpointEngine()
    return [(engine, "checkpoint_engine", reader), (reader, "load", partial(load, reader.load))]


@uses("the engine", "_load_zero_checkpoint")
def with_load_of_partitions(engine: Any, load: Callable[..., bool]) -> Attributes:
    """Lets `load` restore the optimizer instead of what loads the partitions of ZeRO's."""
    return [(engine, "_load_zero_checkpoint", load)]


@uses("deepspeed.runtime.state_dict_factory", "SDLoaderFactory")
def remember_module(receive: Callable[[Mapping[str, Any]], None]) -> Attributes:
    """Gives `receive` the module's state as it is on disk, before DeepSpeed replaces it by whole fp32 parameters."""
    from deepspeed.runtime.state_dict_factory import SDLoaderFactory

    make_loader = SDLoaderFactory.get_sd_loader

    def loader(*args: Any, **kwargs: Any) -> Any:
        sd_loader = make_loader(*args, **kwargs)
        read = sd_loader.load

        def remember(*args: Any, **kwargs: Any) -> Any:
            path, state, *rest = read(*args, **kwargs)
            receive(state["module"] if isinstance(state, Mapping) else {})
            return path, state, *rest

        sd_loader.load = remember
        return sd_loader

    return [(SDLoaderFactory, "get_sd_loader", staticmethod(loader))]


@uses("the checkpoint engine", "is_decoupled?", "enable_nebula_load?")
@uses("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine")
def writes_before_it_returns(engine: Any) -> bool:
    """Whether DeepSpeed has written all files when its save returns; asynchronous checkpoint engines have not."""
    writer = checkpoint_engine(engine)
    if hasattr(writer, "is_decoupled"):  # since DeepSpeed 0.17.1; Nebula, which is asynchronous, does not override it
        return not writer.is_decoupled() and not hasattr(writer, "enable_nebula_load")
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    return isinstance(writer, TorchCheckpointEngine)


@uses("the engine", "_copy_recovery_script?")
def with_script_copier(engine: Any, copier: Callable[[Callable[[str], None]], Callable[..., Any]]) -> Attributes:
    """Replaces what copies DeepSpeed's converter into a folder, if the engine does so."""
    name = "_copy_recovery_script"
    return [(engine, name, copier(getattr(engine, name)))] if hasattr(engine, name) else []


@uses("the engine", "_checkpoint_tag_validation")
@uses(_ENGINE, "dist")
def without_agreement(engine: Any) -> Attributes:
    """Skips DeepSpeed's validation of the tag and the barriers of a save in this thread."""
    module, thread = importlib.import_module(_ENGINE), threading.get_ident()
    dist = module.dist

    def barrier(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            dist.barrier(*args, **kwargs)

    return [
        (engine, "_checkpoint_tag_validation", lambda _: None),
        (module, "dist", SimpleNamespace(**{**vars(dist), "barrier": barrier})),
    ]


@uses(_MERGE, "get_fp32_state_dict_from_zero_checkpoint")
def merged(folder: str, tag: str | None) -> dict[str, Any]:
    """The trained parameters of a checkpoint, from the optimizer's partitions."""
    from deepspeed.utils import zero_to_fp32

    return dict(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag))


@uses(_MERGE, "get_fp32_state_dict_from_zero_checkpoint")
@uses(_ENGINE, "get_fp32_state_dict_from_zero_checkpoint?")
def with_merge(merge: Callable[..., Any]) -> Attributes:
    """Lets `merge` return the whole weights of a checkpoint, where DeepSpeed merges the optimizer's partitions."""
    name, modules = "get_fp32_state_dict_from_zero_checkpoint", map(importlib.import_module, (_ENGINE, _MERGE))
    return [(module, name, merge) for module in modules if hasattr(module, name)]

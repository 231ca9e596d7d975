"""What an engine is: how its model is divided among the ranks, and whether its checkpoints can be trainable-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..fingerprint import Shard
from ..ranks import digest, gather_numbers, world_size

_STATES = ("module_state_dict", "load_module_state_dict")


@dataclass(frozen=True)
class Topology:
    """The kind of an engine, which does not change after its set-up.

    Attributes:
        stage: of ZeRO, 0 to 3.
        ranks: that share the optimizer's state: the world size that DeepSpeed writes into a checkpoint and compares at
            a load. It is that of data and sequence parallelism together.
        is_divided: whether ranks have different values under one name, as with tensor parallelism and with experts of
            `deepspeed.moe`. Its checkpoints have files that neither the record nor the tools know.
        unserved: why its checkpoints are saved whole and loaded as without `patch()`; empty if they are not.
    """

    stage: int
    ranks: int
    is_divided: bool = False
    unserved: str = ""


def topology_of(engine: Any) -> Topology:
    """What an engine is; every rank must call it."""
    stage = int(engine.zero_optimization_stage())
    ranks = ranks_of(engine)
    tensor_parallel = int(getattr(engine, "mp_world_size", None) or 1)
    has_experts = bool(getattr(engine, "has_moe_layers", False))
    unserved = _why_unserved(engine, stage, tensor_parallel, has_experts)
    return Topology(stage, ranks, tensor_parallel > 1 or has_experts, unserved)


def ranks_of(engine: Any) -> int:
    """See `Topology.ranks`; DeepSpeed has no `dp_world_size` with some kinds of sequence parallelism."""
    return int(getattr(engine, "seq_dp_world_size", None) or engine.dp_world_size)


def has_all_ranks(engine: Any) -> bool:
    """Whether all ranks of the process group have this engine, and none of them is a stage of a pipeline."""
    return ranks_of(engine) * int(getattr(engine, "mp_world_size", None) or 1) == world_size()


def _why_unserved(engine: Any, stage: int, tensor_parallel: int, has_experts: bool) -> str:
    from deepspeed.runtime.engine import DeepSpeedEngine

    classes = type(engine).__mro__
    derived = classes[: classes.index(DeepSpeedEngine)] if DeepSpeedEngine in classes else ()
    modules = list(engine.module.modules())
    zero = getattr(engine._config, "zero_config", None)
    if "PipelineEngine" in (cls.__name__ for cls in derived):
        return "pipeline parallelism"
    if not has_all_ranks(engine):
        return "an engine that only some ranks of the process group have"
    if replaced := next((name for name in _STATES if any(name in vars(cls) for cls in derived)), None):
        return f"an engine with a {replaced} of its own ({type(engine).__name__})"
    if (getattr(zero, "mics_shard_size", None) or 0) > 0:
        return "MiCS (zero_optimization.mics_shard_size)"
    if any(type(inner).__name__ == "AutoEPMoELayer" for inner in modules):
        return "AutoEP (expert_parallel)"
    if any(type(inner).__name__ == "LoRAOptimizedLinear" and inner.zero_shards > 1 for inner in modules):
        return "deepspeed.linear with base_weight_sharding"
    if tensor_parallel > 1 and has_experts:
        return "tensor parallelism together with experts of deepspeed.moe"
    if tensor_parallel > 1 and stage == 3:
        return "tensor parallelism in ZeRO stage 3"
    if tensor_parallel > 1 and _differs_among_ranks(engine):
        return "tensor parallelism whose shards differ in size"
    return ""


def _differs_among_ranks(engine: Any) -> bool:
    sizes = [(name, tuple(parameter.shape)) for name, parameter in engine.module.named_parameters()]
    return len({tuple(numbers) for numbers in gather_numbers([digest(sizes)], engine.device)}) > 1


def is_expert(parameter: Any) -> bool:
    """Whether it belongs to an expert of `deepspeed.moe`: other ranks may have other experts under its name."""
    return not getattr(parameter, "allreduce", True) and hasattr(parameter, "group_name")


def is_divided(engine: Any, tensor: Any) -> bool:
    """Whether ranks have different values of a tensor, that ZeRO-3 has not partitioned."""
    return is_expert(tensor) or (getattr(engine, "mp_world_size", None) or 1) > 1


def shard_of(engine: Any, tensor: Any) -> Shard | None:
    """Which shard of a parameter this rank has; None if all ranks have the same one, or a partition of ZeRO-3."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    if not is_divided(engine, tensor):
        return None
    if not is_expert(tensor):
        copies = engine.seq_data_parallel_group
        index, count = engine.mpu.get_model_parallel_rank(), engine.mp_world_size
        return Shard(index, count, dist.get_rank(copies), dist.get_world_size(copies))
    name = vars(tensor)["group_name"]
    return Shard(
        groups._get_expert_parallel_rank(name),
        groups._get_expert_parallel_world_size(name),
        groups._get_expert_data_parallel_rank(name),
        groups._get_expert_data_parallel_world_size(name),
    )

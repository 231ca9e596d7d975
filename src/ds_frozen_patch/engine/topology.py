"""What an engine is: how its model is divided among the ranks, and whether its checkpoints can be trainable-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import internals
from ..fingerprint import Shard
from ..internals import has_experts, is_expert, missing, optimizer_ranks, tensor_parallel_ranks, uses_mics
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
    ranks = optimizer_ranks(engine)
    tensor_parallel, with_experts = tensor_parallel_ranks(engine), has_experts(engine)
    unserved = missing(engine) or _why_unserved(engine, stage, tensor_parallel, with_experts)
    return Topology(stage, ranks, tensor_parallel > 1 or with_experts, unserved)


def has_all_ranks(engine: Any) -> bool:
    """Whether all ranks of the process group have this engine, and none of them is a stage of a pipeline."""
    ranks = optimizer_ranks(engine) * tensor_parallel_ranks(engine)
    return ranks in (0, world_size())  # 0 if it is unknown, see `internals.missing`


def _why_unserved(engine: Any, stage: int, tensor_parallel: int, with_experts: bool) -> str:
    from deepspeed.runtime.engine import DeepSpeedEngine

    classes = type(engine).__mro__
    derived = classes[: classes.index(DeepSpeedEngine)] if DeepSpeedEngine in classes else ()
    modules = list(engine.module.modules())
    if "PipelineEngine" in (cls.__name__ for cls in derived):
        return "pipeline parallelism"
    if not has_all_ranks(engine):
        return "an engine that only some ranks of the process group have"
    if replaced := next((name for name in _STATES if any(name in vars(cls) for cls in derived)), None):
        return f"an engine with a {replaced} of its own ({type(engine).__name__})"
    if uses_mics(engine):
        return "MiCS (zero_optimization.mics_shard_size)"
    if any(type(inner).__name__ == "AutoEPMoELayer" for inner in modules):
        return "AutoEP (expert_parallel)"
    if any(type(inner).__name__ == "LoRAOptimizedLinear" and inner.zero_shards > 1 for inner in modules):
        return "deepspeed.linear with base_weight_sharding"
    if tensor_parallel > 1 and with_experts:
        return "tensor parallelism together with experts of deepspeed.moe"
    if tensor_parallel > 1 and stage == 3:
        return "tensor parallelism in ZeRO stage 3"
    if tensor_parallel > 1 and _differs_among_ranks(engine):
        return "tensor parallelism whose shards differ in size"
    return ""


def _differs_among_ranks(engine: Any) -> bool:
    sizes = [(name, tuple(parameter.shape)) for name, parameter in engine.module.named_parameters()]
    return len({tuple(numbers) for numbers in gather_numbers([digest(sizes)], engine.device)}) > 1


def is_divided(engine: Any, tensor: Any) -> bool:
    """Whether ranks have different values of a tensor, that ZeRO-3 has not partitioned."""
    return is_expert(tensor) or tensor_parallel_ranks(engine) > 1


def shard_of(engine: Any, tensor: Any) -> Shard | None:
    """Which shard of a parameter this rank has; None if all ranks have the same one, or a partition of ZeRO-3."""
    if not is_divided(engine, tensor):
        return None
    return Shard(*internals.shard_of(engine, tensor))

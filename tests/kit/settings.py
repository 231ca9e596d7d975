"""The DeepSpeed settings that the promises are tested with, each with its ZeRO stages.

`tests/contract/test_settings.py` runs them; the table in `docs/reference/compatibility.md` shows the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import deepspeed
import torch

from kit import runs
from kit.cell import CELL

ALL, ZERO, GRADIENTS, PARAMETERS = (0, 1, 2, 3), (1, 2, 3), (1, 2), (3,)


@dataclass(frozen=True)
class Setting:
    """What a user sets: keys of the section `zero_optimization`, of the whole `config`, or `options` of the Trainer.

    `shows` checks the effect of the setting on an engine, beyond the keys in its configuration. `inexact` says why a
    resume cannot equal the uninterrupted run bit for bit, whatever was saved. `unlike` says what differs from the model
    in memory, whatever was saved: "tested" or "consolidated", and why. With `alone` it needs processes of its own.
    """

    name: str
    stages: tuple[int, ...]
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[[], Any] = runs.LoraRun
    options: Mapping[str, Any] = field(default_factory=dict)
    shows: Callable[[Any], bool] = lambda engine: True
    inexact: str = ""
    unlike: tuple[str, str] = ("", "")
    alone: bool = False

    def config_for(self, stage: int) -> dict[str, Any]:
        """Return the configuration for DeepSpeed."""
        return deepcopy({**runs.config(stage, **self.zero), **self.config})

    def is_set(self, engine: Any) -> bool:
        """Whether the setting has taken effect in the engine."""
        has = engine._config.zero_config.model_dump(by_alias=True)
        return all(_agrees(has[key], value) for key, value in self.zero.items()) and self.shows(engine)

    @property
    def has_cpu_adam(self) -> bool:
        """Whether DeepSpeed's own Adam for the CPU takes the steps.

        It multiplies its bias corrections from step to step, and after a load takes their power: some CPUs round these
        differently, so that a resume is exact on one machine and not on another.
        """
        return self.module is OnCpu or self.config.get("optimizer") == ADAMW

    @property
    def uses_nvme(self) -> bool:
        """Whether something is stored on NVMe, which needs DeepSpeed's op async_io."""
        return "nvme" in str(self.zero)


@dataclass(frozen=True)
class Cannot:
    """DeepSpeed's error for a setting, in these stages and cells of the matrix, with and without us.

    With `ours` it is our error, where DeepSpeed alone would hang or lose something.
    """

    name: str
    stages: tuple[int, ...]
    says: str
    cells: tuple[str, ...] = ("everyday", "newest")
    ours: bool = False


def _agrees(has: Any, value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_agrees(has[key], value[key]) for key in value)
    return bool(has == value) or str(has) == value  # a path


def trainable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class InConfig(runs.LoraRun):
    """Leaves the optimizer to DeepSpeed's configuration."""

    def configure_optimizers(self) -> None:
        return None


class Groups(runs.LoraRun):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": trainable(self)[:3]},
            {"params": trainable(self)[3:], "lr": 1e-3, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class Momentum(runs.LoraRun):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(trainable(self), lr=1e-2, momentum=0.9)


class OnCpu(runs.LoraRun):
    """DeepSpeed's own Adam for offloaded masters, with a scheduler."""

    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(trainable(self), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recomputed(runs.LoraRun):
    """Recomputes activations, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable({"use_reentrant": True})
        self.model.train()


class RecomputedByDeepSpeed(Recomputed):
    """Recomputes them by DeepSpeed's own function, which `activation_checkpointing` configures."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint


class ByMpi(runs.LoraRun):
    """Has the variables of MPI that `checkpoint.writer` needs."""

    def __init__(self) -> None:
        super().__init__()
        os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")


class ShorterFirst(runs.LoraRun):
    """Takes the sequence length that DeepSpeed's curriculum passes."""

    def forward(self, tokens: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:
        return super().forward(tokens[:, :curriculum_seqlen])

    def training_step(self, batch: torch.Tensor, index: int, curriculum_seqlen: int | None = None) -> torch.Tensor:
        return super().training_step(batch[:, :curriculum_seqlen], index)


class Compressed(runs.LoraRun):
    """Quantizes frozen weights in each forward pass, as `compression_training` configures it."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.compression.compress import init_compression

        init_compression(self.model, COMPRESSION)
        for name, parameter in self.named_parameters():  # it makes new ones, which are trainable
            parameter.requires_grad_("lora_" in name)


def by_cpu_adam(engine: Any) -> bool:
    return type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"


MUON = {"type": "Muon", "params": {"lr": 1e-2, "momentum": 0.9}}
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 8,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
}
COMPRESSION: dict[str, Any] = {
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {
                "enabled": True,
                "quantizer_kernel": False,
                "schedule_offset": 0,
                "quantize_groups": 1,
                "quantize_verbose": False,
                "quantization_type": "symmetric",
                "rounding": "nearest",
                "quantize_weight_in_forward": True,
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
            },
            "different_groups": {
                "all": {
                    "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                    "modules": ["gate_proj"],
                }
            },
        }
    }
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
BY_ADAMW = {"optimizer": ADAMW}
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 100}}
CPU = {"device": "cpu"}
OFFLOADED = {"offload_optimizer": CPU}
# Each cell has its own folder: CI runs two cells at a time.
NVME = {"device": "nvme", "nvme_path": str(Path(gettempdir(), f"nvme-{CELL.name}")), "pin_memory": True}
NVME_PARAMETERS = {**NVME, "buffer_size": 10_000_000}
ON_NVME: dict[str, Any] = {"module": OnCpu, "alone": True}
ON_NVME["inexact"] = "DeepSpeed restores neither the step count nor small sub-groups; `patch()` warns"

SETTINGS = [
    Setting("fp32", ALL, options={"precision": "32-true"}),
    Setting("bf16-mixed", ALL, options={"precision": "bf16-mixed"}),
    Setting("bf16-true", ALL, options={"precision": "bf16-true"}),
    Setting("16-mixed", ALL, options={"precision": "16-mixed"}),
    Setting(
        "bf16-mixed, `data_types.grad_accum_dtype`: fp32", ZERO, config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    # who trains, and how
    Setting("several parameter groups", ALL, module=Groups),
    Setting("SGD with momentum", ALL, module=Momentum),
    Setting("DeepSpeedCPUAdam and a scheduler", ALL, module=OnCpu, shows=by_cpu_adam),
    Setting(
        "`optimizer`: AdamW",
        ALL,
        config=BY_ADAMW,
        module=InConfig,
        shows=lambda engine: type(engine.basic_optimizer).__name__ == "FusedAdam",
    ),
    Setting(
        "`optimizer`: torch's AdamW, and `scheduler`",
        ALL,
        config={"optimizer": TORCH_ADAMW, "scheduler": WARMUP},
        module=InConfig,
        shows=lambda engine: engine.get_lr()[0] < 1e-2,
    ),
    Setting("`optimizer` with `offload_optimizer`", ZERO, OFFLOADED, BY_ADAMW, InConfig, shows=by_cpu_adam),
    Setting("`optimizer`: Muon", ZERO, {"reduce_scatter": False}, {"optimizer": MUON}, module=InConfig),
    Setting("accumulate_grad_batches=2", ALL, options={"accumulate_grad_batches": 2}),
    Setting("gradient_clip_val=0.1", ALL, options={"gradient_clip_val": 0.1}),
    Setting("gradient checkpointing of transformers", ALL, module=Recomputed),
    Setting(
        "`activation_checkpointing`",
        ALL,
        config={"activation_checkpointing": {"synchronize_checkpoint_boundary": True}},
        module=RecomputedByDeepSpeed,
    ),
    # where things are kept
    Setting("`offload_optimizer`: cpu", ZERO, OFFLOADED),
    Setting(
        "`offload_optimizer`: cpu, with DeepSpeedCPUAdam",
        ZERO,
        {"offload_optimizer": {**CPU, "pin_memory": True}},
        {"zero_force_ds_cpu_optimizer": True},
        module=OnCpu,
    ),
    Setting(
        "`offload_optimizer`: cpu, `ratio`: 0.5",
        PARAMETERS,
        {"offload_optimizer": {**CPU, "ratio": 0.5}, "sub_group_size": 300},
        module=OnCpu,
    ),
    Setting("`offload_param`: cpu", PARAMETERS, {"offload_param": CPU}),
    Setting(
        "`offload_param` and `offload_optimizer`: cpu", PARAMETERS, {"offload_param": CPU, "offload_optimizer": CPU}
    ),
    Setting("`offload_param`: nvme", PARAMETERS, {"offload_param": NVME_PARAMETERS}, alone=True),
    Setting("`offload_optimizer`: nvme", PARAMETERS, {"offload_optimizer": NVME}, **ON_NVME),
    Setting(
        "`offload_param` and `offload_optimizer`: nvme",
        PARAMETERS,
        {"offload_param": NVME_PARAMETERS, "offload_optimizer": NVME},
        **ON_NVME,
    ),
    Setting(
        "`zenflow`",
        ZERO,
        {
            "offload_optimizer": CPU,
            "zenflow": {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 2, "update_interval": 2},
        },
        BY_ADAMW,
        module=InConfig,
        unlike=("consolidated", "the fp32 master weights, which `consolidate` takes, are not those of the model"),
    ),
    Setting(
        "`super_offload`", PARAMETERS, {"offload_optimizer": {**CPU, "super_offload": True}}, BY_ADAMW, module=InConfig
    ),
    # how gradients are reduced
    Setting("`round_robin_gradients`", GRADIENTS, {"round_robin_gradients": True}),
    Setting(
        "`round_robin_gradients`, several parameter groups", GRADIENTS, {"round_robin_gradients": True}, module=Groups
    ),
    Setting("`contiguous_gradients`: false", ZERO, {"contiguous_gradients": False}),
    Setting("`overlap_comm`", ZERO, {"overlap_comm": True}),
    Setting("`reduce_scatter`: false", ZERO, {"reduce_scatter": False}),
    Setting("`allgather_partitions`: false", ZERO, {"allgather_partitions": False}),
    Setting("`use_multi_rank_bucket_allreduce`: false", ZERO, {"use_multi_rank_bucket_allreduce": False}),
    Setting("small buckets", ZERO, {"reduce_bucket_size": 500, "allgather_bucket_size": 500}),
    Setting("`ignore_unused_parameters`: false", GRADIENTS, {"ignore_unused_parameters": False}),
    # how parameters are partitioned
    Setting("`stage3_param_persistence_threshold`: 0", PARAMETERS, {"stage3_param_persistence_threshold": 0}),
    Setting("`stage3_param_persistence_threshold`: 1e9", PARAMETERS, {"stage3_param_persistence_threshold": 10**9}),
    Setting(
        "`stage3_model_persistence_threshold`: 100",
        PARAMETERS,
        {"stage3_model_persistence_threshold": 100, "stage3_param_persistence_threshold": 10**9},
    ),
    Setting(
        "`sub_group_size`: several sub-groups",
        PARAMETERS,
        {"sub_group_size": 300},
        shows=lambda engine: len(engine.optimizer.fp16_groups) > 1,
    ),
    Setting(
        "`sub_group_size`: several sub-groups, several parameter groups",
        PARAMETERS,
        {"sub_group_size": 100},
        module=Groups,
        shows=lambda engine: len(engine.optimizer.fp16_groups) > 2,
    ),
    Setting(
        "`stage3_max_live_parameters`, `..._max_reuse_distance`, `..._prefetch_bucket_size`: small",
        PARAMETERS,
        {"stage3_max_live_parameters": 100, "stage3_max_reuse_distance": 100, "stage3_prefetch_bucket_size": 0},
    ),
    Setting("`stage3_module_granularity_threshold`", PARAMETERS, {"stage3_module_granularity_threshold": 10**6}),
    Setting("`stage3_use_all_reduce_for_fetch_params`", PARAMETERS, {"stage3_use_all_reduce_for_fetch_params": True}),
    Setting("`memory_efficient_linear`: false", PARAMETERS, {"memory_efficient_linear": False}),
    Setting("`override_module_apply`: false", PARAMETERS, {"override_module_apply": False}),
    Setting(
        "`zero_hpz_partition_size`: 2",
        PARAMETERS,
        {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0},
        shows=lambda engine: any(p.ds_secondary_tensor is not None for p in engine.module.parameters()),
        alone=True,
    ),
    Setting("`zero_quantized_weights`", PARAMETERS, {"zero_quantized_weights": True}),
    Setting("`zero_quantized_nontrainable_weights`", PARAMETERS, {"zero_quantized_nontrainable_weights": True}),
    Setting("`zero_quantized_gradients`", PARAMETERS, {"zero_quantized_gradients": True}),
    Setting("`mics_shard_size`: 1", PARAMETERS, {"mics_shard_size": 1}),
    # what is computed
    Setting("`curriculum_learning`", ALL, config={"curriculum_learning": CURRICULUM}, module=ShorterFirst),
    Setting(
        "`compression_training`",
        ALL,
        config=COMPRESSION,
        module=Compressed,
        inexact="DeepSpeed compresses from the second step of a process on",
        unlike=("tested", ""),
    ),
    # what is saved and loaded
    Setting("`checkpoint.writer`: python", ALL, {}, {"checkpoint": {"writer": {"type": "python"}}}, ByMpi, alone=True),
    Setting(
        "`stage3_gather_16bit_weights_on_model_save`", PARAMETERS, {"stage3_gather_16bit_weights_on_model_save": True}
    ),
    Setting(
        "`load_from_fp32_weights`: false, fp32",
        ZERO,
        {"load_from_fp32_weights": False},
        options={"precision": "32-true"},
    ),
    Setting(
        "`load_from_fp32_weights`: false, bf16",
        GRADIENTS,
        {"load_from_fp32_weights": False},
        inexact="the fp32 master weights are rebuilt from the 16-bit weights, as the setting requests",
    ),
    Setting("`elastic_checkpoint`", ZERO, {"elastic_checkpoint": True}),
    Setting("`elastic_checkpoint`, `optimizer`: AdamW", ZERO, {"elastic_checkpoint": True}, BY_ADAMW, InConfig),
    Setting("`elastic_checkpoint`, with DeepSpeedCPUAdam", ZERO, {"elastic_checkpoint": True}, module=OnCpu),
]

NOT_TO_NVME = "cannot save an optimizer on NVMe with more than one rank"
WITH_ELASTIC = "with zero_optimization.elastic_checkpoint"
NOT_ON_CPU = "This op had not been implemented on CPU backend"
NOT_FROM_FILE = "Weights only load failed"
CANNOT = [
    Cannot("`optimizer`: Muon", PARAMETERS, "Muon optimizer is not yet compatible with ZeRO Stage 3", ("everyday",)),
    Cannot("`zenflow`", PARAMETERS, "has no attribute '_sync_selective_optimizer_lr'", ("everyday",)),
    Cannot("`zenflow`", PARAMETERS, "mat1 and mat2 shapes cannot be multiplied", ("newest",)),
    Cannot("`super_offload`", PARAMETERS, "Extra inputs are not permitted", ("everyday",)),
    Cannot("`super_offload`", PARAMETERS, "SuperOffload only supports NVIDIA CUDA GPUs", ("newest",)),
    Cannot("`curriculum_learning`", ALL, "Legacy top-level 'curriculum_learning' has been removed", ("newest",)),
    Cannot("`compression_training`", ALL, "No module named 'deepspeed.compression.compress'", ("newest",)),
    Cannot("`checkpoint.writer`: python", (0, 1, 2), "'UniversalParallelInfo' object has no attribute 'dp_rank'"),
    Cannot("`checkpoint.writer`: python", PARAMETERS, NOT_FROM_FILE),
    Cannot("`offload_optimizer`: nvme", PARAMETERS, NOT_TO_NVME, ("everyday",), ours=True),
    Cannot("`offload_param` and `offload_optimizer`: nvme", PARAMETERS, NOT_TO_NVME, ("everyday",), ours=True),
    Cannot("`stage3_module_granularity_threshold`", PARAMETERS, "Invalid device string", ("everyday",)),
    Cannot("`stage3_module_granularity_threshold`", PARAMETERS, "AssertionError", ("newest",)),
    Cannot("`zero_quantized_weights`", PARAMETERS, NOT_ON_CPU),
    Cannot("`zero_quantized_nontrainable_weights`", PARAMETERS, NOT_ON_CPU),
    Cannot("`mics_shard_size`: 1", PARAMETERS, "Backend gloo does not implement startCoalescing", ("everyday",)),
    Cannot("`mics_shard_size`: 1", PARAMETERS, "MiCS ZeRO-3 sharding has been removed", ("newest",)),
    Cannot("`elastic_checkpoint`", GRADIENTS, "slice() cannot be applied to a 0-dim tensor", ("everyday",)),
    Cannot("`elastic_checkpoint`", GRADIENTS, f"cannot resume AdamW {WITH_ELASTIC}", ("newest",), ours=True),
    Cannot(
        "`elastic_checkpoint`, with DeepSpeedCPUAdam",
        GRADIENTS,
        f"cannot resume DeepSpeedCPUAdam {WITH_ELASTIC}",
        ours=True,
    ),
]

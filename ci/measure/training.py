"""What the benchmark and the comparison train alike: small Llamas, on CPU ranks, with one DeepSpeed config."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WITHOUT_FROZEN = "`ignore_frozen_params=True`"


def settings(stage: int) -> dict[str, Any]:
    """Return the DeepSpeed config; ZeRO-3 partitions small parameters too, as it does those of large models."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 5_000_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def llama_config(hidden: int, intermediate: int, layers: int, vocabulary: int, tied: bool, kv_heads: int = 0) -> Any:
    """Return a Llama's config; without `kv_heads` there are as many as attention heads."""
    from transformers import LlamaConfig

    heads = hidden // 64
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads or heads, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip


def convert_to_universal(converter: Any, source: Path, target: Path) -> None:
    """Call DeepSpeed's module `ds_to_universal`, in one process, on a checkpoint's inner folder."""
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    places = {"input_folder": str(source), "output_folder": str(target)}
    converter.main(Namespace(**places, **workers, strict=True, inject_missing_state=True))


def is_cpu_rank() -> bool:
    """Whether DeepSpeed runs on the CPU in this process."""
    from deepspeed.accelerator import get_accelerator

    name: str = get_accelerator().device_name()
    return name == "cpu"


def on_cpu_ranks() -> None:
    """Let accelerate's next state in this process be of CPU ranks with DeepSpeed, unless that has a GPU here."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    # accelerate knows several CPU ranks, and DeepSpeed, but not both at once: it would take each rank for the only one.
    if is_cpu_rank():
        PartialState._prepare_backend = lambda state, *_: ("gloo", DistributedType.MULTI_CPU)
    # What one Trainer has set up would stay for the next one of this process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def hugging_face(model: Any, data: Any, out: str, config: dict[str, Any] | None, **options: Any) -> Any:
    """Return Hugging Face's Trainer, with a DeepSpeed config or on CPU ranks; `data` are rows of tokens."""
    from transformers import Trainer, TrainingArguments

    on_cpu_ranks()
    automatic = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    arguments = TrainingArguments(
        out, deepspeed={**automatic, **config} if config else None, optim="adamw_torch", logging_strategy="no",
        report_to=[], disable_tqdm=True, remove_unused_columns=False, use_cpu=not config, **options,
    )  # fmt: skip
    samples: Any = [{"input_ids": row, "labels": row} for row in data]
    return Trainer(model, arguments, train_dataset=samples, eval_dataset=samples)


def shard(model: Any, stage: int) -> Any:
    """Have FSDP2 shard a Llama of PEFT's over all ranks; between forward and backward too if the stage is 3."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (get_world_size(),))
    options: Any = {"mesh": mesh, "reshard_after_forward": stage == 3}
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded_state(model: Any, optimizer: Any, without_frozen: bool) -> dict[str, Any]:
    """Return what DCP saves of a model, and of an optimizer if there is one, and loads in place."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    options = StateDictOptions(ignore_frozen_params=without_frozen)
    if optimizer is None:
        return {"model": get_model_state_dict(model, options=options)}
    values, moments = get_state_dict(model, optimizer, options=options)
    return {"model": values, "optimizer": moments}


def take(model: Any, optimizer: Any, loaded: Mapping[str, Any], without_frozen: bool, strict: bool) -> None:
    """Give a model, and its optimizer if there is one, the state that DCP has loaded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    options = StateDictOptions(ignore_frozen_params=without_frozen, strict=strict)
    set_model_state_dict(model, loaded["model"], options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)

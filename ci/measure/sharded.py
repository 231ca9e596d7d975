"""The same fine-tunes by torch alone: FSDP2, and its distributed checkpoints (DCP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT_FROZEN = "`ignore_frozen_params=True`"
METADATA = ".metadata"  # which DCP writes last


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


def state(model: Any, optimizer: Any, without_frozen: bool) -> dict[str, Any]:
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

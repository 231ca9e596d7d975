"""Cures of DeepSpeed's faults, and what to say of its limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from .common.errors import CheckpointError
from .common.overrides import Attributes
from .internals import (
    has_plain_optimizer,
    inner_optimizer,
    optimizer_ranks,
    uses,
    with_load_of_partitions,
)
from .parameters import Contents, plain

USE_WEIGHTS_ONLY = (
    "Saving only the weights works: ModelCheckpoint(save_weights_only=True) or"
    " trainer.save_checkpoint(path, weights_only=True)."
)


@uses("deepspeed.runtime.engine", "get_fp32_state_dict_from_zero_checkpoint?")
def weights_of_the_tag(tag: Callable[[], Any]) -> Attributes:
    """Merges the partitions of the tag that `tag` returns."""
    from deepspeed.runtime import engine

    name = "get_fp32_state_dict_from_zero_checkpoint"
    merge = getattr(engine, name, None)
    if merge is None:
        return []

    def merge_tag(folder: str, requested: str | None = None, *args: Any, **kwargs: Any) -> Any:
        wanted = tag() if requested is None else requested
        return merge(folder, None if wanted is None else str(wanted), *args, **kwargs)

    return [(engine, name, merge_tag)]


@uses("DeepSpeed's optimizer", "_restore_from_bit16_weights?", "refresh_fp32_params?", "partition_all_parameters?")
@uses("DeepSpeed's optimizer", "checkpoint_event_prologue?", "checkpoint_event_epilogue?", "dp_process_group?")
@uses("DeepSpeed's optimizer", "_clear_fp32_optimizer_param_groups?")
@uses("the engine", "_optimizer_has_ckpt_event_prologue?", "data_parallel_group?")
def load_optimizer(engine: Any, state: Callable[[], Mapping[str, Any]]) -> Attributes:
    """Lets a load restore the optimizer as far as there is one, and master weights if there are any.

    Args:
        engine: that loads.
        state: returns the checkpoint's own state once it is read.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "_clear_fp32_optimizer_param_groups"):  # a load fails if Adagrad has filled them
        optimizer._clear_fp32_optimizer_param_groups()
    if optimizer is None or hasattr(optimizer, "_restore_from_bit16_weights"):
        return []
    restore = getattr(optimizer, "refresh_fp32_params", lambda: None)
    attributes: Attributes = [(optimizer, "_restore_from_bit16_weights", restore)]
    forgets = forgets_optimizer(engine)
    # `DeepSpeedZeRoOffload` lacks what a load calls where `load_module_state_dict` cannot gather, see `load.fitting`.
    is_lacking = engine.zero_optimization_partition_weights() and not hasattr(
        engine, "_optimizer_has_ckpt_event_prologue"
    )
    if is_lacking:
        attributes += [
            (optimizer, "checkpoint_event_prologue", optimizer.partition_all_parameters),
            (optimizer, "checkpoint_event_epilogue", lambda: None),
            (optimizer, "dp_process_group", engine.data_parallel_group),
        ]

    def load(load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        if forgets:
            optimizer.load_state_dict(state()["optimizer"], load_optimizer_states=load_optimizer_states)
        return True

    return attributes + (with_load_of_partitions(engine, load) if forgets or is_lacking else [])


def with_own_buffers(checkpoint: Mapping[str, Any], saved: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The checkpoint with everything but parameters as `remember_module` has received it."""
    shapes = [*(checkpoint.get("param_shapes") or []), checkpoint.get("frozen_param_shapes") or {}]
    parameters = {plain(name) for names in (*shapes, checkpoint.get("shared_params") or {}) for name in names}
    parameters |= Contents(module).parameters.keys()
    buffers = {name: value for name, value in saved.items() if plain(name) not in parameters}
    return {**checkpoint, "module": {**checkpoint["module"], **buffers}}


def read(by_deepspeed: Callable[..., Any], path: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What DeepSpeed reads from a file; it passes a function for the CPU, which torch refuses for tensor subclasses."""
    try:
        return by_deepspeed(path, map_location, *args, **kwargs)
    except RuntimeError as error:
        if not callable(map_location) or "map_location" not in str(error):
            raise
        return by_deepspeed(path, "cpu", *args, **kwargs)


@uses("the engine", "_load_universal_frozen_state?")
def loads_no_frozen_state(engine: Any) -> bool:
    """True if a load with `load_universal` loads neither buffers nor frozen parameters."""
    return not hasattr(engine, "_load_universal_frozen_state")


FORGETS_OPTIMIZER_ON_NVME = (
    "The optimizer is on NVMe: DeepSpeed restores neither its step count nor sub-groups that are too small to be kept"
    ' there, so the run does not continue exactly as before. With offload_optimizer: {"device": "cpu"} it would.'
)


@uses("the engine", "zero_nvme_offload_optimizer?")
@uses("DeepSpeed's optimizer", "optimizer_swapper?")
def keeps_optimizer_on_nvme(engine: Any) -> bool:
    """True if the engine keeps its optimizer's state on NVMe, in ZeRO-3."""
    asks = getattr(engine, "zero_nvme_offload_optimizer", None)  # since DeepSpeed 0.13
    return asks is not None and bool(asks()) and hasattr(engine.optimizer, "optimizer_swapper")


def _engine_source() -> str:
    """The text of DeepSpeed's `runtime/engine.py`, which shows what a release, or our patches, have fixed."""
    from deepspeed.runtime import engine

    return inspect.getsource(engine)


def forgets_optimizer_on_nvme(engine: Any) -> bool:
    """True if a load copies the optimizer's files back to NVMe, and skips what else there is of the optimizer."""
    fixed = "if not success and not self.zero_nvme_offload_optimizer():"  # by our patch
    return keeps_optimizer_on_nvme(engine) and fixed not in _engine_source()


def forgets_optimizer(engine: Any) -> bool:
    """True for a plain optimizer in bf16, which DeepSpeed takes for one of ZeRO's.

    It saves nothing of its state, and a load fails ("no attribute 'dp_process_group'"). Releases without the fault save
    it as "optimizer", and so do we.
    """
    return has_plain_optimizer(engine) and bool(engine.bfloat16_enabled())


def check_optimizer(engine: Any) -> None:
    """Check that a checkpoint of the engine's optimizer could be written, and resumed.

    With `elastic_checkpoint`, that needs a "step" in each group, as FusedAdam has it. And on NVMe, ranks must not write
    into one folder, where all but one fail.

    Raises:
        CheckpointError: on every rank, since otherwise one would raise and the others wait for it.
    """
    if engine.zero_elastic_checkpoint() and engine.zero_optimization_stage() in (1, 2):
        optimizer = None if has_plain_optimizer(engine) else inner_optimizer(engine)
        if engine.global_steps and any("step" not in group for group in getattr(optimizer, "param_groups", [])):
            raise CheckpointError(
                f"DeepSpeed cannot resume {type(optimizer).__name__} with zero_optimization.elastic_checkpoint, only"
                " optimizers that count the steps of each group, as its FusedAdam does. Set elastic_checkpoint to"
                " false."
            )
    if not keeps_optimizer_on_nvme(engine) or optimizer_ranks(engine) == 1:
        return
    if '"offloaded_tensors", rank_dir)' not in _engine_source():
        raise CheckpointError(
            "The installed DeepSpeed cannot save an optimizer on NVMe with more than one rank, since all write into one"
            f" folder. Install deepspeed>=0.18.0. {USE_WEIGHTS_ONLY}"
        )


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """True if the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: in stage 1 before 0.13.0.

    It is not the installed one, so its version is all there is.
    """
    try:
        return zero_stage == 1 and Version(version) < Version("0.13.0")
    except InvalidVersion:
        return False

"""Workarounds for faults of DeepSpeed, Lightning and Trainer, one function each, and nowhere else.

Each says what is broken, in which releases, and where it was mended upstream. It recognises the fault by a feature of
the installed release wherever there is one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .common.errors import CheckpointError
from .faults import worked_around

Attributes = list[tuple[Any, str, Any]]
"""Attributes to set for a while, as `common.overrides.overridden` takes them: object, name, value."""

USE_WEIGHTS_ONLY = (
    "Saving only the weights works: ModelCheckpoint(save_weights_only=True) or"
    " trainer.save_checkpoint(path, weights_only=True)."
)


# The optimizer


def has_plain_optimizer(engine: Any) -> bool:
    """Whether the engine has an optimizer that is not one of ZeRO's, with partitions of its own on disk.

    Stage 1 does not always have one of ZeRO's: see `forgets_optimizer`.
    """
    load = getattr(engine.optimizer, "load_state_dict", None)  # DeepSpeedZeRoOffload has none
    return load is not None and "state_dict_list" not in inspect.signature(load).parameters


def forgets_optimizer(engine: Any) -> bool:
    """bf16 with a plain optimizer (stage 0, or stage 1 with `grad_accum_dtype` fp32): its state is not saved.

    DeepSpeed up to 0.18.4 takes it for a ZeRO optimizer: it saves nothing of its state, in any checkpoint, and a load
    fails ("no attribute 'dp_process_group'"). 0.18.5 saves it as "optimizer", and so do we.
    """
    return has_plain_optimizer(engine) and bool(engine.bfloat16_enabled())


def load_plain_optimizer(engine: Any, state: Callable[[], Mapping[str, Any]]) -> Attributes:
    """For `forgets_optimizer`: replaces ZeRO's load. `state` returns the checkpoint's own state once it is read."""
    if not forgets_optimizer(engine):
        return []

    def load(load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        engine.optimizer.load_state_dict(state()["optimizer"], load_optimizer_states=load_optimizer_states)
        return True

    return [(engine, "_load_zero_checkpoint", load)]


def load_for_inference(engine: Any) -> Attributes:
    """ZeRO-3 without an optimizer (test, validate, predict) cannot load a checkpoint.

    `DeepSpeedZeRoOffload` has no `_restore_from_bit16_weights` from 0.14.5 to at least 0.19.8 (issue 7272). It has no
    master weights to restore either.
    """
    optimizer = engine.optimizer
    if optimizer is None or hasattr(optimizer, "_restore_from_bit16_weights"):
        return []
    restore = getattr(optimizer, "refresh_fp32_params", lambda: None)
    return [(optimizer, "_restore_from_bit16_weights", restore), *_load_for_inference_at_all(engine)]


def _load_for_inference_at_all(engine: Any) -> Attributes:
    """DeepSpeed 0.10.1 lacks more than that, see also `has_no_gathering_load`. Mended in 0.10.2."""
    optimizer = engine.optimizer
    if not engine.zero_optimization_partition_weights() or hasattr(engine, "_optimizer_has_ckpt_event_prologue"):
        return []
    return [
        (optimizer, "checkpoint_event_prologue", optimizer.partition_all_parameters),
        (optimizer, "checkpoint_event_epilogue", lambda: None),
        (optimizer, "dp_process_group", engine.data_parallel_group),
        (engine, "_load_zero_checkpoint", lambda *args, **kwargs: True),
    ]


def has_no_gathering_load(load_module_state_dict: inspect.Signature) -> bool:
    """Whether `load_module_state_dict` cannot gather ZeRO-3's parameters: DeepSpeed 0.10.1, mended in 0.10.2."""
    return "fetch_z3_params" not in load_module_state_dict.parameters


@contextmanager
def gathered_for_load(engine: Any) -> Iterator[None]:
    """For `has_no_gathering_load`: all parameters are whole while this lasts, and rank 0's values count."""
    from deepspeed import zero

    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        yield


def check_step_counts(engine: Any) -> None:
    """`elastic_checkpoint` in ZeRO 1 and 2 needs optimizers that keep a "step" in each group, as FusedAdam does.

    Every release saves without it, and then fails to load.

    Raises:
        CheckpointError: the checkpoint could not be resumed.
    """
    if not engine.zero_elastic_checkpoint() or engine.zero_optimization_stage() not in (1, 2):
        return
    optimizer = getattr(engine.optimizer, "optimizer", None)
    if engine.global_steps and any("step" not in group for group in getattr(optimizer, "param_groups", [])):
        raise CheckpointError(
            f"DeepSpeed cannot resume {type(optimizer).__name__} with zero_optimization.elastic_checkpoint, only"
            " optimizers that count the steps of each group, as its FusedAdam does. Set elastic_checkpoint to false."
        )


# NVMe


def keeps_optimizer_on_nvme(engine: Any) -> bool:
    """Whether the engine keeps its optimizer's state on NVMe, in ZeRO-3."""
    asks = getattr(engine, "zero_nvme_offload_optimizer", None)  # since DeepSpeed 0.13
    return asks is not None and bool(asks()) and hasattr(engine.optimizer, "optimizer_swapper")


def forgets_optimizer_on_nvme(engine: Any) -> bool:
    """Whether a load copies the optimizer's files back to NVMe, and skips what else there is of the optimizer.

    Every release, up to 0.19.8; only our patch of DeepSpeed mends it, inside methods, which show no feature.
    """
    return keeps_optimizer_on_nvme(engine) and "optimizer on NVMe" in worked_around("deepspeed", None)


def check_nvme(engine: Any) -> None:
    """Below DeepSpeed 0.18, all ranks write an optimizer on NVMe into one folder, and one of them fails.

    Raises:
        CheckpointError: on every rank, since otherwise one would raise and the others wait for it.
    """
    if not keeps_optimizer_on_nvme(engine) or engine.dp_world_size == 1:
        return
    import deepspeed

    if _is_older(deepspeed.__version__, "0.18.0"):  # mended inside a method, which shows no feature
        raise CheckpointError(
            f"DeepSpeed {deepspeed.__version__} cannot save an optimizer on NVMe with more than one rank, since all"
            f" write into one folder. Install deepspeed>=0.18.0. {USE_WEIGHTS_ONLY}"
        )


@contextmanager
def explaining_nvme_errors() -> Iterator[None]:
    """DeepSpeed below 0.13 raises NotImplementedError or AssertionError for what is on NVMe; say what works."""
    try:
        yield
    except (NotImplementedError, AssertionError) as error:
        if "NVMe" not in str(error):
            raise
        raise CheckpointError(f"{error}. {USE_WEIGHTS_ONLY}") from error


# Weights


def forget_second_copies(engine: Any) -> None:
    """hpZ's secondary copy within a node is stale after a load; without one, DeepSpeed makes a new one.

    Mended in 0.18.3, but not for frozen parameters that the checkpoint contains.
    """
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def read_tensor_subclasses(engine: Any) -> Attributes:
    """DeepSpeed passes a function as `map_location`, which torch refuses for files with tensor subclasses.

    The function maps all storages to the CPU. Every release.
    """
    reader = getattr(engine, "checkpoint_engine", None)  # DeepSpeed may create it later
    if reader is None:
        return []
    read = reader.load

    def load(path: str, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(path, map_location, *args, **kwargs)
        except RuntimeError as error:
            if not callable(map_location) or "map_location" not in str(error):
                raise
            return read(path, "cpu", *args, **kwargs)

    return [(reader, "load", load)]


def remember_module(receive: Callable[[Mapping[str, Any]], None]) -> Attributes:
    """In ZeRO-3 without an optimizer, DeepSpeed replaces the module's state by whole fp32 parameters.

    It takes buffers through fp32 too (integers as well, up to at least 0.17.6), which changes packed weights, and gives
    a buffer only one of its names. Every release since 0.10.2. `receive` gets the module's state as it is on disk.
    """
    from deepspeed.runtime.state_dict_factory import SDLoaderFactory

    make_loader = SDLoaderFactory.get_sd_loader

    def loader(*args: Any, **kwargs: Any) -> Any:
        made = make_loader(*args, **kwargs)
        read = made.load

        def remember(*args: Any, **kwargs: Any) -> Any:
            path, state, *rest = read(*args, **kwargs)
            receive(state["module"] if isinstance(state, Mapping) else {})
            return path, state, *rest

        made.load = remember
        return made

    return [(SDLoaderFactory, "get_sd_loader", staticmethod(loader))]


def weights_of_the_tag(tag: Callable[[], Any]) -> Attributes:
    """In ZeRO-3 without an optimizer, DeepSpeed loads the weights of the checkpoint that `latest` names.

    It does so whatever tag it is asked for. Every release since 0.10.2, to at least 0.19.8 (issue 8499).
    """
    from deepspeed.runtime import engine

    name = "get_fp32_state_dict_from_zero_checkpoint"
    merge = getattr(engine, name, None)
    if merge is None:
        return []

    def merge_tag(folder: str, own: str | None = None, *args: Any, **kwargs: Any) -> Any:
        wanted = tag() if own is None else own
        return merge(folder, None if wanted is None else str(wanted), *args, **kwargs)

    return [(engine, name, merge_tag)]


@contextmanager
def on_the_accelerator(parameter: Any) -> Iterator[None]:
    """Lightning moves a model to the CPU after a fit, where DeepSpeed's collectives over NCCL fail.

    DeepSpeed runs them on the device of the parameter, whose own content they do not use. Every release.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    if parameter.device.type == get_accelerator().device_name():
        yield
        return
    moved = parameter.data
    parameter.data = torch.empty_like(moved, device=get_accelerator().current_device_name())
    try:
        yield
    finally:
        parameter.data = moved


def config_by_content(engine: Any) -> Attributes:
    """DeepSpeed saves its configuration as the program passed it, which may be the path of a file. Every release."""
    return [] if isinstance(engine.config, Mapping) else [(engine, "config", engine._config._param_dict)]


def loads_no_frozen_state(engine: Any) -> bool:
    """With `load_universal`, DeepSpeed loads neither buffers nor frozen parameters. Every release, up to 0.19.8."""
    return not hasattr(engine, "_load_universal_frozen_state")


# Files: these are about the release that a tool runs, or that has saved a checkpoint, so its version is all there is


def converter_needed(version: str, zero_stage: int) -> str | None:
    """The first DeepSpeed whose universal converter supports a ZeRO stage, if `version` is older; else None."""
    since = {1: "0.11.2", 2: "0.11.2", 3: "0.14.5"}.get(zero_stage, "0")
    return since if _is_older(version, since) else None


def converter_reads_one_group(version: str, zero_stage: int) -> bool:
    """Whether DeepSpeed's universal converter ignores all but the first parameter group: ZeRO-3 before 0.18.0."""
    return zero_stage == 3 and _is_older(version, "0.18.0")


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """Whether the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: stage 1 before 0.13.0."""
    return zero_stage == 1 and _is_older(version, "0.13.0")


def _is_older(version: str, than: str) -> bool:
    """Whether a version, which may be unknown, is older than another."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


# Lightning


def moved_in_deepspeed() -> Attributes:
    """Fabric of Lightning 2.1 to 2.3 imports from `deepspeed.runtime` what has moved in DeepSpeed 0.14.1."""
    runtime, moved = (sys.modules.get(f"deepspeed.runtime{inner}") for inner in ("", ".base_optimizer"))
    if moved is None or hasattr(runtime, "DeepSpeedOptimizer"):
        return []
    return [(runtime, "DeepSpeedOptimizer", moved.DeepSpeedOptimizer)]


def unwrapped(item: Any) -> Any:
    """Fabric of Lightning 2.0 passes optimizers to the strategy in its own wrapper, and so restores none."""
    return item.optimizer if any(cls.__name__ == "_FabricOptimizer" for cls in type(item).__mro__) else item


def clips_unasked(engine: Any, config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed clips gradients though its configuration says nothing of that: from 0.19.3 on, to a norm of 1.

    Trainer sets `gradient_clipping` to what it was asked for, or to 0. Fabric leaves it to DeepSpeed, in every release.
    """
    return "gradient_clipping" not in config and bool(engine.optimizer) and engine.gradient_clipping() > 0


# Trainer


def saves_the_best(trainer: Any) -> bool:
    """Whether the checkpoint that Trainer saves is the best so far, which not every rank may see.

    Each rank looks for the folder, which rank 0 makes, and in transformers 4.50 does not wait for it: a rank that sees
    none goes back to another checkpoint with `load_best_model_at_end`, or fails. transformers 5 has a barrier there.
    """
    state, strategy = trainer.state, trainer.args.save_strategy
    return strategy in ("steps", "epoch") and getattr(state, "best_global_step", None) == state.global_step

"""Cures of DeepSpeed's faults, in the order of our patch series; limits of running engines follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from packaging.version import InvalidVersion, Version

from ..common.errors import CheckpointError
from ..common.overrides import Attributes
from ..parameters import Contents, plain

USE_WEIGHTS_ONLY = (
    "Saving only the weights works: ModelCheckpoint(save_weights_only=True) or"
    " trainer.save_checkpoint(path, weights_only=True)."
)


def has_plain_optimizer(engine: Any) -> bool:
    """True if the engine has an optimizer that is not one of ZeRO's, with partitions of its own on disk.

    Stage 1 does not always have one of ZeRO's: see `forgets_optimizer`.
    """
    load = getattr(engine.optimizer, "load_state_dict", None)  # DeepSpeedZeRoOffload has none
    return load is not None and "state_dict_list" not in inspect.signature(load).parameters


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


def load_for_inference(engine: Any) -> Attributes:
    """Gives `DeepSpeedZeRoOffload` the methods that a load calls; it has no master weights to restore."""
    optimizer = engine.optimizer
    if optimizer is None or hasattr(optimizer, "_restore_from_bit16_weights"):
        return []
    restore = getattr(optimizer, "refresh_fp32_params", lambda: None)
    attributes: Attributes = [(optimizer, "_restore_from_bit16_weights", restore)]
    if engine.zero_optimization_partition_weights() and not hasattr(engine, "_optimizer_has_ckpt_event_prologue"):
        attributes += [  # where `has_no_gathering_load`
            (optimizer, "checkpoint_event_prologue", optimizer.partition_all_parameters),
            (optimizer, "checkpoint_event_epilogue", lambda: None),
            (optimizer, "dp_process_group", engine.data_parallel_group),
            (engine, "_load_zero_checkpoint", lambda *args, **kwargs: True),
        ]
    return attributes


def has_no_gathering_load(load_module_state_dict: inspect.Signature) -> bool:
    """True if `load_module_state_dict` cannot gather ZeRO-3's parameters."""
    return "fetch_z3_params" not in load_module_state_dict.parameters


@contextmanager
def gathered_for_load(engine: Any) -> Iterator[None]:
    """For `has_no_gathering_load`: all parameters are whole while this lasts, and rank 0's values count."""
    from deepspeed import zero

    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        yield


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


def with_own_buffers(checkpoint: Mapping[str, Any], saved: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The checkpoint with everything but parameters as `remember_module` has received it."""
    shapes = [*(checkpoint.get("param_shapes") or []), checkpoint.get("frozen_param_shapes") or {}]
    parameters = {plain(name) for names in (*shapes, checkpoint.get("shared_params") or {}) for name in names}
    parameters |= Contents(module).parameters.keys()
    buffers = {name: value for name, value in saved.items() if plain(name) not in parameters}
    return {**checkpoint, "module": {**checkpoint["module"], **buffers}}


def read_tensor_subclasses(engine: Any) -> Attributes:
    """Reads to the CPU by name: DeepSpeed passes a function that does so, which torch refuses for such files."""
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


def forget_second_copies(engine: Any) -> None:
    """Remove hpZ's copies within a node; without one, DeepSpeed makes a new one."""
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


def loads_no_frozen_state(engine: Any) -> bool:
    """True if a load with `load_universal` loads neither buffers nor frozen parameters."""
    return not hasattr(engine, "_load_universal_frozen_state")


FORGETS_OPTIMIZER_ON_NVME = (
    "The optimizer is on NVMe: DeepSpeed restores neither its step count nor sub-groups that are too small to be kept"
    ' there, so the run does not continue exactly as before. With offload_optimizer: {"device": "cpu"} it would.'
)


def keeps_optimizer_on_nvme(engine: Any) -> bool:
    """True if the engine keeps its optimizer's state on NVMe, in ZeRO-3."""
    asks = getattr(engine, "zero_nvme_offload_optimizer", None)  # since DeepSpeed 0.13
    return asks is not None and bool(asks()) and hasattr(engine.optimizer, "optimizer_swapper")


def _engine_source() -> str:
    """The text of DeepSpeed's `runtime/engine.py`, which shows what a release, or our patches, have mended."""
    from deepspeed.runtime import engine

    return inspect.getsource(engine)


def forgets_optimizer_on_nvme(engine: Any) -> bool:
    """True if a load copies the optimizer's files back to NVMe, and skips what else there is of the optimizer."""
    mended = "if not success and not self.zero_nvme_offload_optimizer():"  # by our patch
    return keeps_optimizer_on_nvme(engine) and mended not in _engine_source()


def forgets_optimizer(engine: Any) -> bool:
    """True for a plain optimizer in bf16, which DeepSpeed takes for one of ZeRO's.

    It saves nothing of its state, and a load fails ("no attribute 'dp_process_group'"). Releases without the fault save
    it as "optimizer", and so do we.
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


def check_step_counts(engine: Any) -> None:
    """Check that the optimizer has a "step" in each group, as FusedAdam does, if `elastic_checkpoint` needs it.

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


def check_nvme(engine: Any) -> None:
    """Check that ranks do not write an optimizer on NVMe into one folder, where all but one fail.

    Raises:
        CheckpointError: on every rank, since otherwise one would raise and the others wait for it.
    """
    if engine.dp_world_size == 1 or not keeps_optimizer_on_nvme(engine):
        return
    if '"offloaded_tensors", rank_dir)' not in _engine_source():
        raise CheckpointError(
            "The installed DeepSpeed cannot save an optimizer on NVMe with more than one rank, since all write into one"
            f" folder. Install deepspeed>=0.18.0. {USE_WEIGHTS_ONLY}"
        )


def config_by_content(engine: Any) -> Attributes:
    """The configuration as DeepSpeed has read it, if the program has passed the path of a file."""
    return [] if isinstance(engine.config, Mapping) else [(engine, "config", engine._config._param_dict)]


# Limits: what DeepSpeed cannot do for a running engine


@contextmanager
def explaining_nvme_errors() -> Iterator[None]:
    """DeepSpeed below 0.13 raises NotImplementedError or AssertionError for what is on NVMe; say what works."""
    try:
        yield
    except (NotImplementedError, AssertionError) as error:
        if "NVMe" not in str(error):
            raise
        raise CheckpointError(f"{error}. {USE_WEIGHTS_ONLY}") from error


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """True if the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: in stage 1 before 0.13.0.

    It is not the installed one, so its version is all there is.
    """
    try:
        return zero_stage == 1 and Version(version) < Version("0.13.0")
    except InvalidVersion:
        return False

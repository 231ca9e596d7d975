"""Faults of DeepSpeed, in the order of our patch series; limits of running engines follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..common.errors import CheckpointError
from ..common.overrides import Attributes
from ..parameters import Contents, plain
from .fault import Fault

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


SHARED_FROZEN = Fault(
    "shared frozen parameters",
    "`exclude_frozen_parameters=True` keeps a tied parameter under its second name",
    "it is left out under all names",
    patch="0001-Exclude-shared-frozen-parameters-under-all-of-their-.patch",
    mark=("runtime/engine.py", "named_parameters(remove_duplicate=False):"),
)
ANOTHER_TAG = Fault(
    "weights of another tag",
    "ZeRO-3 without an optimizer loads the weights that `latest` names, whatever tag it is asked for",
    "the weights of the requested tag are loaded",
    since="0.10.2",
    thread="issues/8499",
    patch="0002-Load-the-module-of-the-requested-tag-in-ZeRO-3.patch",
    mark=("runtime/engine.py", "get_fp32_state_dict_from_zero_checkpoint(load_dir, str(tag))"),
)


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


WITHOUT_OPTIMIZER = Fault(
    "loads without an optimizer",
    "ZeRO-3 without an optimizer (test, validate, predict) cannot load a checkpoint",
    "it can",
    since="0.14.5",
    thread="issues/7272",
    patch="0003-Load-checkpoints-in-ZeRO-3-without-an-optimizer.patch",
    mark=("runtime/zero/parameter_offload.py", "_restore_from_bit16_weights"),
)


def load_for_inference(engine: Any) -> Attributes:
    """Gives `DeepSpeedZeRoOffload` the methods that a load calls; it has no master weights to restore."""
    optimizer = engine.optimizer
    if optimizer is None or hasattr(optimizer, "_restore_from_bit16_weights"):
        return []
    restore = getattr(optimizer, "refresh_fp32_params", lambda: None)
    attributes: Attributes = [(optimizer, "_restore_from_bit16_weights", restore)]
    if engine.zero_optimization_partition_weights() and not hasattr(engine, "_optimizer_has_ckpt_event_prologue"):
        attributes += [  # what `GATHERING` is about
            (optimizer, "checkpoint_event_prologue", optimizer.partition_all_parameters),
            (optimizer, "checkpoint_event_epilogue", lambda: None),
            (optimizer, "dp_process_group", engine.data_parallel_group),
            (engine, "_load_zero_checkpoint", lambda *args, **kwargs: True),
        ]
    return attributes


GATHERING = Fault("gathering loads", "ZeRO-3 without an optimizer cannot load a checkpoint", "it can", mended="0.10.2")


def has_no_gathering_load(load_module_state_dict: inspect.Signature) -> bool:
    """True if `load_module_state_dict` cannot gather ZeRO-3's parameters."""
    return "fetch_z3_params" not in load_module_state_dict.parameters


@contextmanager
def gathered_for_load(engine: Any) -> Iterator[None]:
    """For `has_no_gathering_load`: all parameters are whole while this lasts, and rank 0's values count."""
    from deepspeed import zero

    with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        yield


BUFFERS = Fault(
    "buffers through fp32",
    "ZeRO-3 without an optimizer loads buffers by way of fp32, integers too, which changes packed weights, and gives"
    " each only one of its names",
    "buffers are loaded as they were saved, under all names",
    since="0.10.2",
)


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


FROZEN_OF_ZERO_1 = Fault(
    "frozen parameters of ZeRO-1",
    "`zero_to_fp32` loses them",
    "`consolidate` and `export` have them",
    thread="issues/5439",
    patch="0004-Take-frozen-parameters-of-ZeRO-1-from-the-module-in-.patch",
    mark=("utils/zero_to_fp32.py", "if frozen_param_shapes is None:"),
)
TENSOR_SUBCLASSES = Fault(
    "tensor subclasses",
    "a checkpoint that contains them is saved, and cannot be loaded",
    "it is loaded on the CPU first",
    patch="0005-Load-checkpoints-that-contain-tensor-subclasses.patch",
    mark=("runtime/state_dict_factory.py", "map_location='cpu')"),
)


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


GROUP_SETTINGS = Fault(
    "settings of parameter groups",
    "universal checkpoints in ZeRO-3 give all groups the learning rate and weight decay of the first",
    "`patch(elastic=True)` and `reshard` keep those of each group, without a universal checkpoint",
    patch="0006-Restore-the-settings-of-each-parameter-group-from-un.patch",
    mark=("runtime/zero/stage3.py", "saved_param_groups"),
)
ROUND_ROBIN = Fault(
    "round_robin_gradients",
    "universal checkpoints mix the values of parameters up",
    "`patch(elastic=True)` and `reshard` have the right order, without a universal checkpoint",
    patch="0007-Link-parameters-to-their-places-under-round_robin_gr.patch",
    mark=("runtime/zero/stage_1_and_2.py", "lp_param_list=self.round_robin_bit16_groups[i]"),
)
SECOND_COPIES = Fault(
    "hpZ's second copies",
    "parameters keep their values from before the load, since 0.18.3 only frozen ones",
    "the copies are made anew after a load",
    thread="pull/7707",
    patch="0008-Drop-hpZ-s-secondary-partitions-of-frozen-parameters.patch",
    mark=("runtime/engine.py", "param.ds_secondary_tensor = None"),
)


def forget_second_copies(engine: Any) -> None:
    """Remove hpZ's copies within a node; without one, DeepSpeed makes a new one."""
    for parameter in engine.module.parameters():
        if getattr(parameter, "ds_secondary_tensor", None) is not None:
            parameter.ds_secondary_tensor = None


ANOTHER_LAYOUT = Fault(
    "another parameter layout",
    "ZeRO-3 loads any checkpoint of the same total size, into the wrong parameters",
    "a load compares names and shapes, and raises",
    patch="0009-Refuse-ZeRO-3-checkpoints-of-another-parameter-layou.patch",
    mark=("runtime/engine.py", "_check_zero3_param_shapes"),
)
UNIVERSAL_FROZEN = Fault(
    "frozen state of universal checkpoints",
    "a load with `load_universal` leaves buffers and frozen parameters as the program built them",
    "a warning says so; `patch(elastic=True)` and `reshard` load both, without a universal checkpoint",
    patch="0011-Load-buffers-and-frozen-parameters-from-universal-ch.patch",
    mark=("runtime/engine.py", "_load_universal_frozen_state"),
)


def loads_no_frozen_state(engine: Any) -> bool:
    """True if a load with `load_universal` loads neither buffers nor frozen parameters."""
    return not hasattr(engine, "_load_universal_frozen_state")


FP32_WITHOUT_HUB = Fault(
    "zero_to_fp32 without huggingface_hub",
    "`zero_to_fp32` raises ImportError, although it needs the library only to split models larger than 5 GB",
    "`consolidate` and `export` do not need it",
    since="0.15.3",
    patch="0012-Need-huggingface_hub-in-zero_to_fp32.py-only-to-spli.patch",
    mark=("utils/zero_to_fp32.py", "fits_into_one_shard"),
)
OPTIMIZER_ON_NVME = Fault(
    "optimizer on NVMe",
    "a load restores neither its step counts and settings, nor sub-groups that are too small for NVMe",
    "a warning says so",
    since="0.13.0",
    patch="0013-Restore-the-optimizer-from-checkpoints-with-NVMe-off.patch",
    mark=("runtime/engine.py", "if not success and not self.zero_nvme_offload_optimizer():"),
)
FORGETS_OPTIMIZER_ON_NVME = (
    "The optimizer is on NVMe: DeepSpeed restores neither its step count nor sub-groups that are too small to be kept"
    ' there, so the run does not continue exactly as before. With offload_optimizer: {"device": "cpu"} it would.'
)


def keeps_optimizer_on_nvme(engine: Any) -> bool:
    """True if the engine keeps its optimizer's state on NVMe, in ZeRO-3."""
    asks = getattr(engine, "zero_nvme_offload_optimizer", None)  # since DeepSpeed 0.13
    return asks is not None and bool(asks()) and hasattr(engine.optimizer, "optimizer_swapper")


def forgets_optimizer_on_nvme(engine: Any) -> bool:
    """True if a load copies the optimizer's files back to NVMe, and skips what else there is of the optimizer."""
    return keeps_optimizer_on_nvme(engine) and OPTIMIZER_ON_NVME.is_installed("deepspeed")


PLAIN_IN_BF16 = Fault(
    "plain optimizers in bf16",
    "in stage 0, and in stage 1 with `grad_accum_dtype` fp32, a checkpoint lacks the optimizer's state",
    "it is saved and loaded",
    mended="0.18.5",
)


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


STEP_COUNTS = Fault(
    "step counts of elastic_checkpoint",
    "with most optimizers a checkpoint of ZeRO 1 and 2 is saved, and cannot be loaded",
    "the save raises, and says what to set",
)


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


RANKS_ON_NVME = Fault(
    "several ranks on NVMe",
    "one rank fails in a save of an optimizer on NVMe, and the others wait for it",
    "every rank raises, and says what to do",
    mended="0.18.0",
    thread="issues/7549",
    mark=("runtime/engine.py", '"offloaded_tensors", rank_dir)'),
)


def check_nvme(engine: Any) -> None:
    """Check that ranks do not write an optimizer on NVMe into one folder, where all but one fail.

    Raises:
        CheckpointError: on every rank, since otherwise one would raise and the others wait for it.
    """
    if engine.dp_world_size == 1 or not keeps_optimizer_on_nvme(engine):
        return
    if RANKS_ON_NVME.is_installed("deepspeed"):
        raise CheckpointError(
            "The installed DeepSpeed cannot save an optimizer on NVMe with more than one rank, since all write into one"
            f" folder. Install deepspeed>={RANKS_ON_NVME.mended}. {USE_WEIGHTS_ONLY}"
        )


CONFIG_IN_A_FILE = Fault(
    "configuration in a file",
    "a checkpoint has the path of the configuration, not its content",
    "it has the content",
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

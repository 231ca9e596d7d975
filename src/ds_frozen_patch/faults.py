"""The faults of other projects that this package works around, and whether an installed release has them.

`cures` has most of the functions that do so. `status()` is made of this list, and so is a page of the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

from .common.probing import package_folder

_DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed"


@dataclass(frozen=True)
class Fault:
    """A fault of another project.

    Attributes:
        name: that `status()` shows.
        package: that has it: "deepspeed", "transformers", or "fabric" for that of every Lightning.
        effect: what happens without this package, for the documentation.
        cure: what this package does about it, for the documentation.
        since: the first release that has it; empty if that is the first supported one.
        mended: the first release that no longer has it; empty if there is none.
        with_deepspeed: the first release of DeepSpeed with which it has it; empty if that is every one.
        thread: the address of a report or a change of the project; empty if none was found.
        patch: the file of our series that mends it, without its folder; empty if there is none.
        mark: a file in the package, and a text in it that shows that it is mended, by our patch or in the same way.
    """

    name: str
    package: str
    effect: str
    cure: str
    since: str = ""
    mended: str = ""
    with_deepspeed: str = ""
    thread: str = ""
    patch: str = ""
    mark: tuple[str, str] | None = None


FAULTS = (
    Fault(
        "shared frozen parameters",
        "deepspeed",
        "`exclude_frozen_parameters=True` keeps a tied parameter under its second name",
        "it is left out under all names",
        patch="0001-Exclude-shared-frozen-parameters-under-all-of-their-.patch",
        mark=("runtime/engine.py", "named_parameters(remove_duplicate=False):"),
    ),
    Fault(
        "weights of another tag",
        "deepspeed",
        "ZeRO-3 without an optimizer loads the weights that `latest` names, whatever tag it is asked for",
        "the weights of the requested tag are loaded",
        since="0.10.2",
        thread=f"{_DEEPSPEED}/issues/8499",
        patch="0002-Load-the-module-of-the-requested-tag-in-ZeRO-3.patch",
        mark=("runtime/engine.py", "get_fp32_state_dict_from_zero_checkpoint(load_dir, str(tag))"),
    ),
    Fault(
        "loads without an optimizer",
        "deepspeed",
        "ZeRO-3 without an optimizer (test, validate, predict) cannot load a checkpoint",
        "it can",
        since="0.14.5",
        thread=f"{_DEEPSPEED}/issues/7272",
        patch="0003-Load-checkpoints-in-ZeRO-3-without-an-optimizer.patch",
        mark=("runtime/zero/parameter_offload.py", "_restore_from_bit16_weights"),
    ),
    Fault(
        "gathering loads",
        "deepspeed",
        "ZeRO-3 without an optimizer cannot load a checkpoint",
        "it can",
        mended="0.10.2",
    ),
    Fault(
        "buffers through fp32",
        "deepspeed",
        "ZeRO-3 without an optimizer loads buffers by way of fp32, integers too, which changes packed weights, and"
        " gives each only one of its names",
        "buffers are loaded as they were saved, under all names",
        since="0.10.2",
    ),
    Fault(
        "frozen parameters of ZeRO-1",
        "deepspeed",
        "`zero_to_fp32` loses them",
        "`consolidate` and `export` have them",
        thread=f"{_DEEPSPEED}/issues/5439",
        patch="0004-Save-the-frozen-parameters-of-ZeRO-1-where-zero_to_f.patch",
        mark=("runtime/engine.py", "self.zero_optimization() and not exclude_frozen_parameters"),
    ),
    Fault(
        "tensor subclasses",
        "deepspeed",
        "a checkpoint that contains them is saved, and cannot be loaded",
        "it is loaded on the CPU first",
        patch="0005-Load-checkpoints-that-contain-tensor-subclasses.patch",
        mark=("runtime/state_dict_factory.py", "map_location='cpu')"),
    ),
    Fault(
        "settings of parameter groups",
        "deepspeed",
        "universal checkpoints in ZeRO-3 give all groups the learning rate and weight decay of the first",
        "`patch(elastic=True)` and `reshard` keep those of each group, without a universal checkpoint",
        patch="0006-Restore-the-settings-of-each-parameter-group-from-un.patch",
        mark=("runtime/zero/stage3.py", "saved_param_groups"),
    ),
    Fault(
        "round_robin_gradients",
        "deepspeed",
        "universal checkpoints mix the values of parameters up",
        "`patch(elastic=True)` and `reshard` have the right order, without a universal checkpoint",
        patch="0007-Link-parameters-to-their-places-under-round_robin_gr.patch",
        mark=("runtime/zero/stage_1_and_2.py", "lp_param_list=self.round_robin_bit16_groups[i]"),
    ),
    Fault(
        "hpZ's second copies",
        "deepspeed",
        "parameters keep their values from before the load, since 0.18.3 only frozen ones",
        "the copies are made anew after a load",
        thread=f"{_DEEPSPEED}/pull/7707",
        patch="0008-Drop-hpZ-s-secondary-partitions-of-frozen-parameters.patch",
        mark=("runtime/engine.py", "param.ds_secondary_tensor = None"),
    ),
    Fault(
        "another parameter layout",
        "deepspeed",
        "ZeRO-3 loads any checkpoint of the same total size, into the wrong parameters",
        "a load compares names and shapes, and raises",
        patch="0009-Refuse-ZeRO-3-checkpoints-of-another-parameter-layou.patch",
        mark=("runtime/engine.py", "_check_zero3_param_shapes"),
    ),
    Fault(
        "frozen state of universal checkpoints",
        "deepspeed",
        "a load with `load_universal` leaves buffers and frozen parameters as the program built them",
        "a warning says so; `patch(elastic=True)` and `reshard` load both, without a universal checkpoint",
        patch="0011-Load-buffers-and-frozen-parameters-from-universal-ch.patch",
        mark=("runtime/engine.py", "_load_universal_frozen_state"),
    ),
    Fault(
        "zero_to_fp32 without huggingface_hub",
        "deepspeed",
        "`zero_to_fp32` raises ImportError, although it needs the library only to split models larger than 5 GB",
        "`consolidate` and `export` do not need it",
        since="0.15.3",
        patch="0012-Need-huggingface_hub-in-zero_to_fp32.py-only-to-spli.patch",
        mark=("utils/zero_to_fp32.py", "fits_into_one_shard"),
    ),
    Fault(
        "optimizer on NVMe",
        "deepspeed",
        "a load restores neither its step counts and settings, nor sub-groups that are too small for NVMe",
        "a warning says so",
        since="0.13.0",
        patch="0013-Restore-the-optimizer-from-checkpoints-with-NVMe-off.patch",
        mark=("runtime/engine.py", "if not success and not self.zero_nvme_offload_optimizer():"),
    ),
    Fault(
        "plain optimizers in bf16",
        "deepspeed",
        "in stage 0, and in stage 1 with `grad_accum_dtype` fp32, a checkpoint lacks the optimizer's state",
        "it is saved and loaded",
        mended="0.18.5",
    ),
    Fault(
        "step counts of elastic_checkpoint",
        "deepspeed",
        "with most optimizers a checkpoint of ZeRO 1 and 2 is saved, and cannot be loaded",
        "the save raises, and says what to set",
    ),
    Fault(
        "several ranks on NVMe",
        "deepspeed",
        "one rank fails in a save of an optimizer on NVMe, and the others wait for it",
        "every rank raises, and says what to do",
        mended="0.18.0",
        thread=f"{_DEEPSPEED}/issues/7549",
    ),
    Fault(
        "configuration in a file",
        "deepspeed",
        "a checkpoint has the path of the configuration, not its content",
        "it has the content",
    ),
    Fault(
        "wrapped optimizers",
        "fabric",
        "`fabric.load` never restores the optimizer",
        "it does",
        mended="2.1.0",
    ),
    Fault(
        "moved optimizer class",
        "fabric",
        "`fabric.load` fails",
        "it works",
        with_deepspeed="0.14.1",
        since="2.1.0",
        mended="2.4.0",
    ),
    Fault(
        "gradient clipping",
        "fabric",
        "gradients are clipped to a norm of 1.0 unless the configuration says otherwise",
        "a warning says so",
        with_deepspeed="0.19.3",
        thread=f"{_DEEPSPEED}/pull/8068",
        patch="0005-Do-not-clip-gradients-in-Fabric-without-being-asked.patch",
        mark=("strategies/deepspeed.py", 'setdefault("gradient_clipping", 0.0)'),
    ),
    Fault(
        "best checkpoint",
        "transformers",
        "`load_best_model_at_end` fails, or ranks go back to different checkpoints, if a rank looks for the best one"
        " before rank 0 has made its folder",
        "every rank knows it",
        since="4.50.0",
        mended="5.0.0",
    ),
)


def worked_around(target: str, version: str | None) -> tuple[str, ...]:
    """The names of the faults of an installed package that this package works around.

    Args:
        target: the package, by the name that `status()` has.
        version: the release that is installed; None, if it is unknown, has the faults of all releases.
    """
    package = "fabric" if target in ("lightning.fabric", "lightning_fabric") else target
    of_release = [fault for fault in FAULTS if fault.package == package and _is_of_release(fault, version)]
    read = cache(partial(_source, package_folder(target)))  # several faults are in one file
    return tuple(fault.name for fault in of_release if fault.mark is None or fault.mark[1] not in read(fault.mark[0]))


def _is_of_release(fault: Fault, version: str | None) -> bool:
    if fault.with_deepspeed and not _is_between(_version("deepspeed"), fault.with_deepspeed, ""):
        return False
    return _is_between(version, fault.since, fault.mended)


def _source(folder: Path | None, file: str) -> str:
    """The text of a file of a package, or an empty one if it cannot be read."""
    try:
        return (folder / file).read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_between(version: str | None, since: str, until: str) -> bool:
    """Whether a version, which may be unknown, is not older than one and older than another, each if it is given."""
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version or "")
    except InvalidVersion:
        return True
    return not (since and release < Version(since)) and not (until and release >= Version(until))

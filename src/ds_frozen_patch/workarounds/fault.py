"""Faults of other projects that this package works around, and whether an installed release has them."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.probing import package_folder
from ..common.versions import version_of


@dataclass(frozen=True)
class Fault:
    """The releases that have a fault.

    Attributes:
        since: the first release that has it; empty if that is the first supported one.
        mended: the first release that no longer has it; empty if there is none.
        with_deepspeed: the first release of DeepSpeed with which it has it; empty if that is every one.
        mark: a file in the package, and a text in it that shows that it is mended, upstream or by our patch.
    """

    since: str = ""
    mended: str = ""
    with_deepspeed: str = ""
    mark: tuple[str, str] | None = None

    def is_of(self, version: str | None) -> bool:
        """True if a release has this fault, or may have it because its version is unknown."""
        if self.with_deepspeed and is_older(version_of("deepspeed"), self.with_deepspeed):
            return False
        return not is_older(version, self.since) and (not self.mended or is_older(version, self.mended, unknown=True))

    def is_installed(self, package: str) -> bool:
        """True unless the source of an installed package shows that this fault is mended in it."""
        return self.mark is None or self.mark[1] not in source(package, self.mark[0])


FAULTS = {
    "deepspeed": {
        "shared frozen parameters": Fault(mark=("runtime/engine.py", "named_parameters(remove_duplicate=False):")),
        "weights of another tag": Fault(
            since="0.10.2", mark=("runtime/engine.py", "get_fp32_state_dict_from_zero_checkpoint(load_dir, str(tag))")
        ),
        "loads without an optimizer": Fault(
            since="0.14.5", mark=("runtime/zero/parameter_offload.py", "_restore_from_bit16_weights")
        ),
        "gathering loads": Fault(mended="0.10.2"),
        "buffers through fp32": Fault(since="0.10.2"),
        "frozen parameters of ZeRO-1": Fault(mark=("utils/zero_to_fp32.py", "if frozen_param_shapes is None:")),
        "tensor subclasses": Fault(mark=("runtime/state_dict_factory.py", "map_location='cpu')")),
        "settings of parameter groups": Fault(mark=("runtime/zero/stage3.py", "saved_param_groups")),
        "round_robin_gradients": Fault(
            mark=("runtime/zero/stage_1_and_2.py", "lp_param_list=self.round_robin_bit16_groups[i]")
        ),
        "hpZ's second copies": Fault(mark=("runtime/engine.py", "param.ds_secondary_tensor = None")),
        "another parameter layout": Fault(mark=("runtime/engine.py", "_check_zero3_param_shapes")),
        "frozen state of universal checkpoints": Fault(mark=("runtime/engine.py", "_load_universal_frozen_state")),
        "zero_to_fp32 without huggingface_hub": Fault(
            since="0.15.3", mark=("utils/zero_to_fp32.py", "fits_into_one_shard")
        ),
        "optimizer on NVMe": Fault(
            since="0.13.0", mark=("runtime/engine.py", "if not success and not self.zero_nvme_offload_optimizer():")
        ),
        "plain optimizers in bf16": Fault(mended="0.18.5"),
        "step counts of elastic_checkpoint": Fault(),
        "several ranks on NVMe": Fault(mended="0.18.0", mark=("runtime/engine.py", '"offloaded_tensors", rank_dir)')),
        "configuration in a file": Fault(),
    },
    "fabric": {
        "wrapped optimizers": Fault(mended="2.1.0"),
        "moved optimizer class": Fault(since="2.1.0", mended="2.4.0", with_deepspeed="0.14.1"),
        "gradient clipping": Fault(
            with_deepspeed="0.19.3", mark=("strategies/deepspeed.py", 'setdefault("gradient_clipping", 0.0)')
        ),
    },
    "transformers": {
        "best checkpoint": Fault(since="4.50.0", mended="5.0.0"),
    },
}
"""The faults that are worked around, by package and name; "fabric" is that of every Lightning.

`ci/upstream.toml` says what each of them is.
"""


def worked_around(target: str, version: str | None) -> tuple[str, ...]:
    """The names of the faults of an installed package that this package works around.

    Args:
        target: the package, by the name that `status()` has.
        version: the release that is installed; None, if it is unknown, has the faults of all releases.
    """
    faults = FAULTS.get("fabric" if target in ("lightning.fabric", "lightning_fabric") else target, {})
    return tuple(name for name, fault in faults.items() if fault.is_of(version) and fault.is_installed(target))


def source(package: str, file: str) -> str:
    """The text of a file of an installed package, which is not imported; empty if it cannot be read."""
    folder = package_folder(package)
    try:
        return (folder / file).read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return ""


def is_older(version: str | None, than: str, unknown: bool = False) -> bool:
    """True if a version is older than another one, which may be empty; `unknown` if it is not a version."""
    from packaging.version import InvalidVersion, Version

    try:
        return bool(than) and Version(version or "") < Version(than)
    except InvalidVersion:
        return unknown

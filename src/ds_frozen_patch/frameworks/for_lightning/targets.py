"""What of Lightning is wrapped: the strategies of its four packages, and functions beside them."""

from __future__ import annotations

from ...common.probing import Finding, Installed, Target
from ...settings import FLAG

LOADS_STRICTLY = "_allow_excluded_parameters"
"""What a strategy's `load_checkpoint` uses where our patch series for Lightning is applied."""

_TRAINER = ("__init__", "save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown")
_FABRIC = ("__init__", "save_checkpoint", "load_checkpoint")


def judge(version: str | None, strategy: Installed) -> Finding:
    """A strategy with the flag is native; one with the patch series is complete as well."""
    if not strategy.takes("__init__", FLAG):
        return Finding("patchable", version, f"has no {FLAG}")
    if LOADS_STRICTLY in strategy.text:
        reason = f"complete, by the patch series: pass DeepSpeedStrategy({FLAG}=True)"
        return Finding("native", version, reason, complete=True)
    return Finding("native", version, f"has {FLAG}; tied aliases, strict load and ZeRO-3 test need the shim")


def _strategy(name: str, methods: tuple[str, ...], *distributions: str) -> Target:
    remedy = (
        "install a tested release (see Compatibility in the documentation), or uninstall"
        f" {distributions[-1]} if nothing uses it"
    )
    module = f"{name}.strategies.deepspeed"
    return Target(name, module, "DeepSpeedStrategy", methods, distributions, judge, remedy, "lightning")


TARGETS = (
    _strategy("lightning.pytorch", _TRAINER, "lightning"),
    _strategy("lightning.fabric", _FABRIC, "lightning"),
    _strategy("pytorch_lightning", _TRAINER, "pytorch-lightning"),
    _strategy("lightning_fabric", _FABRIC, "lightning-fabric", "pytorch-lightning"),
)
BESIDE = tuple(
    Target(name, f"{name}.{module}", class_name, (attribute,))
    for name in ("lightning.pytorch", "pytorch_lightning")
    for module, class_name, attribute in (
        ("trainer.trainer", "Trainer", "save_checkpoint"),
        ("utilities.deepspeed", "", "convert_zero_checkpoint_to_fp32_state_dict"),
        ("callbacks.model_checkpoint", "ModelCheckpoint", "_find_last_checkpoints"),
        ("callbacks.model_checkpoint", "ModelCheckpoint", "file_exists"),
        (
            "trainer.connectors.checkpoint_connector",
            "_CheckpointConnector",
            "_CheckpointConnector__max_ckpt_version_in_folder",
        ),
    )
)
"""Functions that are wrapped beside their package's target, where they exist."""

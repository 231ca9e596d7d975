"""How `ds-frozen-patch run`, or its environment variables, patch a program that does not call `patch()`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from .. import settings as _settings
from ..frameworks.for_lightning.targets import TARGETS
from ..testing import adapt_deepspeed

BOOTSTRAP = Path(__file__).parent.parent / "bootstrap"
"""The folder that goes onto PYTHONPATH."""

CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""The class in each Lightning that chooses the accelerator for `accelerator="gpu"` and `"auto"`."""

PATCH, STRICT, CPU = "DS_FROZEN_PATCH", "DS_FROZEN_PATCH_STRICT", "DS_FROZEN_PATCH_CPU"
"""Environment variables, 1 or 0: patch at all, exit if checkpoints would be full, train on CPU ranks."""


def begin(frameworks: Iterable[str], patch_after: Callable[[ModuleType], None]) -> None:
    """Let `patch_after` be called after the import of each framework. Called by the bootstrap.

    A wrong environment variable ends the program.
    """
    try:
        on_cpu = [_settings.switch(variable) for variable in (PATCH, STRICT, CPU)][-1]
        _settings.from_environment()
    except ValueError as error:
        raise SystemExit(f"ds-frozen-patch: {error}") from None
    if on_cpu:
        for target in TARGETS:
            wrapt.register_post_import_hook(_train_on_cpu, target.module)
        for connector in CONNECTORS:
            wrapt.register_post_import_hook(_take_cpu, connector)
        wrapt.register_post_import_hook(_take_cpu_ranks, "accelerate.state")
        wrapt.register_post_import_hook(lambda _: adapt_deepspeed(), "deepspeed")
    for name in frameworks:
        wrapt.register_post_import_hook(patch_after, name)


def _train_on_cpu(module: ModuleType) -> None:
    """Called no earlier, because it imports DeepSpeed, which is slow."""
    from ..testing import cpu_strategy

    cpu_strategy(module.__name__.removesuffix(".strategies.deepspeed"))


def _take_cpu_ranks(module: ModuleType) -> None:
    """Accelerate knows ranks on CPU, and DeepSpeed, but not both at once: it would take each rank for the only one."""

    def prepare(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_rank = int(os.environ.get("LOCAL_RANK", -1)) != -1
        return ("gloo", module.DistributedType.MULTI_CPU) if is_rank else wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "PartialState._prepare_backend", prepare)


def _take_cpu(module: ModuleType) -> None:
    """For programs that pass no accelerator, or a GPU."""
    connector = getattr(module, CONNECTORS[module.__name__])
    connector._choose_gpu_accelerator_backend = connector._choose_auto_accelerator = staticmethod(lambda: "cpu")

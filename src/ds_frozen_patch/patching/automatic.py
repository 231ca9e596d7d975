"""How a program is patched that does not call `patch()`: by `ds-frozen-patch run`, or by its environment variables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import wrapt

from .. import settings as _settings
from ..owners.lightning.targets import TARGETS
from . import patch as _patching

BOOTSTRAP = Path(__file__).parent.parent / "bootstrap"
"""The folder that is put on PYTHONPATH."""

CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""What in each Lightning finds the accelerator for `accelerator="gpu"` and `"auto"`."""

PATCH, STRICT, CPU = "DS_FROZEN_PATCH", "DS_FROZEN_PATCH_STRICT", "DS_FROZEN_PATCH_CPU"
"""Environment variables, 1 or 0: patch at all, end a program that cannot be patched, train on CPU ranks."""


def begin(name: str, refuse: Callable[[str], None]) -> None:
    """Patch after the import of the package `name`, or now without one. Called by the bootstrap.

    What cannot be patched goes to `refuse`; a wrong environment variable ends the program.
    """
    try:
        on_cpu = [_settings.switch(variable) for variable in (PATCH, STRICT, CPU)][-1]
        _settings.settings()
    except ValueError as error:
        raise SystemExit(f"ds-frozen-patch: {error}") from None
    if on_cpu:
        for target in TARGETS:
            wrapt.register_post_import_hook(_train_on_cpu, target.module)
        for connector in CONNECTORS:
            wrapt.register_post_import_hook(_take_cpu, connector)
    if name:
        wrapt.register_post_import_hook(lambda _: _patching.patch_quietly(refuse), name)
    else:
        _patching.patch_quietly(refuse)


def _train_on_cpu(module: ModuleType) -> None:
    """Not before: it imports DeepSpeed, whose import is slow."""
    from ..testing import cpu_strategy

    cpu_strategy(module.__name__.removesuffix(".strategies.deepspeed"))


def _take_cpu(module: ModuleType) -> None:
    """For programs that name no accelerator, or a GPU."""
    connector = getattr(module, CONNECTORS[module.__name__])
    connector._choose_gpu_accelerator_backend = connector._choose_auto_accelerator = staticmethod(lambda: "cpu")

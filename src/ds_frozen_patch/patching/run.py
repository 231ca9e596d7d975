"""`ds-frozen-patch run`, or its environment variables: a program is patched that does not call `patch()`."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from ..frameworks.for_lightning.strategy import TARGETS
from ..settings import from_environment, switch, variable
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
        on_cpu = [switch(name) for name in (PATCH, STRICT, CPU)][-1]
        from_environment()
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


NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses, as in `env` and shells."""


class CommandError(Exception):
    """A command cannot be started; `status` is what to exit with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def replace_by(command: Sequence[str], options: Mapping[str, object]) -> None:
    """Replace this process by `command`, patched; does not return.

    Args:
        command: the program and its arguments.
        options: the arguments of `patch()` by name, "strict" and "cpu"; the environment gives those that are missing.

    Raises:
        CommandError: there is no such command, or it is not a program.
    """
    program = shutil.which(command[0])
    if program is None:
        raise _why_not(command[0])
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BOOTSTRAP), *([before] if before else [])])
    try:
        os.execve(program, list(command), {**os.environ, **_variables(options), "PYTHONPATH": path})
    except OSError as error:
        raise CommandError(NOT_EXECUTABLE, f"{program} cannot be executed: {error.strerror}") from None


def lines(options: Mapping[str, object]) -> list[str]:
    """Commands for a shell that have the same effect on everything it starts afterwards."""
    path = f"export PYTHONPATH={shlex.quote(str(BOOTSTRAP))}${{PYTHONPATH:+:$PYTHONPATH}}"
    return [*(f"export {name}={shlex.quote(word)}" for name, word in _variables(options).items()), path]


def _variables(options: Mapping[str, object]) -> dict[str, str]:
    return {PATCH: os.environ.get(PATCH) or "1"} | {variable(name): _word(value) for name, value in options.items()}


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(int(value) if isinstance(value, bool) else value)


def _why_not(name: str) -> CommandError:
    if Path(name).is_dir():
        return CommandError(NOT_EXECUTABLE, f"{name} is a directory; pass a program")
    if Path(name).is_file():
        way = f"python {name}" if name.endswith(".py") else f"chmod +x {name}"
        return CommandError(NOT_EXECUTABLE, f"{name} is not executable: {way}")
    return CommandError(NOT_FOUND, f"{name}: no such command")

"""`ds-frozen-patch run`: replaces this process by a program, in an environment that patches it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..settings import variable
from .automatic import BOOTSTRAP, PATCH

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

"""`ds-frozen-patch run`: a program in the place of this one, in an environment that has it patched."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..settings import variable
from .automatic import BOOTSTRAP, PATCH

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit statuses, as of `env` and the shells."""


class CommandError(Exception):
    """A command cannot be started; `status` is what to exit with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def replace_by(command: Sequence[str], said: Mapping[str, object]) -> None:
    """Become `command`, patched: its signals and its exit status are those of this process. Returns only by raising.

    `said` has what the program is told, by the names of `patch()`'s arguments, "strict" and "cpu"; what is not in it is
    left to the environment.

    Raises:
        CommandError: there is no such command, or it is no program.
    """
    program = shutil.which(command[0])
    if program is None:
        raise _why_not(command[0])
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(BOOTSTRAP), *([before] if before else [])])
    try:
        os.execve(program, list(command), {**os.environ, **_variables(said), "PYTHONPATH": path})
    except OSError as error:
        raise CommandError(NOT_EXECUTABLE, f"{program} cannot be executed: {error.strerror}") from None


def lines(said: Mapping[str, object]) -> list[str]:
    """What a shell is to be told instead, so that all which it starts from then on runs patched."""
    path = f"export PYTHONPATH={shlex.quote(str(BOOTSTRAP))}${{PYTHONPATH:+:$PYTHONPATH}}"
    return [*(f"export {name}={shlex.quote(word)}" for name, word in _variables(said).items()), path]


def _variables(said: Mapping[str, object]) -> dict[str, str]:
    return {PATCH: "1"} | {variable(name): _word(value) for name, value in said.items()}


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(int(value) if isinstance(value, bool) else value)


def _why_not(name: str) -> CommandError:
    if Path(name).is_dir():
        return CommandError(NOT_EXECUTABLE, f"{name} is a directory; give a program")
    if Path(name).is_file():
        way = f"python {name}" if name.endswith(".py") else f"chmod +x {name}"
        return CommandError(NOT_EXECUTABLE, f"{name} is not executable: {way}")
    return CommandError(NOT_FOUND, f"{name}: no such command")

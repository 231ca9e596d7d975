"""Notes: which process runs a save, so that others know what they may remove."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .durable import entries

OURS = ".ds_frozen_patch"
"""The prefix of the names that are only there while a save runs, but for those of hidden files."""

NOTE = re.compile(rf"{re.escape(OURS)}-[0-9a-f]{{12}}")
"""The name of a note: it ends with the id of its save."""


@dataclass(frozen=True)
class Note:
    """Which process runs a save.

    Attributes:
        tag: the name of the folder that it writes, or "".
        file: the name of the single file that it writes, or "".
        in_place: whether what is there is written over.
        process: its id.
        started: when it has started, as the kernel says.
        machine: what its id is valid for: a boot of a machine, and there a namespace of processes.
    """

    tag: str
    file: str
    in_place: bool
    process: int
    started: str
    machine: str

    @classmethod
    def of_this_process(cls, name: str, is_tag: bool, in_place: bool) -> Note:
        """A note of a save by this process."""
        names = (name, "") if is_tag else ("", name)
        process, started, machine = _identity(os.getpid())
        return cls(*names, in_place, process, started, machine)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(vars(self)), encoding="utf-8")

    def is_running(self) -> bool | None:
        """Whether its process runs; None if this cannot be known here."""
        if not self.machine or self.machine != _identity(os.getpid())[-1]:
            return None
        return _started(self.process) == self.started


def note_of(folder: Path, save: str) -> Path:
    """The path of a note, in the folder that has the target."""
    return folder / f"{OURS}-{save}"


def notes(folder: Path) -> dict[Path, Note]:
    """The notes in the folder that has the target; empty ones for those that are being written, or were at a kill."""
    found = {}
    for item in entries(folder):
        if NOTE.fullmatch(item.name):
            found[item] = Note("", "", False, 0, "", "")
            with suppress(OSError, ValueError, TypeError):
                found[item] = Note(**json.loads(item.read_text(encoding="utf-8")))
    return found


def _started(process: int) -> str:
    """When a process has started, in clock ticks since the machine's boot; "" if there is no such process."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]


@cache
def _identity(process: int) -> tuple[int, str, str]:
    """The last three attributes of a `Note` by this process; a forked one has another number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        machine = ""
    return process, _started(process), machine

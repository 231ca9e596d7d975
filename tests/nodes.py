"""Several nodes on one machine: ranks with a mount namespace each, in which one path leads to the disk of their node.

The nodes share one disk, have one each, or share one behind a cache per node (`caching_disk`).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import caching_disk
import forked
from forked import KillPoint, Process, ThisProcess

CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18


@dataclass(frozen=True)
class Nodes:
    """Nodes whose ranks find their disk at `at`."""

    at: Path
    disks: tuple[Path, ...]
    """What is mounted there on each node."""
    files: tuple[Path, ...]
    """The same for who looks from outside: with no cache in between."""

    def run(
        self,
        function: Callable[..., Any],
        points: tuple[KillPoint | None, ...] | None = None,
        local: int = 1,
        **arguments: Any,
    ) -> list[tuple[str, Any]]:
        """Run a function on `local` ranks of each node and return the outcomes; see `forked.run_ranks`."""
        return forked.outcomes(self.start(function, points, local, **arguments))

    def start(
        self,
        function: Callable[..., Any],
        points: tuple[KillPoint | None, ...] | None = None,
        local: int = 1,
        **arguments: Any,
    ) -> list[Process]:
        """Start the processes without waiting for them."""
        self.at.mkdir(exist_ok=True)
        count = len(self.disks)
        asked = {"asked": function, "disks": [str(disk) for disk in self.disks], "at": str(self.at)}
        log = self.at.with_name("log")
        return forked.start_ranks(_enter, log, points or (None,) * (count * local), count, **asked, **arguments)

    def log(self) -> str:
        """Return the last lines that the ranks have printed."""
        return self.at.with_name("log").read_text(errors="replace")[-4000:]


def why_unsupported() -> str:
    """Return why this machine cannot simulate nodes; empty if it can."""
    if os.geteuid() != 0:
        return "only root can give a process mounts of its own"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "no mount namespace can be made here"
    return ""


def own_disks(folder: Path, count: int) -> Nodes:
    """Give each node a disk of its own."""
    disks = tuple(_made(folder / f"node{node}") for node in range(count))
    return Nodes(folder / "disk", disks, disks)


def shared_disk(folder: Path, count: int) -> Nodes:
    """Give all nodes the same mount of one disk."""
    disks = (_made(folder / "server"),) * count
    return Nodes(folder / "disk", disks, disks)


@contextmanager
def cached_disk(folder: Path, count: int) -> Iterator[Nodes]:
    """Give all nodes one disk, with a cache of names on each."""
    server = _made(folder / "server")
    mounts = tuple(folder / f"mount{node}" for node in range(count))
    with ExitStack() as stack:
        for mount in mounts:
            stack.enter_context(caching_disk.mounted(server, mount))
        yield Nodes(folder / "disk", mounts, (server,) * count)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _enter(this: ThisProcess, asked: Callable[..., Any], disks: list[str], at: str, **arguments: Any) -> Any:
    """Mount the node's disk at `at`, in a rank, and call the function."""
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.unshare(CLONE_NEWNS))
    _done(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    disk = disks[int(os.environ["NODE_RANK"])]
    _done(libc.mount(os.fsencode(disk), os.fsencode(at), None, MS_BIND | MS_REC, None))
    return asked(this, at, **arguments)


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

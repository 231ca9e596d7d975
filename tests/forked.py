"""Processes that are cheap to start and to kill: forked from one that has imported everything and runs nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 120
"""How long a process may take; after that it hangs."""


@dataclass(frozen=True)
class KillPoint:
    """When a process is killed: at a given call that concerns files, or some seconds after `arm()`."""

    call: int | None
    seconds: float = 0.0

    @classmethod
    def random(cls, drawn: Random, calls: int, seconds: float) -> KillPoint:
        """Return a random point, given the number of calls and the seconds that the work takes.

        Half of the points are times, because torch's own writes are no calls that Python sees.
        """
        if drawn.random() < 0.5:
            return cls(drawn.randrange(1, calls + 1))
        return cls(None, drawn.uniform(0, seconds))


class ThisProcess:
    """The current process, as the function that runs in it sees it."""

    def __init__(self, pipe: Connection, point: KillPoint | None) -> None:
        self.pipe, self.point = pipe, point
        self.calls = 0
        self.counting = False
        sys.addaudithook(self._count)

    def _count(self, event: str, _: tuple[Any, ...]) -> None:
        if self.counting and (event == "open" or event.startswith(("os.", "shutil."))):
            self.calls += 1
            if self.point is not None and self.calls == self.point.call:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Allow the process to be killed from here on."""
        self.counting = True
        if self.point is not None and self.point.call is None:
            self.pipe.send(("armed", None))

    def disarm(self) -> None:
        """End that part; a process that was to be killed and was not yet is killed now."""
        self.counting = False
        if self.point is not None:
            while True:
                signal.pause() if self.point.call is None else os.kill(os.getpid(), signal.SIGKILL)


class Process:
    """A process that runs a function, with its `ThisProcess` before the function's own arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        log: Path,
        point: KillPoint | None = None,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.point = point
        self.pipe, theirs = context.Pipe()
        asked = (theirs, function, str(log), point, environment or {}, arguments)
        self.process = context.Process(target=_run, args=asked, daemon=True)
        with preloading():
            self.process.start()
        theirs.close()

    def outcome(self) -> tuple[str, Any]:
        """Return ("returned", value), ("raised", (type, text, traceback)) or ("killed", None)."""
        try:
            while self.pipe.poll(SECONDS):
                said: tuple[str, Any] = self.pipe.recv()
                if said[0] != "armed":
                    return said
                assert self.point is not None
                time.sleep(self.point.seconds)
                self.process.kill()
        except (EOFError, ConnectionResetError):
            self.process.join(SECONDS)
            return "killed" if self.process.exitcode == -signal.SIGKILL else f"exit {self.process.exitcode}", None
        finally:
            self.process.kill()
            self.process.join()
        return "hangs", None


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(
    function: Callable[..., Any], log: Path, points: tuple[KillPoint | None, ...], nodes: int = 1, **arguments: Any
) -> list[tuple[str, Any]]:
    """Run a function on as many ranks as there are kill points, and return the outcomes.

    None means not to kill that rank.
    """
    return outcomes(start_ranks(function, log, points, nodes, **arguments))


def start_ranks(
    function: Callable[..., Any], log: Path, points: tuple[KillPoint | None, ...], nodes: int = 1, **arguments: Any
) -> list[Process]:
    """Start the processes of the ranks, equally many on each node, with the environment that torchrun sets."""
    port = free_port()
    local = len(points) // nodes
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(points))}
    world |= {"LOCAL_WORLD_SIZE": str(local), "LOCAL_SIZE": str(local)}
    found = []
    for rank, point in enumerate(points):
        node = str(rank // local)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "NODE_RANK": node, "GROUP_RANK": node}
        found.append(Process(function, log, point, world | own, **arguments))
    return found


def outcomes(processes: list[Process]) -> list[tuple[str, Any]]:
    """Return the outcome of each process."""
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(Process.outcome, processes))


@contextmanager
def preloading() -> Iterator[None]:
    """Have the fork server import what `warm` does; needed while the first process starts."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "DS_ACCELERATOR", "OMP_NUM_THREADS")}
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    multiprocessing.set_forkserver_preload(["warm"])
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(
    pipe: Connection,
    function: Callable[..., Any],
    log: str,
    point: KillPoint | None,
    environment: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    try:
        said: tuple[str, Any] = ("returned", function(ThisProcess(pipe, point), **arguments))
    except BaseException as error:
        said = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
    pipe.send(said)
    os._exit(0)  # what runs at an exit would wait for ranks that are dead

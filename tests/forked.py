"""Processes that are cheap to start, and so to kill: forked from one that has imported all and runs nothing else."""

from __future__ import annotations

import multiprocessing
import os
import random
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
from typing import Any

SECONDS = 120
"""What any of them gets: then it hangs."""


@dataclass(frozen=True)
class Moment:
    """When a process is killed: at so many of its calls to do with files, or so long after it has said `begins()`."""

    call: int | None
    seconds: float = 0.0

    @classmethod
    def drawn(cls, drawn: random.Random, calls: int, seconds: float) -> Moment:
        """At random, of as many calls and as long as it takes: half of them, because torch's own writes are no calls of
        Python's.
        """
        if drawn.random() < 0.5:
            return cls(drawn.randrange(1, calls + 1))
        return cls(None, drawn.uniform(0, seconds))


class Here:
    """This process, as the function that runs in it sees it."""

    def __init__(self, pipe: Connection, moment: Moment | None) -> None:
        self.pipe, self.moment = pipe, moment
        self.calls = 0
        self.counting = False
        sys.addaudithook(self._heed)

    def _heed(self, event: str, _: tuple[Any, ...]) -> None:
        if self.counting and (event == "open" or event.startswith(("os.", "shutil."))):
            self.calls += 1
            if self.moment is not None and self.calls == self.moment.call:
                os.kill(os.getpid(), signal.SIGKILL)

    def begins(self) -> None:
        """From here on it can be killed."""
        self.counting = True
        if self.moment is not None and self.moment.call is None:
            self.pipe.send(("begins", None))

    def ends(self) -> None:
        """Up to here; one whose moment has not come yet does not go on."""
        self.counting = False
        if self.moment is not None:
            while True:
                signal.pause() if self.moment.call is None else os.kill(os.getpid(), signal.SIGKILL)


class Process:
    """One process that runs a function, with its `Here` before its own arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        log: Path,
        moment: Moment | None = None,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.moment = moment
        self.pipe, theirs = context.Pipe()
        asked = (theirs, function, str(log), moment, environment or {}, arguments)
        self.process = context.Process(target=_run, args=asked, daemon=True)
        with imports():
            self.process.start()
        theirs.close()

    def outcome(self) -> tuple[str, Any]:
        """("returned", value), ("raised", (its type, its text, the traceback)) or ("killed", None)."""
        try:
            while self.pipe.poll(SECONDS):
                said: tuple[str, Any] = self.pipe.recv()
                if said[0] != "begins":
                    return said
                assert self.moment is not None
                time.sleep(self.moment.seconds)
                self.process.kill()
        except (EOFError, ConnectionResetError):
            self.process.join(SECONDS)
            return "killed" if self.process.exitcode == -signal.SIGKILL else f"exit {self.process.exitcode}", None
        finally:
            self.process.kill()
            self.process.join()
        return "hangs", None


def ranks(
    function: Callable[..., Any], log: Path, moments: tuple[Moment | None, ...], nodes: int = 1, **arguments: Any
) -> list[tuple[str, Any]]:
    """What becomes of a function on as many ranks as there are moments; a rank whose moment is None is not killed."""
    return outcomes(started(function, log, moments, nodes, **arguments))


def started(
    function: Callable[..., Any], log: Path, moments: tuple[Moment | None, ...], nodes: int = 1, **arguments: Any
) -> list[Process]:
    """The processes of the ranks: on each node as many, told where they are as torchrun tells it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    local = len(moments) // nodes
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(moments))}
    world |= {"LOCAL_WORLD_SIZE": str(local), "LOCAL_SIZE": str(local)}
    found = []
    for rank, moment in enumerate(moments):
        node = str(rank // local)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "NODE_RANK": node, "GROUP_RANK": node}
        found.append(Process(function, log, moment, world | own, **arguments))
    return found


def outcomes(processes: list[Process]) -> list[tuple[str, Any]]:
    """What becomes of each."""
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(Process.outcome, processes))


@contextmanager
def imports() -> Iterator[None]:
    """While the first process is started: what the one that all are forked from is to import."""
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
    moment: Moment | None,
    environment: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    try:
        said: tuple[str, Any] = ("returned", function(Here(pipe, moment), **arguments))
    except BaseException as error:
        said = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
    pipe.send(said)
    os._exit(0)  # what runs at an exit would wait for ranks that are dead

"""Ranks and other processes that are cheap to start and to kill, forked from one that has imported everything.

A test calls `ranks(world_size, function, **arguments)`. The function runs on every rank of a pool at once, with a gloo
process group on the CPU or on a GPU of its own, and the results are returned as a list. Each call starts unpatched.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from ds_frozen_patch.publish import in_flight

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

        Half of the points are times, because Python does not see torch's own writes as calls. If the work makes no
        calls, as on a rank that writes no file, all points are times.
        """
        if drawn.random() < 0.5 and calls:
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
        self.log, self.point = log, point
        self.pipe, theirs = context.Pipe()
        asked = (theirs, function, str(log), point, environment or {}, arguments)
        self.process = context.Process(target=_run, args=asked, daemon=True)
        with preloading():
            self.process.start()
        theirs.close()

    def outcome(self) -> tuple[str, Any]:
        """Return ("returned", value), ("raised", (type, text, traceback)), ("killed", None) or ("hangs", stacks)."""
        try:
            while self.pipe.poll(SECONDS):
                said: tuple[str, Any] = self.pipe.recv()
                if said[0] != "armed":
                    return said
                assert self.point is not None
                time.sleep(self.point.seconds)
                self.process.kill()
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(1)  # until the stacks are written
            return "hangs", end_of(self.log, 9000)
        except (EOFError, ConnectionResetError):
            self.process.join(SECONDS)
            return "killed" if self.process.exitcode == -signal.SIGKILL else f"exit {self.process.exitcode}", None
        finally:
            self.process.kill()
            self.process.join()


def end_of(log: Path, count: int) -> str:
    """The last characters of a log; none if there is no such file."""
    return log.read_text(errors="replace")[-count:] if log.exists() else ""


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
    multiprocessing.set_forkserver_preload(["kit.warm"])
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
    faulthandler.register(signal.SIGUSR1)  # `outcome` asks for the stacks of a process that hangs
    os.environ.update(environment)
    try:
        said: tuple[str, Any] = ("returned", function(ThisProcess(pipe, point), **arguments))
    except BaseException as error:
        said = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
    pipe.send(said)
    os._exit(0)  # what runs at an exit would wait for ranks that are dead


START_SECONDS = 180
CALL_SECONDS = 240
GRACE_SECONDS = 15  # what the other ranks get to fail in too, once one has failed


class RankError(AssertionError):
    """A function raised on at least one rank. `raised` has each rank's exception type and text, or None."""

    def __init__(self, message: str, raised: list[tuple[str, str] | None]) -> None:
        super().__init__(message)
        self.raised = raised


class Ranks:
    """A pool of `world_size` ranks, started at the first call, and again after a call that failed."""

    def __init__(self, world_size: int, log: Path, accelerator: str = "cpu") -> None:
        self.world_size = world_size
        self.log = log
        self.accelerator = accelerator
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], grace: float = GRACE_SECONDS, /, **arguments: Any) -> list[Any]:
        if not self.processes:
            self._start()
        self.log.write_text("")
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = self._collect(CALL_SECONDS, grace)
        failed = [rank for rank, answer in enumerate(answers) if answer is None or answer[0] == "raised"]
        if failed:
            self.stop()  # the ranks may be out of step now
            raise RankError(self._report(answers), [a[1][:2] if a and a[0] == "raised" else None for a in answers])
        return [answer[1] for answer in answers if answer is not None]

    def _start(self) -> None:
        port = free_port()
        is_cpu = self.accelerator == "cpu"
        context: Any = multiprocessing.get_context("forkserver" if is_cpu else "spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world_size, port, str(self.log), self.accelerator)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with preloading() if is_cpu else nullcontext():
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        answers = self._collect(START_SECONDS)
        if any(answer is None or answer[0] == "raised" for answer in answers):
            self.stop()
            raise RuntimeError(f"the ranks did not start:\n{self._report(answers)}")

    def _collect(self, seconds: float, grace: float = GRACE_SECONDS) -> list[Any]:
        answers: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + seconds
        waiting = set(range(self.world_size))
        while waiting and time.monotonic() < deadline:
            for rank in list(waiting):
                try:
                    if not self.pipes[rank].poll(0.02):
                        continue
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("raised", ("ProcessDied", f"exit code {self.processes[rank].exitcode}", ""))
                waiting.discard(rank)
                if answers[rank][0] == "raised":
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def _report(self, answers: list[Any]) -> str:
        parts = []
        for rank, answer in enumerate(answers):
            if answer is None:
                parts.append(f"rank {rank}: no answer in time")
            elif answer[0] == "raised":
                parts.append(f"rank {rank}:\n{answer[1][2] or answer[1][1]}")
        return "\n".join([*parts, "--- what the ranks printed last ---", end_of(self.log, 3000)])

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def _serve(pipe: Connection, rank: int, world_size: int, port: int, log: str, accelerator: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),  # else DeepSpeed up to 0.15 asks numactl
        OMP_NUM_THREADS="1",
    )
    if accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
        import torch

        from kit import cell

        torch.set_num_threads(1)
        if accelerator == "cpu":
            from kit import warm  # noqa: F401
        pipe.send(("returned", None))
    except BaseException as error:
        pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))
        return
    environment = dict(os.environ)
    while True:
        function, arguments = pipe.recv()
        # DeepSpeed collects garbage many times per engine, and what was imported by now is a large heap to walk.
        gc.collect()
        gc.freeze()
        try:
            answer = ("returned", function(**arguments))
        except BaseException as error:
            answer = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            cell.stop()
            in_flight.settle()  # the test looks at what is on disk then
            # LightningCLI leaves a seed there, and with it another order of the data.
            os.environ.clear()
            os.environ.update(environment)
        pipe.send(answer)

"""Persistent ranks: processes that run one test after another; those on the CPU are forked from one with all imports.

A test calls `ranks(world_size, function, **arguments)`. The function runs on every rank at once, with a gloo process
group on the CPU or on a GPU of its own, and the results are returned as a list. Each call starts unpatched.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked

from ds_frozen_patch.publish import in_flight

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
        port = forked.free_port()
        is_cpu = self.accelerator == "cpu"
        context: Any = multiprocessing.get_context("forkserver" if is_cpu else "spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world_size, port, str(self.log), self.accelerator)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with forked.preloading() if is_cpu else nullcontext():
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
        output = self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
        return "\n".join([*parts, "--- what the ranks printed last ---", output])

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
        import provider
        import setuptools  # noqa: F401  -- before DeepSpeed imports distutils: it takes its place, to build ops
        import torch

        torch.set_num_threads(1)
        if accelerator == "cpu":
            import warm  # noqa: F401
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
            provider.stop()
            in_flight.settle()  # the test looks at what is on disk then
            # LightningCLI leaves a seed there, and with it another order of the data.
            os.environ.clear()
            os.environ.update(environment)
        pipe.send(answer)

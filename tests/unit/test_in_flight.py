"""What waits for the save in flight, what follows it, and how a process ends with it: with work that is no save."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import ds_frozen_patch
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.publish import in_flight

NO_SPACE = CheckpointError("no space")


class Work:
    """Work that ends when it is told to; and all that has happened, in order."""

    def __init__(self) -> None:
        self.told, self.order = threading.Event(), list[Any]()

    def start(self, error: Exception | None = None, delay: float = 0) -> None:
        """Let it begin; after `delay` seconds it is told to end, if that is not 0."""

        def work() -> CheckpointError | None:
            assert self.told.wait(60)
            time.sleep(0.05)  # whoever does not wait is faster
            self.order.append("saved")
            if isinstance(error, CheckpointError):
                return error
            if error is not None:
                raise error
            return None

        in_flight.start(work, lambda kind, text: self.order.append((kind, text)))
        if delay:
            threading.Timer(delay, self.told.set).start()

    def then(self, what: str) -> Callable[..., Any]:
        """What notes that it was called, with its arguments if there are any, and returns that."""

        def call(*args: Any) -> Any:
            self.order.append((what, *args) if args else what)
            return self.order[-1]

        return call


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.told.set()
    in_flight.settle()
    in_flight._in_flight = None


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_what_follows_is_called_in_order_although_nobody_waits(work: Work) -> None:
    in_flight.afterwards(work.then("before it"))
    assert (work.order, in_flight.is_any()) == (["before it"], False)
    work.start()
    in_flight.afterwards(work.then("first"))
    in_flight.afterwards(work.then("second"))
    assert (work.order, in_flight.is_any()) == (["before it"], True)
    work.told.set()
    assert until(lambda: work.order == ["before it", "saved", "first", "second"])
    in_flight.afterwards(work.then("third"))
    in_flight.wait()
    in_flight.afterwards(work.then("fourth"))
    assert (work.order[4:], in_flight.is_any()) == (["third", "fourth"], False)


def test_what_is_passed_once_the_thread_has_ended_is_called_at_once_or_by_who_waits(work: Work) -> None:
    work.start()
    flying: Any = in_flight._in_flight
    work.told.set()
    flying._thread.join()
    in_flight.afterwards(work.then("at once"))
    assert work.order == ["saved", "at once"]
    flying._afterwards.append(work.then("as it ended"))
    in_flight.wait()
    assert work.order == ["saved", "at once", "as it ended"]


@pytest.mark.parametrize("error", [NO_SPACE, KeyError("mine")])
def test_nothing_follows_an_error_which_is_raised_once(work: Work, error: Exception) -> None:
    work.start(error)
    in_flight.afterwards(work.then("removed"))
    work.told.set()
    in_flight.settle()
    in_flight.afterwards(work.then("removed"))
    with pytest.raises(CheckpointError, match=r"no space|KeyError: 'mine'"):
        ds_frozen_patch.wait()
    ds_frozen_patch.wait()
    assert work.order == ["saved"]


def test_what_follows_may_fail(work: Work) -> None:
    work.start()
    in_flight.afterwards(lambda: 1 / 0)
    in_flight.afterwards(work.then("next"))
    work.told.set()
    in_flight.wait()
    text = "What follows a save has failed (ZeroDivisionError: division by zero)."
    assert work.order == ["saved", (text, text), "next"]


@pytest.mark.parametrize(("reader", "notable"), [("Trackers", 0.0), (None, 0.0), (None, 60.0)])
def test_waits_are_logged(work: Work, monkeypatch: Any, reader: str | None, notable: float) -> None:
    monkeypatch.setattr(in_flight, "_NOTABLE_SECONDS", notable)
    work.start(delay=0.01)
    in_flight.wait_for(reader)
    kinds = [kind for kind, _ in work.order[1:]]
    assert kinds == ([reader] if reader else [] if notable else ["a wait for the previous save"])


def test_the_work_itself_does_not_wait_for_itself(work: Work) -> None:
    def both() -> None:
        in_flight.wait()
        in_flight.settle()
        work.order.append("went on")

    in_flight.start(both, work.then("said"))
    in_flight.wait()
    assert work.order == ["went on"]


@pytest.mark.parametrize("is_error", [False, True])
def test_the_end_of_a_run(work: Work, is_error: bool) -> None:
    """An exception that ends it is not replaced by that of a save, which is raised later."""
    work.start(NO_SPACE, delay=0.01)
    try:
        if is_error:
            raise KeyError("mine")
        with pytest.raises(CheckpointError, match="no space"):
            in_flight.wait_at_end()
    except KeyError:
        in_flight.wait_at_end()
    assert work.order == ["saved"]
    with pytest.raises(CheckpointError) if is_error else nullcontext():
        in_flight.wait()


def test_the_work_knows_that_an_error_ends_the_process(work: Work) -> None:
    in_flight.settle_at_end()
    in_flight.start(lambda: work.order.append(in_flight.is_ending.wait(30)), work.then("said"))
    in_flight.settle_at_end()
    assert (work.order, in_flight.is_ending.is_set()) == ([True], False)


@pytest.mark.parametrize("wrapper", [in_flight.after_it, in_flight.before_end])
@pytest.mark.parametrize("fails", [False, True])
def test_wrappers_wait_first(work: Work, wrapper: Any, fails: bool) -> None:
    """What reads a checkpoint is not called if that has failed; what ends the process group always is."""
    work.start(NO_SPACE if fails else None, delay=0.01)
    with pytest.raises(CheckpointError) if fails else nullcontext():
        assert wrapper(work.then("called"), None, (1,), {}) == ("called", 1)
    called = [("called", 1)] if not fails or wrapper is in_flight.before_end else []
    assert work.order == ["saved", *called]


def test_a_forked_process_waits_but_neither_ends_it_nor_does_what_follows(tmp_path: Path, work: Work) -> None:
    saved, ours, theirs = (tmp_path / name for name in ("saved", "ours", "theirs"))
    reading, writing = os.pipe()

    def save() -> CheckpointError:
        os.read(reading, 1)
        time.sleep(0.2)
        saved.touch()
        return NO_SPACE

    in_flight.start(save, work.then("said"))
    in_flight.afterwards(ours.touch)
    if (child := os.fork()) == 0:
        status = 1
        try:
            in_flight.settle_at_end()  # does not wait: the other process would not know that anything ends
            assert not saved.exists()
            os.write(writing, b"1")
            in_flight.afterwards(theirs.touch)
            assert saved.exists()
            in_flight.wait()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(CheckpointError, match="no space"):
        in_flight.wait()
    assert {*tmp_path.iterdir()} == {saved, theirs}
    os.close(reading)
    os.close(writing)


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    """By a forked process, which waits for the saves of the one that forked it."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert [in_flight._runs(process) for process in (child, os.getpid(), 1)] == [False, True, True]


PROGRAM = """
import multiprocessing, os, signal, sys, threading, time
from ds_frozen_patch import CheckpointError
from ds_frozen_patch.publish import in_flight

def begin(fails=False):
    def work():
        with open(sys.argv[1], "w") as file:
            file.write(f"{in_flight.is_ending.wait(float(sys.argv[2]))}\\n")
        return CheckpointError("no space") if fails else None
    in_flight.start(work, lambda *_: None)

"""
ENDS: dict[str, tuple[str, int, bool]] = {
    "normal": ("begin(); print('end')", 0, False),
    "failed": ("begin(fails=True); print('end')", 1, False),
    "exception": ("begin(); print('end'); raise KeyError", 1, True),
    "waited": ("begin(); in_flight.wait(); print('end')", 0, False),
    "thread": ("threading.Thread(target=begin).start(); print('end')", 0, False),
    "SIGTERM": ("begin(); print('end', flush=True); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15, True),
    "their handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); begin(); print('end');"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        3,
        False,
    ),
    "their process": (
        "child = multiprocessing.get_context('fork').Process(target=begin, args=(True,)); child.start(); child.join();"
        "print('end'); sys.exit(child.exitcode + 1)",
        2,
        False,
    ),
}
"""What a program does, its exit status, and whether the work knows that an error or a signal ends the process."""


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_process(tmp_path: Path, name: str) -> None:
    end, status, is_ending = ENDS[name]
    # Else it would not show that what was printed is flushed before an end by an error.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM + end, str(tmp_path / "saved"), "30" if is_ending else "0.3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (status, "end\n"), done.stderr
    assert (tmp_path / "saved").read_text() == f"{is_ending}\n"
    expected = "ds_frozen_patch: no space\n" if name in ("failed", "their process") else ""
    assert done.stderr == expected or name == "exception"

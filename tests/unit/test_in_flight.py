"""The queue of what follows a save in flight, with work that is no save."""

from __future__ import annotations

import os
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

    def then(self, what: str) -> Callable[[], None]:
        """Return a function that notes that it was called."""
        return lambda: self.order.append(what)


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


def test_a_forked_process_waits_but_neither_ends_it_nor_does_what_follows(tmp_path: Path, work: Work) -> None:
    saved, ours, theirs = (tmp_path / name for name in ("saved", "ours", "theirs"))
    reading, writing = os.pipe()

    def save() -> CheckpointError:
        os.read(reading, 1)
        time.sleep(0.2)
        saved.touch()
        return NO_SPACE

    in_flight.start(save, lambda *_: None)
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

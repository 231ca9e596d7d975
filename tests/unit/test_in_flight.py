"""The queue of what follows a save in flight, with work that is no save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, process
from ds_frozen_patch.publish import in_flight

NO_SPACE = CheckpointError("no space")


class Work:
    """Work that ends when it is told to; and all that has happened, in order."""

    def __init__(self) -> None:
        self.told, self.order = threading.Event(), list[Any]()

    def start(self, error: Exception | None = None) -> None:
        def work() -> CheckpointError | None:
            assert self.told.wait(60)
            time.sleep(0.05)  # whoever does not wait is faster
            self.order.append("saved")
            if error is None or isinstance(error, CheckpointError):
                return error
            raise error

        in_flight.start(work, lambda kind, text: self.order.append((kind, text)))

    def then(self, what: str) -> None:
        in_flight.afterwards(lambda: self.order.append(what))


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.told.set()
    in_flight.settle()
    process.state.in_flight = None
    in_flight.release_process()


@pytest.mark.parametrize("error", [NO_SPACE, KeyError("mine")])
def test_nothing_follows_an_error_which_is_raised_once(work: Work, error: Exception) -> None:
    work.start(error)
    work.then("removed")
    work.told.set()
    in_flight.settle()
    work.then("removed")
    with pytest.raises(CheckpointError, match=r"no space|KeyError: 'mine'"):
        ds_frozen_patch.wait()
    ds_frozen_patch.wait()
    assert work.order == ["saved"]


def test_what_follows_may_fail(work: Work) -> None:
    work.start()
    in_flight.afterwards(lambda: 1 / 0)
    work.then("next")
    work.told.set()
    in_flight.wait()
    text = "What follows a save has failed (ZeroDivisionError: division by zero)."
    assert work.order == ["saved", (text, text), "next"]


@pytest.mark.parametrize("is_error", [False, True])
def test_the_end_of_a_run(work: Work, is_error: bool) -> None:
    """An exception that ends it is not replaced by that of a save, which is raised later."""
    work.start(NO_SPACE)
    threading.Timer(0.01, work.told.set).start()
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


@pytest.mark.everyday
@pytest.mark.short
def test_unpatch_forgets_everything(work: Work) -> None:
    """What an asynchronous save has set up in the process too."""
    before = signal.getsignal(signal.SIGTERM)
    ds_frozen_patch.patch(keep=["a"])
    work.start()
    assert signal.getsignal(signal.SIGTERM) is not before
    work.told.set()
    ds_frozen_patch.unpatch()
    assert signal.getsignal(signal.SIGTERM) is before
    state = process.state
    assert state == process.State(hooked=state.hooked, origins=state.origins)

"""The save in flight: at most one in a process, which training does not wait for.

The next save, a load, and the end of a run wait for it on all ranks at once, and raise its error. The end of the
process waits for it too.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from ..common.collectives import gather_numbers
from ..common.errors import CheckpointError
from .attached import Attached
from .owner import warn

_NOTABLE_SECONDS = 0.5
_SLICE_SECONDS = 1.0
"""How often the ranks that wait ask whether all others are still there."""
_AT_EXIT_SECONDS = 600.0
_GRACE_SECONDS = 30.0


class InFlight:
    """Work in a thread, and what follows it if it succeeds.

    Attributes:
        known: of the engine that is saved.
        error: what every rank is to raise, until it has.
        has_failed: whether there was an error.
    """

    def __init__(self, work: Callable[[], CheckpointError | None], known: Attached) -> None:
        self.known = known
        self.error: CheckpointError | None = None
        self.has_failed = False
        self._work = work
        self._afterwards: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ds_frozen_patch: save", daemon=True)
        self._thread.start()

    def afterwards(self, call: Callable[[], Any]) -> None:
        """Call something when the work has succeeded, after what was passed before; never if it fails."""
        with self._lock:
            if not self._is_over:
                self._afterwards.append(call)
                return
        if not self.has_failed:
            call()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it is over, or at most so many seconds; return whether it is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.error = self._work()
        self.has_failed = self.error is not None
        del self._work  # and the engine that it holds
        while True:
            with self._lock:
                if self.has_failed or not self._afterwards:
                    self._is_over = True
                    return
                call = self._afterwards.pop(0)
            try:
                call()
            except Exception as error:
                warn(self.known.owner, f"What follows a save has failed ({type(error).__name__}: {error}).")


_in_flight: InFlight | None = None
patience = math.inf
"""For how many seconds the thread of a rank waits for the other ranks.

A run that goes on notices by itself that one is gone. A process that ends does not."""


def start(work: Callable[[], CheckpointError | None], known: Attached) -> None:
    """Let a thread do the rest of a save.

    Args:
        work: returns the error that every rank is to raise.
        known: of the engine that is saved.
    """
    global _in_flight
    _end_with_process()
    _in_flight = InFlight(work, known)


def wait() -> None:
    """Wait for the save in flight, if there is one.

    Raises:
        CheckpointError: on every rank, if it has failed on one.
    """
    if _in_flight is not None:
        _wait(_in_flight, lambda flying: flying.join())


def wait_on_all_ranks() -> None:
    """Wait for the save in flight on every rank; every rank must call it, else a rank may wait for one that is gone.

    Raises:
        CheckpointError: on every rank, if it has failed on one.
        RuntimeError: by the process group, if another rank is gone.
    """
    global _in_flight
    if _in_flight is None:
        return

    def join(flying: InFlight) -> None:
        device = flying.known.owner.device
        while not all(is_over for (is_over,) in gather_numbers([flying.join(_SLICE_SECONDS)], device)):
            pass

    try:
        _wait(_in_flight, join)
    finally:
        if _in_flight.join(0):  # not before: an interrupt ends the wait, and the process waits at its end
            _in_flight = None


def _wait(flying: InFlight, join: Callable[[InFlight], object]) -> None:
    begun = time.monotonic()
    join(flying)
    seconds = time.monotonic() - begun
    if seconds > _NOTABLE_SECONDS:
        text = f"Waited {seconds:.1f} s for the previous save to be written. Save less often, or to a faster disk."
        if flying.known.is_first_time("a wait for the previous save"):
            warn(flying.known.owner, text)
    if flying.error is not None:
        error, flying.error = flying.error, None
        raise error


def join() -> None:
    """Wait for the save in flight, if there is one, though a run has failed; its own error is raised later."""
    global patience
    if _in_flight is not None:
        patience = _GRACE_SECONDS
        _in_flight.join()
        patience = math.inf


def is_any() -> bool:
    """Whether there is a save in flight, or one whose end the ranks have not waited for."""
    return _in_flight is not None


def afterwards(call: Callable[[], Any]) -> None:
    """Call something once the save in flight has succeeded; now, if there is none."""
    _in_flight.afterwards(call) if _in_flight is not None else call()


@cache
def _end_with_process() -> None:
    """Let the process end only when no save is in flight, and with an error if one has failed."""
    atexit.register(_at_exit)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_termination)


def _at_exit() -> None:
    global patience
    patience = _AT_EXIT_SECONDS if getattr(sys, "last_value", None) is None else _GRACE_SECONDS
    try:
        wait()
    except CheckpointError as error:
        print(f"ds_frozen_patch: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def _on_termination(number: int, _: Any) -> None:
    join()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

"""The save in flight: at most one in a process, which training does not wait for.

The next save, a load, and the end of the process wait for it, and raise its error.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from ..common.errors import CheckpointError
from .attached import Attached
from .owner import warn

_NOTABLE_SECONDS = 0.5


class InFlight:
    """Work in a thread, and what follows it if it succeeds."""

    def __init__(self, work: Callable[[], CheckpointError | None], known: Attached) -> None:
        self.known = known
        self.error: CheckpointError | None = None
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
        if self.error is None:
            call()

    def join(self) -> float:
        """Wait until it is over; return the seconds that this took."""
        begun = time.monotonic()
        self._thread.join()
        return time.monotonic() - begun

    def _run(self) -> None:
        self.error = self._work()
        del self._work  # and the engine that it holds
        while True:
            with self._lock:
                if self.error is not None or not self._afterwards:
                    self._is_over = True
                    return
                call = self._afterwards.pop(0)
            try:
                call()
            except Exception as error:
                warn(self.known.owner, f"What follows a save has failed ({type(error).__name__}: {error}).")


_in_flight: InFlight | None = None
is_ending = threading.Event()
"""Set while an error or a signal ends the process: other ranks may be gone."""


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
    global _in_flight
    if _in_flight is None:
        return
    flying = _in_flight
    seconds = flying.join()
    _in_flight = None  # not before: an interrupt ends the join, and the process waits at its end
    if seconds > _NOTABLE_SECONDS:
        text = f"Waited {seconds:.1f} s for the previous save to be written. Save less often, or to a faster disk."
        if flying.known.is_first_time("a wait for the previous save"):
            warn(flying.known.owner, text)
    if flying.error is not None:
        raise flying.error


def join() -> None:
    """Wait for the save in flight, if there is one, though a run has failed; its own error is raised later."""
    is_ending.set()
    if _in_flight is not None:
        _in_flight.join()
    is_ending.clear()


def after_it(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A wrapper, with wrapt's arguments, of what looks for a checkpoint by itself: waits for the save in flight."""
    wait()
    return wrapped(*args, **kwargs)


def is_any() -> bool:
    """Whether there is a save in flight, or one whose end nobody has waited for."""
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
    if getattr(sys, "last_value", None) is not None:
        is_ending.set()
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

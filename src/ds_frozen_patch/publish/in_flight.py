"""The save in flight: at most one in a process, which training does not wait for.

The next save, a load, whatever else reads a checkpoint through a framework or through us, and the end of the process
wait for it. This module knows nothing of what is saved.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

from .. import process
from ..common.errors import CheckpointError

_NOTABLE_SECONDS = 0.5
_POLL_SECONDS = 0.05

is_ending = threading.Event()
"""Set while an error or a signal ends the process: other ranks may be gone."""


class InFlight:
    """Work in a thread, and what follows it if it succeeds.

    Attributes:
        say: logs a text, the second argument, unless it has logged one of the same kind, the first.
        error: of the work, once it is over.
    """

    def __init__(self, work: Callable[[], CheckpointError | None], say: Callable[[str, str], None]) -> None:
        self.say = say
        self.error: CheckpointError | None = None
        self._work = work
        self._afterwards: deque[Callable[[], Any]] = deque()
        self._process = os.getpid()
        self._is_over = mmap.mmap(-1, 1)  # shared with forked processes, which do not have the thread
        self._thread = threading.Thread(target=self._run, name="ds_frozen_patch: save", daemon=True)
        self._thread.start()

    @property
    def is_own(self) -> bool:
        """Whether this process has started it, and not the one from which it was forked."""
        return self._process == os.getpid()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs in its thread."""
        return threading.current_thread() is self._thread

    def afterwards(self, call: Callable[[], Any]) -> None:
        """Call something when the work has succeeded, after what was passed before; never if it fails."""
        self._afterwards.append(call)
        if not self._thread.is_alive():
            self._call_what_follows()

    def join(self) -> float:
        """Wait until it is over; return the seconds that this took."""
        begun = time.monotonic()
        if self.is_own:
            self._thread.join()
            self._call_what_follows()  # what was passed as the thread ended
        else:
            while not self._is_over[0] and _runs(self._process):
                time.sleep(_POLL_SECONDS)
        return time.monotonic() - begun

    def _run(self) -> None:
        try:
            try:
                self.error = self._work()
            except Exception as error:  # so that nothing follows it
                self.error = CheckpointError(f"A save has failed ({type(error).__name__}: {error}).")
            del self._work  # and the engine that it holds
            self._call_what_follows()
        finally:
            self._is_over[0] = 1

    def _call_what_follows(self) -> None:
        with suppress(IndexError):
            while self.error is None:
                call = self._afterwards.popleft()
                try:
                    call()
                except Exception as error:
                    text = f"What follows a save has failed ({type(error).__name__}: {error})."
                    self.say(text, text)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def start(work: Callable[[], CheckpointError | None], say: Callable[[str, str], None]) -> None:
    """Let a thread do the rest of a save; the one before must be over.

    Args:
        work: returns the error that every rank is to raise.
        say: see `InFlight`.
    """
    if os.getpid() not in process.state.at_end:
        atexit.register(_at_exit)
        # Processes of multiprocessing run these, and no `atexit`.
        process.state.at_end[os.getpid()] = Finalize(None, _at_exit, exitpriority=0)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # which frameworks change, and restore
        signal.signal(signal.SIGTERM, _on_termination)
    process.state.in_flight = InFlight(work, say)


def wait() -> None:
    """Wait until the checkpoint of the last save is complete, with `patch(async_save=True)`.

    Call it before code of your own reads, copies or uploads a checkpoint that this process has just saved. Loads, the
    tools of this package, and the next save wait by themselves. If no save is in flight, it returns at once. In a
    forked process it waits for the save of the process from which that was forked.

    Raises:
        CheckpointError: on every rank, if the save has failed on one; only in the process that saved, and only once.
    """
    _wait(None)


@contextmanager
def no_wait() -> Iterator[None]:
    """Let every asynchronous save return before its files are written, while this lasts, whoever asks for it.

    Without it, with `patch(async_save=True)`, only the saves of Lightning's own `ModelCheckpoint` and of Trainer's own
    training do so. Any other function that saves may read, copy or remove the checkpoint in its next line, as may
    loggers and callbacks, so their saves wait. Within it, call `wait()` before that.
    """
    process.state.no_waits += 1
    try:
        yield
    finally:
        process.state.no_waits -= 1


def wait_for(reader: str) -> None:
    """As `wait`, before code of others that may read the checkpoint; logged once for each, with the seconds."""
    if not process.state.no_waits:
        _wait(reader)


def _wait(reader: str | None) -> None:
    flying = process.state.in_flight
    if flying is None or flying.is_this_thread:
        return
    seconds = flying.join()
    process.state.in_flight = None  # not before: an interrupt ends the join, and the process waits at its end
    if not flying.is_own:
        return
    if reader is not None:
        flying.say(
            reader,
            f"Waited {seconds:.1f} s until the checkpoint was complete, because {reader} may read it. If it does not,"
            " let it run within `ds_frozen_patch.no_wait()`.",
        )
    elif seconds > _NOTABLE_SECONDS:
        flying.say(
            "a wait for the previous save",
            f"Waited {seconds:.1f} s for the previous save to be written. Save less often, or to a faster disk.",
        )
    if flying.error is not None:
        raise flying.error


def settle() -> None:
    """Wait for the save in flight, if there is one; its error is raised later."""
    flying = process.state.in_flight
    if flying is not None and not flying.is_this_thread:
        flying.join()


def settle_at_end() -> None:
    """As `settle`, while an error or a signal ends the process; not in a forked one."""
    if _is_own():
        is_ending.set()
        settle()
        is_ending.clear()


def wait_at_end() -> None:
    """`wait` at the end of a run, or `settle_at_end` if an exception ends it."""
    settle_at_end() if sys.exc_info()[1] is not None else wait()


def after_it(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A wrapper, with wrapt's arguments, of what looks for a checkpoint by itself: waits for the save in flight."""
    wait()
    return wrapped(*args, **kwargs)


def before_end(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A wrapper, with wrapt's arguments, of what ends the process group, by whose store the ranks of a save agree."""
    try:
        wait_at_end()
    finally:
        result = wrapped(*args, **kwargs)
    return result


def is_any() -> bool:
    """Whether there is a save in flight, or one whose end nobody has waited for."""
    return process.state.in_flight is not None


def _is_own() -> bool:
    return process.state.in_flight is not None and process.state.in_flight.is_own


def afterwards(call: Callable[[], Any]) -> None:
    """Call something once the save in flight has succeeded; now, if there is none.

    A forked process has a copy of what the other one has put off, which it must not call: it waits.
    """
    flying = process.state.in_flight
    if flying is not None and flying.is_own:
        flying.afterwards(call)
    else:
        wait()
        call()


def release_process() -> None:
    """Let the process end as it would without a save in flight, for `unpatch()`."""
    atexit.unregister(_at_exit)
    if finalize := process.state.at_end.pop(os.getpid(), None):
        finalize.cancel()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is _on_termination:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _at_exit() -> None:
    """Let the process end only when no save is in flight, and with an error if one has failed."""
    if not _is_own():
        return
    if sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
        is_ending.set()
    try:
        wait()
    except CheckpointError as error:
        print(f"ds_frozen_patch: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def _on_termination(number: int, _: Any) -> None:
    settle_at_end()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

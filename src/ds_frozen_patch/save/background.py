"""The end of a save that training does not wait for: its files are written, and the checkpoint gets its name.

That happens in a thread. Training uses the process group meanwhile, so the ranks agree by its store, which every rank
asks from time to time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ..common.collectives import default_store, world_size
from ..common.errors import CheckpointError
from ..core.record import File
from ..engine.owner import is_first
from ..publish import in_flight
from ..publish.in_flight import is_ending
from . import agreement
from .asker import asker
from .failures import failure
from .publishing import publish
from .running import Save
from .writer import Recorder
from .writing import write_recorded

_POLL_SECONDS = (0.01, 0.5)
"""How long a rank waits before it asks the store again: at first, and at most."""
_MANY_RANKS = 512
"""More ranks ask less often, so that the one process that serves the store does not get more requests a second."""
_BEAT_SECONDS = 10.0
_LOST_SECONDS = 300.0
"""A rank reports as often as the first says, however long it writes; after so long without, it is given up."""
_THERE = "ds_frozen_patch/there/"
"""With the number of a rank: the key of its reports, the same in all saves, since a store keeps all keys."""
_GRACE_SECONDS = 30.0
"""The limit instead of `_LOST_SECONDS` while an error or a signal ends rank 0; and how long rank 0 keeps the store."""


def prepare(save: Save) -> None:
    """Let a save record its files in place of writing them, if that is possible."""
    if save.place.is_managed and (default_store() is not None or world_size() == 1):
        save.served.recorder = save.recorder = save.served.recorder or Recorder()
        save.recorder.begin()


def start(save: Save) -> None:
    """Write what was recorded, and publish it, while training goes on; every rank must call it.

    If not a framework's own training has asked for the save, this waits: whoever has may read it in the next line.
    """
    agreement.agree_on_end(save)  # and every rank has recorded its files
    save.place.use_absolute_paths()  # the program may change its current folder
    in_flight.start(partial(_publish, save, Votes(save)), save.served.log_once)
    if (reader := asker()) is not None:
        in_flight.wait_for(reader)


def _publish(save: Save, votes: Votes) -> CheckpointError | None:
    """Write what was recorded, and give the checkpoint its name on every disk, or on none; on every rank.

    Args:
        save: with a recorder.
        votes: of this save.

    Returns:
        What every rank is to raise.
    """
    error: CheckpointError | None = None
    try:
        with votes.reporting():
            write_recorded(save)
            try:
                publish(save, votes.agree)
            except CheckpointError as failed:
                error = failed
            votes.give("seen")
            if is_first(save.owner):
                with suppress(LostRankError):
                    votes.wait("seen", _GRACE_SECONDS)
    except Exception as lost:  # of the store, or a rank is gone
        state, _ = save.place.state_of_target()
        return CheckpointError(f"Not every rank has confirmed that {save.place.shown} was saved ({lost}). {state}")
    return error


class LostRankError(Exception):
    """A rank has not reported for too long."""


class Votes:
    """What the ranks tell each other of one save, in the process group's store."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._prefix = f"ds_frozen_patch/{save.place.id}/"
        self._store = default_store() or Alone()
        self._rank, self._ranks = save.owner.rank, world_size()
        self._has_failed = False
        self._next_look = 0.0
        self._reports: dict[int, tuple[int, float]] = {}  # of each rank: how many, and when that was new

    def agree(self, name: str) -> Mapping[int, File]:
        """As `save.publishing.Agree`; nobody learns here what the others have written."""
        self.give(name)
        self.wait(name)
        if count := int(self._store.add(f"{self._prefix}{name}/failed", 0)):
            self._save.discard()
            self.give("discarded")
            self.wait("discarded")
            errors = [self._store.get(f"{self._prefix}error{number + 1}").decode() for number in range(min(count, 2))]
            raise failure(self._save.place.shown, errors, count, *self._save.place.state_of_target())
        return {}

    def give(self, name: str) -> None:
        """Count this rank, and report its error."""
        errors = self._save.failures.errors
        if errors and not self._has_failed:
            self._has_failed = True
            number = self._store.add(f"{self._prefix}errors", 1)
            text = str(errors[0]).removesuffix(".")
            self._store.set(f"{self._prefix}error{number}", f"Rank {self._rank}: {text}.")
            # Of this step: a rank that is late with the one before must not see it there.
            self._store.add(f"{self._prefix}{name}/failed", 1)
        self._store.add(self._prefix + name, 1)

    def wait(self, name: str, seconds: float = math.inf) -> None:
        """Wait until every rank has been counted.

        Raises:
            LostRankError: that takes too long, or a rank is gone.
        """
        begun = time.monotonic()
        pause, longest = (seconds * max(self._ranks / _MANY_RANKS, 1) for seconds in _POLL_SECONDS)
        while (count := self._store.add(self._prefix + name, 0)) < self._ranks:
            passed = time.monotonic() - begun
            if passed > seconds:
                raise LostRankError(f"only {count} of {self._ranks} ranks have reported after {passed:.0f} s")
            if self._rank == 0:
                self._look_for_lost()
            if lost := self._store.add(f"{self._prefix}lost", 0):
                raise LostRankError(f"rank {lost - 1} is gone")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """While this lasts, a thread reports that this rank is there."""
        is_over = threading.Event()

        def report() -> None:
            with suppress(Exception):  # the store is gone; who waits gets that error too
                while not is_over.wait(_BEAT_SECONDS):
                    self._store.add(f"{_THERE}{self._rank}", 1)

        threading.Thread(target=report, name="ds_frozen_patch: report", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _look_for_lost(self) -> None:
        """Tell all ranks of one that has not reported for too long; for rank 0.

        As long as it waits for the others, all of them report.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _BEAT_SECONDS
        for rank in range(1, self._ranks):
            reports = self._store.add(f"{_THERE}{rank}", 0)
            before, since = self._reports.get(rank, (-1, now))
            self._reports[rank] = reports, since if reports == before else now
            if now - self._reports[rank][1] > (_GRACE_SECONDS if is_ending.is_set() else _LOST_SECONDS):
                self._store.add(f"{self._prefix}lost", rank + 1)
                return


class Alone:
    """A store for one rank alone."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def add(self, key: str, number: int) -> int:
        """As a store of torch's does."""
        self._values[key] = self._values.get(key, 0) + number
        return int(self._values[key])

    def set(self, key: str, value: str) -> None:
        """As a store of torch's does."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """As a store of torch's does."""
        value: bytes = self._values[key]
        return value

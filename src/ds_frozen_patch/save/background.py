"""The end of a save that training does not wait for: its files are written, and the checkpoint gets its name.

That happens in a thread. Training uses the process group meanwhile, so the ranks agree by its store, which every rank
asks from time to time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..common.collectives import default_store, world_size
from ..common.errors import CheckpointError
from ..engine import in_flight
from ..engine.owner import is_first
from .save import Save

_POLL_SECONDS = (0.01, 0.5)
"""How long a rank waits before it asks the store again: at first, and at most."""
_STAY_SECONDS = 30.0
"""How long rank 0, which may hold the store, waits until all others have seen the outcome."""


def publish(save: Save, finish: Callable[[Save], None] | None, votes: Votes) -> CheckpointError | None:
    """Write what was recorded, and give the checkpoint its name on every disk, or on none; on every rank.

    Args:
        save: with a recorder.
        finish: see `Save.publish`.
        votes: of this save.

    Returns:
        What every rank is to raise.
    """
    try:
        return _publish(save, finish, votes)
    except Exception as error:  # of the store, or a rank is gone
        return CheckpointError(
            f"Not every rank has confirmed that {save.target} was saved ({error}). {save.state_of_target()[0]}"
        )


def _publish(save: Save, finish: Callable[[Save], None] | None, votes: Votes) -> CheckpointError | None:
    save.write_recorded()
    votes.give("written", save)
    if save.publishes:
        votes.wait("written")
        if not votes.failures:
            save.rename(finish)
    votes.give("decided", save)
    votes.wait("decided")
    error = None
    if failures := votes.failures:
        save.undo_rename()
        error = save.failure(votes.errors(), failures, save.state_of_target()[0])
        save.discard()
    else:
        save.close()
    votes.give("seen", save)
    if is_first(save.owner):
        with suppress(CheckpointError):
            votes.wait("seen", _STAY_SECONDS)
    return error


class Votes:
    """What the ranks tell each other of one save, in the process group's store."""

    def __init__(self, save: Save) -> None:
        self._prefix = f"ds_frozen_patch/{save.id}/"
        self._store = default_store() or Alone()
        self._ranks = world_size()
        self._has_failed = False

    @property
    def failures(self) -> int:
        """How many ranks have failed."""
        return int(self._store.add(f"{self._prefix}failed", 0))

    def errors(self) -> list[str]:
        """The first two errors."""
        return [self._store.get(f"{self._prefix}error{number + 1}").decode() for number in range(min(self.failures, 2))]

    def give(self, name: str, save: Save) -> None:
        """Count this rank, and report its error."""
        if save.failed and not self._has_failed:
            self._has_failed = True
            number = self._store.add(f"{self._prefix}errors", 1)
            text = str(save.failed[0]).removesuffix(".")
            self._store.set(f"{self._prefix}error{number}", f"Rank {save.owner.rank}: {text}.")
            self._store.add(f"{self._prefix}failed", 1)
        self._store.add(self._prefix + name, 1)

    def wait(self, name: str, seconds: float = math.inf) -> None:
        """Wait until every rank has been counted, at most so many seconds, and `in_flight.patience`.

        Raises:
            CheckpointError: that takes too long.
        """
        begun, pause = time.monotonic(), _POLL_SECONDS[0]
        while (count := self._store.add(self._prefix + name, 0)) < self._ranks:
            passed = time.monotonic() - begun
            if passed > min(seconds, in_flight.patience):
                raise CheckpointError(f"only {count} of {self._ranks} ranks have reported after {passed:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])


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

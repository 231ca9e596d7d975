"""How ranks agree: a step gives every rank the results of all, or raises the same error on all.

In a save or a load the ranks meet in a collective. While they train they must not, so there the same steps meet in the
process group's key-value store.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .common.errors import CheckpointError, CheckpointMismatchError, PatchError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

BEAT_SECONDS = 10.0
LOST_SECONDS = 300.0
"""A rank reports as often as the first says, however long it writes; after so long without, it is given up."""
GRACE_SECONDS = 30.0
"""The limit instead of `LOST_SECONDS` while an error or a signal ends rank 0; and how long rank 0 keeps the store."""
_POLL_SECONDS = (0.01, 0.5)
"""How long a rank waits before it asks the store again: at first, and at most."""
_MANY_RANKS = 512
"""More ranks ask less often, so that the one process that serves the store does not get more requests a second."""
_OURS = "ds_frozen_patch/"
_KINDS = {kind.__name__: kind for kind in (CheckpointError, CheckpointMismatchError, PatchError)}


class LostRankError(Exception):
    """A rank has not reported for too long."""


@dataclass
class Ranks(ABC):
    """The steps of one save or load, which every rank takes in the same order.

    Derived classes say what a rank reports after a failure, and what all raise then.

    Attributes:
        device: where the process group's backend can reach a tensor.
        errors: of this rank. They are raised at the end of the next step, since the other ranks wait in it.
        store: where the ranks meet; None for collectives.
    """

    device: Any
    errors: list[Exception] = field(default_factory=list, init=False)
    store: Store | None = field(default=None, init=False)

    def step(
        self, what: str, local: Callable[[], Sequence[int] | None] | None = None, width: int = 0
    ) -> Iterable[list[int]]:
        """Call `local`, unless this rank has an error already, and share what it returns; every rank must call it.

        That costs one small collective, and another one after a failure. The step is also a barrier.

        Args:
            what: the step does, for messages.
            local: returns at most `width` integers of 64 bits.
            width: of the results; shorter ones are filled with zeros.

        Returns:
            The result of each rank, by rank. If the ranks meet in the store, only who iterates reads it, and must do so
            before the next step.

        Raises:
            Exception: on every rank, if one has an error: what `failure` returns.
        """
        numbers: Sequence[int] = ()
        if local is not None and not self.errors:
            with self.deferred():
                numbers = local() or ()
        row = [bool(self.errors), *numbers, *[0] * (width - len(numbers))]
        if (store := self.store) is None:
            rows = gather_numbers(row, self.device)
            if any(has_failed for has_failed, *_ in rows):
                self._raise(gather(self.report()))
            return [numbers for _, *numbers in rows]
        if width:
            store.put(row)
        if store.count(what, bool(self.errors)):
            store.put(self.report())
            store.count(what)
            store.judge(lambda: self._raise([*store.values()]))
        return map(itemgetter(slice(1, None)), store.values()) if width else ()

    @contextmanager
    def deferred(self, path: Any = None) -> Iterator[None]:
        """Record an error in place of raising it: this rank must not miss the step that follows.

        Args:
            path: of what cannot be read or written; None for that of the save or load.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, (CheckpointError, CheckpointMismatchError)):
                recorded = CheckpointError(self.explained(error, path))
                recorded.__cause__ = error
                error = recorded
            self.errors.append(error)

    @abstractmethod
    def explained(self, error: Exception, path: Any) -> str:
        """The text of what is recorded of an error that is not ours."""

    @abstractmethod
    def report(self) -> Any:
        """What the others are told after a failure, as JSON can represent it; also by ranks without an error."""

    @abstractmethod
    def failure(self, reports: list[Any]) -> Exception:
        """What this rank raises, given the reports of all ranks, by rank."""

    def _raise(self, reports: list[Any]) -> NoReturn:
        error, own = self.failure(reports), next(iter(self.errors), None)
        if error is not own:
            error.__cause__ = own
        raise error


class Store:
    """The process group's store, as the place where ranks meet.

    No rank reads what all others have written: rank 0 does, and the others read its result. So the requests grow with
    the number of ranks, not with its square.

    Args:
        store: of torch's.
        name: of what all ranks do equally often. The store counts each rank's attempts at it.
        attempts: 0 if this one does not count before `finish`.
        is_ending: returns whether a rank is given up sooner, see `GRACE_SECONDS`.
    """

    def __init__(self, store: Any, name: str, attempts: int = 1, is_ending: Callable[[], bool] = lambda: False) -> None:
        self.rank, self.ranks = rank(), world_size()
        self._store, self._is_ending = store, is_ending
        self._attempts = f"{_OURS}{name}/{self.rank}"
        self._name = f"{_OURS}{name}/{store.add(self._attempts, attempts)}/"
        self._steps = 0
        self._next_look = 0.0
        self._beats: dict[int, tuple[int, float]] = {}  # of each rank: how many, and when that was new

    def finish(self) -> None:
        """Let this attempt count."""
        self._store.add(self._attempts, 1)

    def put(self, value: Any) -> None:
        """Write what this rank has to say; the last time counts."""
        self._store.set(f"{self._name}rank{self.rank}", json.dumps(value))

    def values(self) -> Iterator[Any]:
        """What the ranks have written, by rank, read one by one."""
        return (json.loads(self._store.get(f"{self._name}rank{number}")) for number in range(self.ranks))

    def missing(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """The ranks that have written nothing after so many seconds; raises torch's error if the store is gone."""
        deadline, missing = time.monotonic() + seconds, []
        for number in ranks:
            try:
                left = max(deadline - time.monotonic(), 0.01)
                self._store.wait([f"{self._name}rank{number}"], timedelta(seconds=left))
            except RuntimeError as error:
                if type(error).__name__ == "DistNetworkError":
                    raise  # rank 0, which serves the store, is gone
                missing.append(number)  # a timeout
        return missing

    def first(self, local: Callable[[], T], encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> T:
        """What `local` returns on rank 0, or the error that it raises there, on every rank."""
        self._steps += 1
        key = f"{self._name}{self._steps}"
        if self.rank:
            failed, _, content = self._store.get(key).partition(b"\n")
            if failed:
                raise _KINDS[failed.decode()](content.decode())
            return decode(content)
        try:
            result = local()
            content = b"\n" + encode(result)
        except Exception as error:
            kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
            text = str(error) if kind else f"{type(error).__name__}: {error}"
            self._store.set(key, f"{kind or CheckpointError.__name__}\n{text}")
            if not kind:
                raise CheckpointError(text) from error
            raise
        self._store.set(key, content)
        return result

    def judge(self, check: Callable[[], None]) -> None:
        """Raise on every rank what `check` raises on rank 0."""
        self.first(check, lambda _: b"", lambda _: None)

    def count(self, what: str, has_failed: bool = False) -> int:
        """Wait until all ranks have called this; return how many of them have failed."""
        self._steps += 1
        key = f"{self._name}{self._steps}"
        if has_failed:  # counted for each step: a rank that is late with the one before must not see it there
            self._store.add(f"{key}/failed", 1)
        self._store.add(key, 1)
        self._wait(key, what)
        return int(self._store.add(f"{key}/failed", 0))

    def leave(self) -> None:
        """Tell rank 0 that this one needs the store no more; rank 0, which may serve it, waits for that."""
        self._store.add(f"{self._name}left", 1)
        if self.rank == 0:
            with suppress(LostRankError):
                self._wait(f"{self._name}left", "leave", GRACE_SECONDS)

    def _wait(self, key: str, what: str, seconds: float = float("inf")) -> None:
        begun = time.monotonic()
        pause, longest = (seconds * max(self.ranks / _MANY_RANKS, 1) for seconds in _POLL_SECONDS)
        while (count := self._store.add(key, 0)) < self.ranks:
            passed = time.monotonic() - begun
            if passed > seconds:
                raise LostRankError(f"only {count} of {self.ranks} ranks have reported after {passed:.0f} s")
            if self.rank == 0:
                self._look_for_lost()
            if lost := self._store.add(f"{self._name}lost", 0):
                raise LostRankError(f"rank {lost - 1} is gone, and the others wait for it to {what}")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While this lasts, a thread reports that this rank is there: by one key in all saves, as a store keeps all."""
        is_over = threading.Event()

        def beat() -> None:
            with suppress(Exception):  # the store is gone; who waits gets that error too
                while not is_over.wait(BEAT_SECONDS):
                    self._store.add(f"{_OURS}there/{self.rank}", 1)

        threading.Thread(target=beat, name="ds_frozen_patch: report", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _look_for_lost(self) -> None:
        """On rank 0, tell all ranks of one that has not reported for too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + BEAT_SECONDS
        for number in range(1, self.ranks):
            beats = self._store.add(f"{_OURS}there/{number}", 0)
            before, since = self._beats.get(number, (-1, now))
            self._beats[number] = beats, since if beats == before else now
            if now - self._beats[number][1] > (GRACE_SECONDS if self._is_ending() else LOST_SECONDS):
                self._store.add(f"{self._name}lost", number + 1)
                return


def differences(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ranks differ in, given the values of each, as texts such as "fsync: True on rank 0, False on rank 1"."""
    lines = []
    for key in dict.fromkeys(key for own in values for key in own):
        ranks: dict[str, list[int]] = {}
        for number, own in enumerate(values):
            ranks.setdefault(repr(own.get(key)), []).append(number)
        if len(ranks) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} on rank {listed(who)}" for value, who in ranks.items()))
    return lines


def listed(ranks: Sequence[int], limit: int = 4) -> str:
    """The first of some ranks, and how many more there are."""
    more = f" and {len(ranks) - limit} more" if len(ranks) > limit else ""
    return ", ".join(map(str, ranks[:limit])) + more


# Collectives


def world_size() -> int:
    """The number of ranks, 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The rank, 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def gather_numbers(numbers: Sequence[int], device: Any) -> list[list[int]]:
    """The numbers of each rank, by rank; every rank must call it, with equally many integers of 64 bits.

    Args:
        numbers: of this rank.
        device: where the process group's backend can reach a tensor.
    """
    import torch
    import torch.distributed as dist

    if (ranks := world_size()) == 1:
        return [list(numbers)]
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = tensor.new_empty(ranks, len(numbers))
    dist.all_gather([*everyone], tensor)
    by_rank: list[list[int]] = everyone.tolist()
    return by_rank


def add_up(numbers: torch.Tensor, device: Any) -> torch.Tensor:
    """The sums of the ranks' integers, element by element, on the CPU.

    Args:
        numbers: on the CPU, with the same shape and dtype on every rank.
        device: as for `gather_numbers`.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return numbers
    shared = numbers.to(device)
    dist.all_reduce(shared)
    return shared.cpu()


def gather(item: T) -> list[T]:
    """Gather an object of each rank; every rank must call it. Slower than `gather_numbers`, so for rare cases."""
    import torch.distributed as dist

    if world_size() == 1:
        return [item]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, item)
    return everyone


def digest(value: object) -> int:
    """A hash of 63 bits of the `repr` of a value; never 0."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1 or 1


def default_store() -> Any | None:
    """The key-value store of the default process group, or None: one rank alone, or a backend without one (MPI)."""
    import torch.distributed as dist

    if world_size() == 1:
        return None
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return get() if get is not None else None

"""Checkpoints of Trainer and Accelerate at addresses: which are there, and what these frameworks read of one.

Nothing imports this where no address is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..buckets import address_of, below, bring_others, look, put, release, remove, scratch_of
from ..common.errors import CheckpointError
from ..common.files import is_state
from ..ranks import Ranks, rank
from .plain import last_whole, logger_of, numbered

_OF_A_RANK = re.compile(r"(?:rng_state|random_states)_(\d+)\.(?:pth|pkl)")


def is_whole(folder: Path, last: str) -> bool:
    """Whether a checkpoint has `latest`, which its engine writes last, and the file that its framework does."""
    return {"latest", last} <= {Path(item["name"]).name for item in look(folder, "ls", detail=True) or ()}


@contextmanager
def uploading(address: str, *reads: str) -> Iterator[str]:
    """A scratch folder, whose files are uploaded at the end of the block.

    Args:
        address: where the files are uploaded to.
        reads: names of files there that are downloaded first.

    Raises:
        CheckpointError: a download or an upload has failed.
    """
    place, failed = scratch_of(address), list[Exception]()
    try:
        try:
            place.mkdir(parents=True)
            for name in reads:
                look(place / name, "get_file", lpath=str(place / name))
        except (
            CheckpointError,
            OSError,
        ) as error:  # raised later: other ranks may wait in a collective
            failed.append(error)
        yield str(place)
        try:
            if failed:
                raise failed[0]
            put(item for item in place.rglob("*") if item.is_file())
        except OSError as error:
            raise CheckpointError(f"{address} cannot be written: {type(error).__name__}: {error}") from error
    finally:
        release(place)


@contextmanager
def _forgiving(place: Path) -> Iterator[None]:
    """Warn if something cannot be removed: the new checkpoint is saved, and the other ranks go on."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        logger_of("").warning("Older checkpoints at %s cannot be removed: %s", address_of(place), error)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, which is none without `latest`."""
    with _forgiving(folder):
        remove([folder / "latest", *below(folder)])


def remove_old(newest: Path, prefix: str, limit: int, *kept: Path) -> None:
    """Remove the oldest of the checkpoints in a folder, as Trainer does on a disk.

    Args:
        newest: which stays. Those of higher numbers are older: the run has resumed from one before them.
        prefix: of all their names.
        limit: how many stay.
        kept: others that stay in any case.
    """
    with _forgiving(newest.parent):
        there = numbered(newest.parent, rf"{prefix}(\d+)")
        order = dict.fromkeys([*(there[there.index(newest) :] if newest in there else ()), *there])
        old = [item for item in order if item not in (newest, *kept)]
        for item in old[: max(len(there) - max(limit, len({newest, *kept})), 0)]:
            remove_checkpoint(item)


@dataclass
class Readers(Ranks):
    """The ranks, each of which reads what a framework has written at an address."""

    address: str

    def explained(self, error: Exception, path: Any) -> str:
        """What cannot be read, and why."""
        return f"Rank {rank()}: {path or self.address} cannot be read: {type(error).__name__}: {error}"

    def report(self) -> str:
        """This rank's error."""
        return str(self.errors[0]) if self.errors else ""

    def failure(self, reports: list[Any]) -> CheckpointError:
        """The errors of all ranks."""
        return CheckpointError("\n".join(dict.fromkeys(filter(None, reports))))

    def newest(self, prefix: str, last: str, framework: str) -> str:
        """The address of the checkpoint there of the highest number that is whole, as rank 0 sees it."""

        def look() -> list[int]:
            there = numbered(Path(self.address), rf"{prefix}(\d+)")
            newest = last_whole(there, lambda folder: is_whole(folder, last), logger_of(framework))
            if newest is None:
                raise CheckpointError(f"There is no checkpoint in {self.address}.")
            return [int(newest.name.removeprefix(prefix))]

        (number,), *_ = self.step("look for checkpoints", look if rank() == 0 else None, 1)
        return f"{self.address.rstrip('/')}/{prefix}{number}"

    @contextmanager
    def brought(self, leaves_out: tuple[str, ...] = ()) -> Iterator[str]:
        """A folder with what is there but for states, which an engine brings down itself.

        Args:
            leaves_out: the ends of the names of files that are not read.
        """
        place = scratch_of(self.address)

        def is_read(name: str) -> bool:
            match = _OF_A_RANK.fullmatch(name)
            return not is_state(name) and not name.endswith(leaves_out) and (not match or int(match[1]) == rank())

        def bring() -> None:
            bring_others(place, is_needed=is_read)
            if not place.is_dir():
                raise CheckpointError(f"There is no checkpoint at {place}.")

        try:
            self.step("bring down the files", bring)
            yield str(place)
        finally:
            release(place)

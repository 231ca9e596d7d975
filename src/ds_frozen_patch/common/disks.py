"""Which ranks share a disk, so that one of them renames on each: one rank per disk *publishes*.

Ranks of one node share its disks. Whether nodes do is found out once per file system: each node's first rank leaves a
marker in a folder, and every rank lists that folder. It lists and never asks for one name, because the client of a
network disk answers that from a cache (NFS: up to a minute), but asks its server for a listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .collectives import gather_numbers
from .durable import listed, make_own_folder

_MARKER = "rank"
_found: dict[tuple[int, ...], Disks] = {}


@dataclass(frozen=True)
class Disks:
    """`publishers` has, for each rank, the rank that renames on its disk."""

    publishers: tuple[int, ...]

    @property
    def are_several(self) -> bool:
        """Whether ranks have disks of their own."""
        return len(set(self.publishers)) > 1


def file_system(path: Path) -> int:
    """The number of the file system that a path is on, or would be; it is this machine's own number."""
    while True:
        try:
            return path.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        except OSError:
            return -1


def marker(folder: Path, rank: int) -> Path:
    """The file that a rank leaves in a folder."""
    return folder / f"{_MARKER}{rank}"


def find_disks(strategy: Any, file_systems: tuple[int, ...] | None, folder: Path) -> Disks:
    """The disks that a folder is on; every rank must call it.

    Args:
        strategy: whose ranks they are.
        file_systems: each rank's `file_system`; nothing is asked where they are known. None: they cannot be relied on.
        folder: is made, with a marker in it for each node.
    """
    rank = strategy.global_rank
    known = _found.get(file_systems) if file_systems is not None else None
    if known is not None:
        return known
    if strategy.local_rank == 0:
        try:
            make_own_folder(folder)
            marker(folder, rank).touch()
        except OSError:
            pass  # the save says so itself: this rank cannot write there
    gather_numbers([0], strategy.root_device)
    first = min(marked(folder), default=rank)
    firsts = [told[0] for told in gather_numbers([first], strategy.root_device)]
    disks = Disks(tuple(_follow(firsts, one) for one in range(len(firsts))))
    if file_systems is not None:
        _found[file_systems] = disks
    return disks


def marked(folder: Path) -> list[int]:
    """The ranks that have left a marker in a folder; none if it cannot be listed."""
    try:
        names = listed(folder)
    except OSError:
        return []
    return [int(number) for name in names if (number := name.removeprefix(_MARKER)) != name and number.isdecimal()]


def _follow(firsts: list[int], rank: int) -> int:
    """The rank at the end of "the first that I see", should two ranks not see the same."""
    while firsts[rank] < rank:
        rank = firsts[rank]
    return rank

"""Which ranks share a disk: one rank per disk *publishes*, which means that it renames the checkpoint there.

The ranks of one node share its disks. Whether nodes do is tested once per file system: rank 0 puts a marker into a
folder, and every rank lists that folder. If some do not find the marker, the first rank of each of their nodes puts one
too, and they list again. So on a shared disk each rank lists one name, however many nodes there are.

A rank lists and never asks for one name, because the client of a network disk answers that from its cache (NFS: up to a
minute), while a listing comes from the server.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..common.collectives import gather_numbers
from ..common.durable import make_own_folder
from ..common.work_folder import marked, marker
from .owner import Owner, is_first


@dataclass(frozen=True)
class Disks:
    """`publishers` has, for each rank, the rank that renames on its disk."""

    publishers: tuple[int, ...]

    @property
    def are_several(self) -> bool:
        """Whether ranks have disks of their own."""
        return len(set(self.publishers)) > 1


def file_system(path: Path) -> int:
    """The number that this machine gives to the file system of a path, which need not exist; -1 if that fails."""
    while True:
        try:
            return path.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        except OSError:
            return -1


def find_disks(owner: Owner, folder: Path) -> Disks:
    """The disks that a folder is on; every rank must call it.

    Args:
        owner: of the engine.
        folder: is created, with a marker in it for each disk at least.
    """
    firsts = _first_markers(owner, folder, is_marking=is_first(owner))
    if any(firsts):
        firsts = _first_markers(owner, folder, is_marking=firsts[owner.rank] != 0)
    return Disks(tuple(_follow(firsts, rank) for rank in range(len(firsts))))


def _first_markers(owner: Owner, folder: Path, *, is_marking: bool) -> list[int]:
    """The first rank whose marker each rank finds in a folder, or the rank itself; every rank must call it.

    Args:
        owner, folder: see `find_disks`.
        is_marking: whether this rank, if it is the first of its node, puts a marker there before.
    """
    if owner.local_rank == 0:
        with suppress(OSError):  # the save reports it: this rank cannot write there
            make_own_folder(folder, sync=False)
            if is_marking:
                marker(folder, owner.rank).touch()
    gather_numbers([0], owner.device)
    first = min(marked(folder), default=owner.rank)
    return [numbers[0] for numbers in gather_numbers([first], owner.device)]


def _follow(firsts: list[int], rank: int) -> int:
    """The end of the chain of first ranks, in case two ranks do not see the same markers."""
    while firsts[rank] < rank:
        rank = firsts[rank]
    return rank

"""Ranks find out which of them share a disk, and one rank on each disk publishes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from ds_frozen_patch.engine.disks import find_disks

pytestmark = [pytest.mark.promise(18), pytest.mark.everyday, pytest.mark.short]


def publishers(out: str, disks: str) -> tuple[tuple[int, ...], int]:
    """Return who publishes, and how many markers this rank's disk has.

    Args:
        out: has a folder for each disk.
        disks: the disk of each rank, as a letter; a capital if the rank is the first of its node.
    """
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    rank = int(os.environ["RANK"])
    disk = disks[rank]
    owner: Any = SimpleNamespace(rank=rank, local_rank=int(disk.islower()), device=torch.device("cpu"))
    folder = Path(out, disk.lower(), "work")
    found = find_disks(owner, folder).publishers
    torch.distributed.barrier()
    return found, len(list(folder.iterdir()))


DISKS = {
    "AAAA": ((0, 0, 0, 0), [1, 1, 1, 1]),
    "AaAa": ((0, 0, 0, 0), [1, 1, 1, 1]),
    "AaBb": ((0, 0, 2, 2), [1, 1, 1, 1]),
    "ABBb": ((0, 1, 1, 1), [1, 2, 2, 2]),
    "ABCA": ((0, 1, 2, 0), [1, 1, 1, 1]),
}
"""For the disks of four ranks: who publishes, and the markers that each rank finds."""


@pytest.mark.parametrize("disks", DISKS)
def test_who_publishes(ranks: Any, tmp_path: Path, disks: str) -> None:
    found = ranks(4, publishers, out=str(tmp_path), disks=disks)
    expected, markers = DISKS[disks]
    assert found == [(expected, count) for count in markers]

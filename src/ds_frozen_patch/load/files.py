"""The files of a checkpoint: whether all are whole and of one save, before DeepSpeed loads them.

No pickle is read. `torch.load` does not verify the checksums that `torch.save` wrote, and a file of another rank or run
loads as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..checkpoint.format.archive import check_file
from ..checkpoint.zero.layout import Layout
from ..common.errors import CheckpointError
from ..record import Record
from ..settings import current as settings
from .trust import refuse_unsafe

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch.serialization.MAGIC_NUMBER

Share = Mapping[Path, slice]
"""The files that a rank verifies, and which of their zip archive's records."""


def share(layout: Layout, rank: int, ranks: int) -> Share:
    """One rank's share of all files: whole ones, or a part of the one that all ranks load."""
    whole = {file: slice(None) for index, file in enumerate(layout.files) if index % ranks == rank}
    return {**whole, layout.model[0]: slice(rank, None, ranks)} if len(layout.model) == 1 else whole


def own_share(layout: Layout, rank: int, local_rank: int) -> Share:
    """A rank's own files, where each node has a disk of its own.

    Args:
        layout: of the rank's own files, and in ZeRO 0 to 2 the one that it shares with its node.
        rank: of all ranks.
        local_rank: of the node's.
    """
    return {file: slice(None) for file in layout.files if f"_rank_{rank}_" in file.name or local_rank == 0}


def recorded_share(folder: Path, record: Record | None, rank: int, ranks: int, *, with_optimizer: bool) -> Share:
    """A rank's share of the files that a record lists, where their layout is unknown."""
    names = sorted(record.files) if record is not None else []
    needed = [name for name in names if with_optimizer or not name.endswith("_optim_states.pt")]
    return {folder / name: slice(None) for name in needed[rank::ranks]}


def check_files(files: Share, record: Record | None) -> None:
    """Verify that files are not truncated, and unless `verify_files` is False against the record and their checksums.

    Raises:
        CheckpointError: a file is damaged, or is not the one that was saved.
    """
    with_checksums = settings().verify_files
    for file, records in files.items():
        if _is_zip(file):
            check_file(file, records=records if with_checksums else slice(0))
        if record is not None and record.files and with_checksums:
            record.check_content(file)
        refuse_unsafe(file)


def _is_zip(file: Path) -> bool:
    """Whether a file has torch's zip format; `checkpoint_serialization: false` in DeepSpeed writes an older one."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

"""Whether a checkpoint's files are whole and of one save: asked before DeepSpeed reads them.

torch does not compare what it reads with the checksums that it wrote, and a part of another rank or run fits as well.
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.format.records import check_file
from ..checkpoint.zero.layout import Layout
from ..checkpoint.zero.states import Said, check_kind, check_number_of_parts, configured_stage, said_by
from ..common.errors import CheckpointError
from .trust import look

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch.serialization.MAGIC_NUMBER


def share_of(layout: Layout, rank: int, ranks: int, with_optimizer: bool) -> list[Said]:
    """Compare the records of a rank's share of all files with their checksums.

    Returns:
        What the files of the share say of their save.

    Raises:
        CheckpointError: one is damaged, or has another kind of content than its name says.
    """
    share = []
    for index, file in enumerate(layout.files):
        is_own = index % ranks == rank
        if file == layout.model[0] and len(layout.model) == 1 and is_zip(file):
            check_file(file, first=rank, step=ranks)
        elif is_own and is_zip(file):
            check_file(file)
        if is_own:
            share += _said(layout, file, with_optimizer and index == 0)
    return share


def own_share(layout: Layout, rank: int, local_rank: int) -> list[Said]:
    """As `share_of`, where each node has a disk of its own, of a rank's own files.

    Args:
        layout: of the rank's own files, and in ZeRO 0 to 2 of the one that it shares with its node.
        rank: of all ranks.
        local_rank: of the node's.
    """
    share = []
    for file in layout.files:
        if (f"_rank_{rank}_" in file.name or local_rank == 0) and is_zip(file):
            check_file(file)
        share += _said(layout, file, False)
    return share


def _said(layout: Layout, file: Path, count_parts: bool) -> list[Said]:
    contents = look(file)
    if contents is None:
        return []  # its bytes are as they were written, so it holds what only DeepSpeed can read
    check_kind(file, contents)
    if count_parts:
        check_number_of_parts(layout, contents.state, configured_stage(contents.state))
    return [said_by(file, contents)]


def is_zip(file: Path) -> bool:
    """Whether a file is of torch's format since 1.6, which DeepSpeed's `checkpoint_serialization: false` undoes."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

"""Whether the files of a checkpoint are whole and of one save, before DeepSpeed loads them.

`torch.load` does not verify the checksums that `torch.save` wrote, and a file of another rank or run loads as well.
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.format.records import check_file
from ..checkpoint.zero.layout import Layout
from ..checkpoint.zero.states import FileDigests, check_file_kind, check_shard_count, configured_stage, digest_file
from ..common.errors import CheckpointError
from ..settings import current as settings
from .trust import inspect_file

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch.serialization.MAGIC_NUMBER


def check_share(layout: Layout, rank: int, ranks: int, with_optimizer: bool) -> list[FileDigests]:
    """Verify the checksums of one rank's share of all files, unless `verify_files` is False.

    Returns:
        The digests of the files of that share.

    Raises:
        CheckpointError: a file is damaged, or its content is not of the kind that its name says.
    """
    share = []
    for index, file in enumerate(layout.files):
        is_own = index % ranks == rank
        if file == layout.model[0] and len(layout.model) == 1:
            _check(file, slice(rank, None, ranks))
        elif is_own:
            _check(file)
        if is_own:
            share += _digest(layout, file, with_optimizer and index == 0)
    return share


def check_own_files(layout: Layout, rank: int, local_rank: int) -> list[FileDigests]:
    """As `check_share`, of a rank's own files, where each node has a disk of its own.

    Args:
        layout: of the rank's own files, and in ZeRO 0 to 2 the one that it shares with its node.
        rank: of all ranks.
        local_rank: of the node's.
    """
    share = []
    for file in layout.files:
        if f"_rank_{rank}_" in file.name or local_rank == 0:
            _check(file)
        share += _digest(layout, file, False)
    return share


def _check(file: Path, records: slice = slice(None)) -> None:
    if is_zip(file):
        check_file(file, records=records if settings().verify_files else slice(0))


def _digest(layout: Layout, file: Path, count_parts: bool) -> list[FileDigests]:
    contents = inspect_file(file)
    if contents is None:
        return []  # it contains what only DeepSpeed can read
    check_file_kind(file, contents)
    if count_parts:
        check_shard_count(layout, contents.state, configured_stage(contents.state))
    return [digest_file(file, contents)]


def is_zip(file: Path) -> bool:
    """Whether a file has torch's zip format; `checkpoint_serialization: false` in DeepSpeed writes an older one."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

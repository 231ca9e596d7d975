"""Whether a checkpoint's files are whole and of one save: asked before DeepSpeed reads them.

torch does not compare what it reads with the checksums that it wrote, and a part of another rank or run fits as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._errors import CheckpointError
from .checkpoint.archive import read
from .checkpoint.layout import Layout, UnknownLayoutError, find
from .checkpoint.records import check_file
from .checkpoint.states import Said, check_alike, check_kind, check_number_of_parts, configured_stage, said_by

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch.serialization.MAGIC_NUMBER


def check_intact(engine: Any, load_dir: str, tag: str | None, with_optimizer: bool) -> None:
    """Read all of a checkpoint's files, each rank a share; every rank must call it.

    Raises:
        CheckpointError: on every rank, if one has found a file to be missing, damaged, or of another save.
    """
    import torch.distributed as dist

    if engine.use_node_local_storage():
        return  # no rank sees all files
    problem, share = None, []
    try:
        share = _read_share(find(load_dir, tag), dist.get_rank(), dist.get_world_size(), with_optimizer)
    except UnknownLayoutError:
        pass
    except CheckpointError as error:
        problem = str(error)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (problem, share))
    if problems := dict.fromkeys(problem for problem, _ in everywhere if problem):
        raise CheckpointError("\n".join(problems))
    check_alike([said for _, share in everywhere for said in share])


def _read_share(layout: Layout, rank: int, ranks: int, with_optimizer: bool) -> list[Said]:
    """Compare the records of a rank's share with their checksums; gives what its files say."""
    share = []
    for index, file in enumerate(layout.files):
        if _is_of_old_format(file):
            continue
        if file == layout.model[0] and len(layout.model) == 1:
            check_file(file, first=rank, step=ranks)
        elif index % ranks == rank:
            check_file(file)
        if index % ranks != rank:
            continue
        try:
            contents = read(file, trust=True)
        except CheckpointError:
            continue  # its bytes are as they were written, so it holds what only DeepSpeed can read
        check_kind(file, contents)
        share.append(said_by(file, contents))
        if index == 0 and with_optimizer:
            check_number_of_parts(layout, contents.state, configured_stage(contents.state))
    return share


def _is_of_old_format(file: Path) -> bool:
    """Whether this is what torch saved before 1.6, and DeepSpeed with `checkpoint_serialization: false`: no zip."""
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC

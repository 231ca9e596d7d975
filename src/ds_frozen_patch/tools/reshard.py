"""Convert a checkpoint to a different number of ranks, for DeepSpeed to load as usual.

Only the optimizer's state, and in ZeRO-3 the frozen parameters of a full checkpoint, are sharded by rank. They are
sharded anew; everything else is kept, so nothing is lost that a load restores.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.zero.labels import resharded_save_id
from ..checkpoint.zero.layout import find_layout
from ..checkpoint.zero.repartition import plan_repartition
from ..checkpoint.zero.states import read_states
from ..common.errors import CheckpointError
from ..common.text import human_bytes, printable
from ..core.record import identify
from ..load.files import read_record
from .output import check_output, copy_other_files, new_output


@dataclass(frozen=True)
class Resharded:
    """What `reshard` has written, or would write.

    Attributes:
        source: the path of the checkpoint, as passed.
        target: the path of the output, as passed.
        zero_stage: 1 to 3, of both.
        ranks_before: the world size of the source.
        ranks: the world size of the target.
        size: the size of the written tensors, in bytes.
    """

    source: str
    target: str
    zero_stage: int
    ranks_before: int
    ranks: int
    size: int

    def __str__(self) -> str:
        return printable(
            f"{self.target}: {human_bytes(self.size)}, ZeRO stage {self.zero_stage}, for {self.ranks} ranks instead of"
            f" {self.ranks_before}."
        )


def reshard(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    ranks: int,
    trust: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> Resharded:
    """Write the checkpoint that `ranks` ranks would have saved.

    A run with that world size resumes from it as from its own checkpoints. The source can be trainable-only or full, of
    ZeRO 1 to 3, and of any optimizer whose state is elementwise. Time is proportional to the size; memory holds a few
    MiB and the files' pickles; only the result takes disk space.

    Args:
        source: the directory of a DeepSpeed checkpoint. It is not changed.
        target: the directory to create.
        tag: the subdirectory to read; by default the one named in `latest`.
        ranks: the new world size: nodes times devices.
        trust: accept files that name unexpected classes, and links out of the checkpoint. No code of theirs is run.
        dry_run: write nothing.
        quiet: do not show progress on stderr.

    Returns:
        The world sizes before and after.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be resharded; the target exists, or cannot be
            written. Nothing is left there.
        ValueError: `ranks` is less than 1.
    """
    states = read_states(source, tag, trust)
    if states.world_size == ranks and states.layout.optimizer:
        raise CheckpointError(f"{source} already is a checkpoint of {ranks} ranks.")
    resharded = plan_repartition(states, ranks)
    path, root = Path(target), states.layout.root
    done = Resharded(str(source), str(target), states.zero_stage, states.world_size, ranks, resharded.size)
    if dry_run:
        check_output(path, root)
        return done
    with new_output(path, root) as made:
        folder = made / states.layout.tag
        folder.mkdir(parents=True)
        resharded.write(folder, quiet)
        copy_other_files(states.layout, made)
    return done


def reshard_inside(source: str | Path, tag: str | None, *, ranks: int, quiet: bool = True) -> str:
    """Create a subdirectory for `ranks` ranks inside a checkpoint, beside the one of the tag, unless it exists.

    It stays with the checkpoint, wherever that is moved. It is created anew if it was made from other files, because
    these have been overwritten since.

    Returns:
        The name of the subdirectory, for DeepSpeed to use as the tag.

    Raises:
        CheckpointError: as `reshard`.
    """
    layout = find_layout(source, tag)
    folder = layout.root / f"{layout.tag}.ranks{ranks}"
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, not a directory that was created for {ranks} ranks. Remove it.")
    if folder.is_dir():
        record = read_record(folder)
        if record is not None and record.save == resharded_save_id(identify(layout.files), ranks):
            return folder.name
        shutil.rmtree(folder)
    try:
        resharded = plan_repartition(read_states(source, tag, trust=True), ranks)
        with new_output(folder) as made:
            made.mkdir()
            resharded.write(made, quiet)
    except CheckpointError:
        if not folder.is_dir():  # else another job has just created it
            raise
    return folder.name

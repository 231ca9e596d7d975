"""A checkpoint of some ranks becomes what another number of ranks would have saved, which DeepSpeed loads like any.

Only what the optimizer holds is cut into parts by rank, and in ZeRO-3 the frozen parameters of a full checkpoint. They
are cut anew, and all else stays as it is: so nothing is lost that a load restores.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import CheckpointError
from ...common.text import human_bytes, printable
from ..format.archive import read
from ..zero.labels import resharded, save_of
from ..zero.layout import Layout, find
from ..zero.repartition import plan
from ..zero.states import load
from .output import check_output, copy_other_files, new_output


@dataclass(frozen=True)
class Resharded:
    """What `reshard` has done, or would do.

    Attributes:
        source: the checkpoint's path, as it was given.
        target: the output's path, as it was given.
        zero_stage: 1 to 3, of both.
        ranks_before: how many ranks have saved the source.
        ranks: how many can resume from the target.
        size: the bytes of the tensors that are written.
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
    """Write the checkpoint that `ranks` ranks would have saved in place of one that others have.

    A run with that many ranks resumes from it as from any of its own. It can be trainable-only or full, of ZeRO 1 to 3,
    and of any optimizer whose state has a value, or none, for each element of the parameters. It takes time in
    proportion to the bytes, memory for a few MiB and the files' pickles, and room on disk for the result alone.

    Args:
        source: the directory of a DeepSpeed checkpoint. It stays as it is.
        target: the directory to make.
        tag: the folder in the source; without one, what its file `latest` says.
        ranks: how many are to resume from it: nodes times devices.
        trust: also read files that name classes which do not belong in a checkpoint, and follow links out of it. None
            of them is run.
        dry_run: write nothing.
        quiet: show no progress on stderr.

    Returns:
        For how many ranks it was and is.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be resharded; there is something at the target
            already, or it cannot be written. Nothing is left there then.
        ValueError: `ranks` is no positive number.
    """
    states = load(source, tag, trust)
    if states.world_size == ranks and states.layout.optimizer:
        raise CheckpointError(f"{source} is of {ranks} ranks already.")
    made_of_it = plan(states, ranks)
    path, root = Path(target), states.layout.root
    done = Resharded(str(source), str(target), states.zero_stage, states.world_size, ranks, made_of_it.size)
    if dry_run:
        check_output(path, root)
        return done
    with new_output(path, root) as made:
        folder = made / states.layout.tag
        folder.mkdir(parents=True)
        made_of_it.write(folder, quiet)
        copy_other_files(states.layout, made)
    return done


def reshard_inside(source: str | Path, tag: str | None, *, ranks: int, quiet: bool = True, trust: bool = True) -> str:
    """Make a folder for `ranks` ranks inside of a checkpoint, beside the one of the tag, unless it is there.

    There it goes where the checkpoint goes, and with it. One that is older than the tag's own files, or of another
    save, is made anew: somebody has saved over them since. So is one of no known save without `trust`.

    Returns:
        The folder's name, which DeepSpeed takes for a tag.

    Raises:
        CheckpointError: as `reshard`.
    """
    layout = find(source, tag)
    folder = layout.root / f"{layout.tag}.ranks{ranks}"
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, and no folder that was made for {ranks} ranks. Remove it.")
    if folder.is_dir():
        if min(_times(folder.iterdir())) >= max(_times(layout.files)) and _is_of(folder, layout, ranks, trust):
            return folder.name
        shutil.rmtree(folder)
    try:
        made_of_it = plan(load(source, tag, trust=True), ranks)
        with new_output(folder) as made:
            made.mkdir()
            made_of_it.write(made, quiet)
    except CheckpointError:
        if not folder.is_dir():  # else another job has made it meanwhile
            raise
    return folder.name


def _is_of(folder: Path, layout: Layout, ranks: int, trust: bool) -> bool:
    """Whether the label of a resharded folder says that it was made of this checkpoint."""
    before, made = (_save_of(file) for file in (layout.model[0], folder / layout.model[0].name))
    if before is None and made is None:
        return trust
    return made == resharded(before, ranks)


def _save_of(file: Path) -> object:
    try:
        return save_of(read(file, trust=True).state)
    except CheckpointError:
        return None


def _times(files: Iterable[Path]) -> list[int]:
    return [file.stat().st_mtime_ns for file in files]

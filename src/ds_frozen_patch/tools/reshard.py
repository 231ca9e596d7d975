"""Convert a checkpoint to another ZeRO stage, number of ranks or precision, for DeepSpeed to load as usual.

Only the optimizer's state, and in ZeRO-3 the parameters, are sharded by rank. They are sharded anew; everything else is
kept, so nothing is lost that a load restores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from ..checkpoint.format.records import Records
from ..checkpoint.format.stored import iter_tensors
from ..checkpoint.format.writing import write_archive
from ..checkpoint.zero.opening import open_checkpoint
from ..checkpoint.zero.resharding import Resharding, target_for
from ..common.errors import CheckpointError
from ..common.text import human_bytes, printable, progress
from ..record import KEY, identify, write_record
from .output import check_output, copy_other_files, new_output

Precision = Literal["bf16", "fp32"]  # in fp16 a run needs a scale of its losses, which no other has
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Resharded:
    """What `reshard` has written, or would write.

    Attributes:
        source: the path of the checkpoint, as passed.
        target: the path of the output, as passed.
        zero_stage: 0 to 3, of the target.
        zero_stage_before: that of the source.
        ranks_before: the world size of the source.
        ranks: the world size of the target.
        size: the size of the written tensors, in bytes.
    """

    source: str
    target: str
    zero_stage: int
    zero_stage_before: int
    ranks_before: int
    ranks: int
    size: int

    def __str__(self) -> str:
        stage, ranks = (
            f"{now}" if now == before else f"{now} instead of {before}"
            for now, before in ((self.zero_stage, self.zero_stage_before), (f"{self.ranks} ranks", self.ranks_before))
        )
        return printable(f"{self.target}: {human_bytes(self.size)}, ZeRO stage {stage}, for {ranks}.")


def reshard(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    ranks: int | None = None,
    stage: int | None = None,
    precision: Precision | None = None,
    restart_optimizer: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> Resharded:
    """Write the checkpoint that another number of ranks, ZeRO stage or precision would have saved.

    Such a run resumes from it as from its own checkpoints. The source can be trainable-only or full, of any optimizer
    whose state is elementwise. Time is proportional to the size; memory holds a few MiB and the files' pickles; only
    the result takes disk space.

    Args:
        source: the directory of a DeepSpeed checkpoint. It is not changed.
        target: the directory to create.
        tag: the subdirectory to read; by default the one named in `latest`.
        ranks: the new world size, nodes times devices; by default that of the source.
        stage: the new ZeRO stage, 0 to 3; by default that of the source.
        precision: of the run that is to load it, "bf16" or "fp32"; by default that of the source. Masters and moments
            stay as they are.
        restart_optimizer: write the masters without the optimizer's state, which can then be of any kind.
        dry_run: write nothing.
        quiet: do not show progress on stderr.

    Returns:
        The stages and world sizes before and after.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be resharded; the target exists, or cannot be
            written. Nothing is left there.
        ValueError: `ranks` is less than 1, `stage` is not 0 to 3, `precision` is another word, or all are None.
    """
    if ranks is None and stage is None and precision is None:
        raise ValueError("pass ranks, stage or precision")
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision must be 'bf16' or 'fp32', not {precision!r}")
    checkpoint = open_checkpoint(source, tag)
    states = checkpoint.states
    before = target_for(states)
    has_state = False if restart_optimizer else None
    now = target_for(states, ranks=ranks, stage=stage, precision=precision, has_state=has_state)
    if now == before:
        raise CheckpointError(
            f"{source} already is a checkpoint of {now.ranks} ranks in ZeRO stage {now.stage}, and in {now.precision}."
        )
    if now == replace(before, ranks=now.ranks) and now.stage == 0:
        raise CheckpointError(
            f"{source} has ZeRO stage 0, and its optimizer's state is not sharded by rank: any number of ranks can"
            " resume from it as it is."
        )
    resharding = Resharding(states, checkpoint.weights, now)
    files = dict(resharding.files())
    size = sum(item.nbytes for s in files.values() for item in {tensor.storage for _, tensor in iter_tensors(s)})
    done = Resharded(str(source), str(target), now.stage, before.stage, before.ranks, now.ranks, size)
    path, root = Path(target), states.layout.root
    if dry_run:
        check_output(path, root)
        return done
    with new_output(path, root) as output:
        folder = output / states.layout.tag
        folder.mkdir(parents=True)
        save = f"{identify(states.layout.files)} in stage {now.stage} for {now.ranks} ranks"
        with progress("writing", size, quiet) as advance, Records(progressed=advance) as records:
            for name, state in files.items():
                kept = {**state, KEY: save} if KEY in state else state
                write_archive(folder / name, kept, partial(resharding.tensors.content, records))
        write_record(folder, replace(resharding.record, save=save))
        copy_other_files(states.layout, output)
    return done

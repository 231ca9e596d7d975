"""Verify that a checkpoint is complete, undamaged and from one save, and optionally that a base fits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import dtypes
from ..checkpoint.format.archive import check_file
from ..checkpoint.format.records import Records
from ..checkpoint.zero.layout import find_layout
from ..checkpoint.zero.opening import Checkpoint, open_checkpoint
from ..common.errors import CheckpointError, named
from ..common.files import RECORD
from ..common.text import human_bytes, printable_lines, progress
from ..parameters import PARAMETER
from ..record import Record
from .base import Base, match_base, open_base, without_quantized, wrong_values


@dataclass(frozen=True)
class Verified:
    """What `verify` has found.

    Attributes:
        path: the path of the checkpoint, as passed.
        problems: a description of each damaged file, or else of what is wrong with them; empty if there is nothing.
        files: the number of files.
        size: the size of all files, in bytes.
        trained: the number of trained parameters.
        left_out: the number of parameters that were left out.
        compared: how many of these match the base.
        unverified: the names of what was left out and cannot be verified, because it has no fingerprint or the base has
            no tensor for it.
        was_quantized: whether the run quantized weights that the base has unquantized: they are compared at load only.
    """

    path: str
    problems: tuple[str, ...]
    files: int
    size: int
    trained: int
    left_out: int
    compared: int
    unverified: tuple[str, ...]
    was_quantized: bool = False

    def __str__(self) -> str:
        if self.problems:
            count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
            return printable_lines([f"{self.path}: {count}.", *(f"- {problem}" for problem in self.problems)])
        lines = [
            f"{self.path}: no problems in {self.files} files, {human_bytes(self.size)}.",
            f"{self.trained} trained parameters; {self.left_out} left out.",
        ]
        if self.compared:
            lines.append(f"{self.compared} of them match the base.")
        if self.unverified:
            lines.append(f"Cannot be verified: {named(self.unverified, 3)}.")
        if self.was_quantized:
            lines.append("The run quantized its base, which is compared at load only.")
        return printable_lines(lines)


def verify(
    path: str | Path,
    tag: str | None = None,
    *,
    base: str | Path | None = None,
    quiet: bool = True,
) -> Verified:
    """Read an entire checkpoint and report its problems.

    It verifies the checksum of every record, that the ranks' shards are from one save and have the sizes that the
    shapes require, that the fp32 masters match the model's weights (in ZeRO 1 and 2), and that the files are those
    of the record.

    Args:
        path: the directory of a DeepSpeed checkpoint, full or trainable-only.
        tag: the subdirectory to read; by default the one named in `latest`.
        base: what the run was built from (see `consolidate`), to compare with the fingerprints in the record.
        quiet: do not show progress on stderr.

    Returns:
        The problems, and how much was read.

    Raises:
        CheckpointError: there is no base at its path, or it cannot be read. Problems of the checkpoint itself are
            returned, not raised.
    """
    opened = open_base(base) if base is not None else None
    problems: list[str] = []
    files: tuple[Path, ...] = ()
    checkpoint, size = None, 0
    try:
        files = find_layout(path, tag).files
        size = sum(file.stat().st_size for file in files)
        with progress("reading", size, quiet) as progressed:
            for file in files:
                try:
                    check_file(file, progressed)
                except CheckpointError as error:
                    problems.append(str(error))
        if not problems:
            checkpoint = _open(path, tag)
    except CheckpointError as error:
        problems.append(str(error))
    if checkpoint is None:
        return Verified(str(path), tuple(problems), len(files), size, 0, 0, 0, ())
    record = checkpoint.record
    if record.is_lost:
        folder = files[0].parent
        problems.append(f"{folder} lacks {RECORD}, so it cannot be verified that its files are those that were saved.")
    compared, was_quantized = 0, False
    unverified = [entry.name for entry in record.left_out if entry.fingerprint is None]
    if opened is not None:
        was_quantized = len(without_quantized(record, opened).left_out) < len(record.left_out)
        wrong, compared, unknown = _compare_base(record, opened, quiet)
        problems += wrong
        unverified = list(dict.fromkeys([*unverified, *unknown]))
        if record.left_out and not wrong and len(unverified) == len(record.left_out):
            problems.append(
                "Nothing could be compared with the base: the record has no fingerprints (prune wrote none), or none"
                " of a tensor that the base has."
            )
    return Verified(
        path=str(path),
        problems=tuple(problems),
        files=len(files),
        size=size,
        trained=len(checkpoint.weights.trained),
        left_out=len(record.parameters),
        compared=compared,
        unverified=tuple(unverified),
        was_quantized=was_quantized,
    )


def _open(path: str | Path, tag: str | None) -> Checkpoint:
    """Open a checkpoint, also in a stage 0 that does not tell what was trained: that is not a problem."""
    try:
        return open_checkpoint(path, tag, trainable=())
    except CheckpointError:
        return open_checkpoint(path, tag)


def _compare_base(record: Record, base: Base, quiet: bool) -> tuple[list[str], int, list[str]]:
    """The problems of a base, how many of its parameters match, and the names of those that cannot be verified."""
    if not record.is_trainable_only:
        return ["The checkpoint has no record of what was left out, so its base cannot be verified."], 0, []
    try:
        there = match_base(without_quantized(record, base), base)
    except CheckpointError as error:
        return [str(error)], 0, []
    fingerprinted = {entry.name for entry in there if entry.fingerprint is not None}
    unknown = [entry.name for entry in record.left_out if entry.name not in fingerprinted]
    wrong, right = [], 0
    cost = sum(tensor.nbytes for entry, tensor in there.items() if entry.fingerprint is not None)
    with progress("base", cost, quiet) as progressed, Records(progressed=progressed) as records:
        for entry, tensor in there.items():
            if entry.fingerprint is not None:
                values = dtypes.convert(records.read(tensor), tensor.dtype, entry.dtype)
                same = dtypes.matches_fingerprint(entry, values)
                wrong += [] if same else [entry.name]
                right += same and entry.kind == PARAMETER
    if wrong:
        return [wrong_values(base, wrong, record)], right, unknown
    return [], right, unknown

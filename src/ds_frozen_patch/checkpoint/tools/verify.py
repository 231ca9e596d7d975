"""Whether a checkpoint can be relied on: all its files there, whole, and of one save, and its base the right one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ...common.errors import CheckpointError, CheckpointMismatchError, named
from ...common.progress import progress
from ...common.text import human_bytes, printable_lines
from ...manifest import Manifest
from ...parameters import PARAMETER, plain
from .. import dtypes as converting
from ..format.records import Records, check_file
from ..format.stored import ITEM_SIZES
from ..zero.states import States, check_together, load
from ..zero.weights import Weights, check_one_run, weights
from .base import Base, open_base, other_values, tensors_for


@dataclass(frozen=True)
class Verified:
    """What `verify` has found.

    Attributes:
        path: the checkpoint's path, as it was given.
        problems: a sentence or two for each; empty where all is well.
        files: how many there are.
        size: the bytes of all files.
        trained: how many parameters were trained.
        left_out: how many parameters were left out.
        compared: how many of these are in the base as they were at the save.
        unverified: the names of what was left out and cannot be compared: without a fingerprint, or in the base only as
            other tensors.
    """

    path: str
    problems: tuple[str, ...]
    files: int
    size: int
    trained: int
    left_out: int
    compared: int
    unverified: tuple[str, ...]

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
        return printable_lines(lines)


def verify(
    path: str | Path,
    tag: str | None = None,
    *,
    base: str | Path | None = None,
    trust: bool = False,
    quiet: bool = True,
) -> Verified:
    """Read all of a checkpoint, and say what is wrong with it.

    Every record is compared with its checksum, the ranks' parts with each other and with the shapes that they must add
    up to, the fp32 masters with the weights that the model computed with (in ZeRO 1 and 2), and the manifest with what
    is there.

    Args:
        path: the directory of a DeepSpeed checkpoint, full or trainable-only.
        tag: the folder in it; without one, what its file `latest` says.
        base: what the run was built from (see `consolidate`), to be compared with the manifest's fingerprints.
        trust: also read files that name classes which do not belong in a checkpoint, and follow links out of it. None
            of them is run.
        quiet: show no progress on stderr.

    Returns:
        What is wrong, and how much was read.

    Raises:
        CheckpointError: there is no base at its path, or none that can be read. What is wrong with the checkpoint
            itself is not raised, but reported.
    """
    problems: list[str] = []
    try:
        states = load(path, tag, trust)
        manifest = states.manifest
    except (CheckpointError, CheckpointMismatchError) as error:
        return Verified(str(path), (str(error),), 0, 0, 0, 0, 0, ())
    opened = open_base(base, trust) if base is not None else None
    found = None
    try:
        check_together(states)
        found = _weights(states)
    except CheckpointError as error:
        problems.append(str(error))
    size = sum(file.stat().st_size for file in states.layout.files)
    with progress("reading", size, quiet) as told:
        problems += _damaged(states, told)
    if found is not None and not problems:
        try:
            check_one_run(found)
        except CheckpointError as error:
            problems.append(str(error))
    if manifest is not None:
        problems += _contradictions(states, manifest)
    compared = 0
    unverified = [one.name for one in (manifest.left_out if manifest else ()) if one.fingerprint is None]
    if opened is not None:
        wrong, compared, unknown = _compared(manifest, opened, quiet)
        problems += wrong
        unverified = list(dict.fromkeys([*unverified, *unknown]))
    return Verified(
        path=str(path),
        problems=tuple(dict.fromkeys(problems)),  # what is damaged may be met twice
        files=len(states.layout.files),
        size=size,
        trained=len(found.trained) if found else 0,
        left_out=len(manifest.parameters) if manifest else 0,
        compared=compared,
        unverified=tuple(unverified),
    )


def _weights(states: States) -> Weights:
    """Also of a stage 0 that does not say what was trained, which is nothing wrong."""
    try:
        return weights(states)
    except CheckpointError:
        return weights(states, ("*",))


def _damaged(states: States, told: Callable[[int], object]) -> list[str]:
    """What is wrong with the bytes of each file."""
    problems = []
    for file in states.layout.files:
        try:
            check_file(file, told)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _contradictions(states: States, manifest: Manifest) -> list[str]:
    """Where the manifest and the rest of the checkpoint do not agree."""
    there = {plain(name) for state in states.models for name in state["module"]} & manifest.names
    said = {
        "its ZeRO stage": (manifest.zero_stage, states.zero_stage),
        "its number of ranks": (manifest.world_size, states.world_size),
        "the size of what was left out": (
            manifest.total_bytes,
            sum(prod(p.shape) * ITEM_SIZES.get(p.dtype, 0) for p in manifest.left_out),
        ),
    }
    problems = [
        f"The manifest says of {what}: {one}; it is {other}." for what, (one, other) in said.items() if one != other
    ]
    if there:
        problems.append(f"The manifest says that {named(there)} were left out, but they are there.")
    return problems


def _compared(manifest: Manifest | None, base: Base, quiet: bool) -> tuple[list[str], int, list[str]]:
    """What is wrong with a base, how many of its parameters are right, and the names of what it cannot tell."""
    if manifest is None:
        return ["The checkpoint has no manifest, so its base cannot be verified."], 0, []
    try:
        there = tensors_for(manifest, base)
    except CheckpointError as error:
        return [str(error)], 0, []
    told_of = {one.name for one in there if one.fingerprint is not None}
    unknown = [one.name for one in manifest.left_out if one.name not in told_of]
    wrong, right = [], 0
    with Records() as records, progress("base", sum(t.nbytes for t in there.values()), quiet) as told:
        for one, tensor in there.items():
            if one.fingerprint is not None:
                same = converting.is_base(one, base.read(records, tensor, one))
                wrong += [] if same else [one.name]
                right += same and one.kind == PARAMETER
            told(tensor.nbytes)
    if wrong:
        return [other_values(base, wrong, manifest)], right, unknown
    return [], right, unknown

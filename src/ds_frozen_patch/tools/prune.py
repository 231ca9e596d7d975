"""Convert a full checkpoint into a trainable-only one; frozen weights are read only for their fingerprints."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.format.stored import Storage, iter_tensors
from ..checkpoint.format.writing import write_archive
from ..checkpoint.zero.opening import open_checkpoint
from ..checkpoint.zero.states import States
from ..checkpoint.zero.weights import Weights
from ..common.errors import CheckpointError, named
from ..common.probing import version_of
from ..common.text import human_bytes, printable_lines, progress
from ..fingerprint import of_stream
from ..parameters import BUFFER, PART, is_of_lora, plain
from ..record import KEY, TRAINABLE_ONLY, LeftOut, Record, identify, write_record
from ..settings import matches
from .output import check_output, copy_other_files, new_output

_MOST_THREADS = 8
"""That read what is left out, each with a buffer of a few MiB."""


@dataclass(frozen=True)
class Pruned:
    """What `prune` has written, or would write.

    Attributes:
        source: the path of the full checkpoint, as passed.
        target: the path of the trainable-only checkpoint, as passed.
        size_before: the size of the full checkpoint's files, in bytes.
        size_after: the size of the trainable-only checkpoint's files; after a dry run, an estimate.
        record: of the trainable-only checkpoint: what was left out.
        dry_run: whether nothing was written.
    """

    source: str
    target: str
    size_before: int
    size_after: int
    record: Record
    dry_run: bool = False

    def __str__(self) -> str:
        about = "about " if self.dry_run else ""
        sizes = f"{about}{human_bytes(self.size_after)} of {human_bytes(self.size_before)}"
        lines = [f"{self.target}: {sizes}.", f"Left out: {self.record}."]
        if not self.dry_run and not any(parameter.fingerprint for parameter in self.record.left_out):
            lines.append("It has no fingerprints: loads cannot verify the base.")
        return printable_lines(lines)


def prune(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    trainable: Sequence[str] = (),
    keep: Sequence[str] = (),
    fingerprints: bool = True,
    dry_run: bool = False,
    quiet: bool = True,
) -> Pruned:
    """Convert a full checkpoint into the one that `patch()` would have written.

    Time and disk space are proportional to what is kept; fingerprints add one read of what is left out. Memory holds a
    few MiB and the files' pickles.

    Args:
        source: the directory of a full DeepSpeed checkpoint, of any ZeRO stage and world size. It is not changed.
            One of which `patch()` or `prune` has made a record is copied, if it is trainable-only already.
        target: the directory to create.
        tag: the subdirectory to read; by default the one named in `latest`.
        trainable: patterns (as in `fnmatch`) of the names of trained parameters, for a checkpoint of ZeRO stage 0 that
            does not tell.
        keep: patterns of the names of frozen parameters that no base has, such as an average of the weights, or what
            was trained for a while and then frozen.
        fingerprints: read the frozen parameters, so that loads can verify the base. Otherwise loads warn that they
            cannot.
        dry_run: write nothing and read no tensors, only report what would be left out.
        quiet: do not show progress on stderr.

    Returns:
        What was left out, and the sizes before and after.

    Raises:
        CheckpointError: the source has no frozen parameters, or is damaged; a pattern has no effect; the target exists,
            or cannot be written. Nothing is left there.
    """
    checkpoint = open_checkpoint(source, tag, trainable=trainable)
    states, weights = checkpoint.states, checkpoint.weights
    if not states.record.is_trainable_only:
        if not (weights.base or weights.subclasses):
            raise CheckpointError(f"{source} contains no frozen parameters, so there is nothing to prune.")
        weights = _without_kept(weights, keep)
    layout = states.layout
    size = sum(file.stat().st_size for file in layout.files)
    record = _make_record(states, weights)
    if dry_run:
        check_output(Path(target), layout.root)
        return Pruned(str(source), str(target), size, size - _size_of_removed(states, record), record, dry_run=True)
    cost = size if fingerprints else size - sum(item.nbytes for item in weights.base.values())
    compared = {} if states.record.is_trainable_only or not fingerprints else weights.base
    if states.quantizes_frozen:  # ZeRO++ does not save the scales: the values alone mean nothing
        compared = {n: item for n, item in compared.items() if n not in weights.frozen or item.dtype != "int8"}
    with new_output(target, layout.root) as output:
        folder = output / layout.tag
        folder.mkdir(parents=True)
        pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
        with ExitStack() as stack, progress("reading", cost, quiet) as progressed:
            records = stack.enter_context(Records(progressed=progressed))
            stack.callback(pool.shutdown, cancel_futures=True)
            left_out = [pool.submit(_with_fingerprint, entry, compared, records) for entry in record.left_out]
            for file, state in zip(layout.model, states.models, strict=True):
                pruned = {**_remove_from_state(state, record.names), KEY: record.save}
                write_archive(folder / file.name, pruned, records.content)
            # Written from what was checked, not copied: the file may have been replaced since.
            for file, contents in zip(layout.optimizer, states.contents[len(layout.model) :], strict=True):
                write_archive(folder / file.name, contents.state, records.content)
            record = replace(record, left_out=tuple(entry.result() for entry in left_out))
            write_record(folder, record)
        copy_other_files(layout, output)
        size_after = sum(file.stat().st_size for file in folder.iterdir())
    return Pruned(str(source), str(target), size, size_after, record)


def _without_kept(weights: Weights, patterns: Sequence[str]) -> Weights:
    """The weights without the base's that are to be kept."""
    names = {name: weights.names_of(name) for name in (*weights.frozen, *weights.subclasses, *weights.packed)}
    if idle := [pattern for pattern in patterns if not any(matches(aliases, [pattern]) for aliases in names.values())]:
        raise CheckpointError(f"The patterns of what to keep match nothing that would be left out: {named(idle)}.")
    kept = {n for n, aliases in names.items() if matches(aliases, patterns) or any(map(is_of_lora, aliases))}
    owners = {name: owner for name, owner in weights.owners.items() if owner not in kept}
    return replace(
        weights,
        frozen={name: item for name, item in weights.frozen.items() if name not in kept},
        subclasses={name: item for name, item in weights.subclasses.items() if name not in kept},
        packed={name: item for name, item in weights.packed.items() if name not in kept},
        parts={name: item for name, item in weights.parts.items() if name in owners},
        owners=owners,
    )


def _with_fingerprint(entry: LeftOut, tensors: Mapping[str, TensorSource], records: Records) -> LeftOut:
    if (item := tensors.get(entry.name)) is None:
        return entry
    chunks = records.chunks(item) if item.view is None else [records.read(item)]
    return replace(entry, fingerprint=of_stream(item.nbytes, chunks))


def _make_record(states: States, weights: Weights) -> Record:
    if states.record.is_trainable_only:
        return states.known
    names, parts = weights.names_of, {n: item for n, item in weights.base.items() if n in weights.owners}
    return replace(
        states.known,
        save=states.record.save or identify(states.layout.files),
        versions={"ds_frozen_patch": version_of("ds_frozen_patch"), **states.versions},
        kind=TRAINABLE_ONLY,
        left_out=(
            *(LeftOut(names(n), item.shape, item.dtype, None) for n, item in weights.frozen.items()),
            *(LeftOut(names(n), item.shape, item.name, None) for n, item in weights.subclasses.items()),
            *(LeftOut(names(n), parts[n].shape, parts[n].dtype, None, PART, weights.owners[n]) for n in parts),
            *(LeftOut((n,), item.shape, item.dtype, None, BUFFER) for n, item in weights.packed.items()),
        ),
        total_bytes=sum(item.nbytes for item in weights.base.values()),
        compiled=states.compiled,
    )


def _remove_from_state(state: Mapping[str, Any], left_out: Container[str]) -> dict[str, Any]:
    """A file's state as a trainable-only save would write it."""
    module = state["module"]
    kept = type(module)((name, item) for name, item in module.items() if plain(name) not in left_out)
    if hasattr(module, "_metadata"):
        kept._metadata = module._metadata
    changed: dict[str, Any] = {"module": kept}
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if key in state:
            items = (state[key] or {}).items()
            changed[key] = {name: item for name, item in items if plain(name) not in left_out} or None
    return {**state, **changed}


def _size_of_removed(states: States, record: Record) -> int:
    """The bytes of the storages that only frozen parameters are in."""
    removed = set[Storage]()
    for state in states.models:
        kept = {tensor.storage for _, tensor in iter_tensors(_remove_from_state(state, record.names))}
        removed |= {tensor.storage for _, tensor in iter_tensors(state)} - kept
    return sum(storage.nbytes for storage in removed)

"""A full checkpoint becomes a trainable-only one; the frozen weights are not even read, unless for fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError
from ...common.progress import progress
from ...common.text import human_bytes, printable_lines
from ...fingerprint import of_stream
from ...manifest import KEY, LeftOut, Manifest
from ...parameters import BUFFER, PART, plain
from ..format.records import Piece, Records, Whole
from ..format.stored import Storage
from ..format.writing import write_archive
from ..zero.states import States, check_together, load
from ..zero.weights import Weights, check_one_run, weights
from .output import check_output, copy_other_files, new_output


@dataclass(frozen=True)
class Pruned:
    """What `prune` has done, or would do.

    Attributes:
        source: the full checkpoint's path, as it was given.
        target: the trainable-only checkpoint's path, as it was given.
        size_before: the bytes of the full one's files.
        size_after: the bytes of the trainable-only one's; None where nothing was written.
        manifest: what was left out.
    """

    source: str
    target: str
    size_before: int
    size_after: int | None
    manifest: Manifest

    def __str__(self) -> str:
        size = f"{human_bytes(self.size_after)} of " if self.size_after is not None else "a part of "
        lines = [f"{self.target}: {size}{human_bytes(self.size_before)}.", f"Left out: {self.manifest}."]
        if self.size_after is not None and not any(one.fingerprint for one in self.manifest.left_out):
            lines.append("It has no fingerprints: loads cannot verify the base.")
        return printable_lines(lines)


def prune(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    trainable: Sequence[str] = (),
    fingerprints: bool = True,
    trust: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> Pruned:
    """Write the trainable-only checkpoint that would have been saved in place of a full one.

    It takes time and disk in proportion to what is kept, and with fingerprints one read of what is not; memory for a
    few MiB and the files' pickles.

    Args:
        source: the directory of a full DeepSpeed checkpoint, of any ZeRO stage and number of ranks. It stays as it is.
        target: the directory to make.
        tag: the folder in the source; without one, what its file `latest` says.
        trainable: patterns (as in `fnmatch`) of the names that were trained, for a checkpoint of ZeRO stage 0 that does
            not say it.
        fingerprints: read the frozen parameters, so that a load can verify its base. Without, loads warn that they
            cannot.
        trust: also read files that name classes which do not belong in a checkpoint, and follow links out of it. None
            of them is run.
        dry_run: write nothing, read no tensor, and say what would be left out.
        quiet: show no progress on stderr.

    Returns:
        What was left out, and what that saves.

    Raises:
        CheckpointError: the source is no full checkpoint, or damaged; there is something at the target already, or it
            cannot be written. Nothing is left there then.
        CheckpointMismatchError: it has a manifest, and that is damaged or of a format that this release does not know.
    """
    states = load(source, tag, trust)
    check_together(states)
    found = weights(states, trainable)
    if states.manifest or not (found.base or found.subclasses):
        raise CheckpointError(f"{source} holds no frozen parameters, so there is nothing to prune.")
    check_one_run(found)
    layout = states.layout
    size = sum(file.stat().st_size for file in layout.files)
    prints: Mapping[str, str] = {}
    if dry_run:
        check_output(Path(target), layout.root)
        return Pruned(str(source), str(target), size, None, _manifest(states, found, prints))
    with new_output(target, layout.root) as made:
        with Records() as records:
            if fingerprints:
                prints = _fingerprints(records, found, states.quantizes_frozen, quiet)
            manifest = _manifest(states, found, prints)
            folder = made / layout.tag
            folder.mkdir(parents=True)
            with progress("writing", size - manifest.total_bytes, quiet) as done:
                first = layout.model[0]
                for file, state in zip(layout.model, states.models, strict=True):
                    told = manifest.to_state() if file == first else manifest.to_reference(first.name)
                    write_archive(folder / file.name, _without(state, manifest.names, told), _reader(records, done))
                # Not copied: another file may be there by now than the one that was checked.
                for file, contents in zip(layout.optimizer, states.contents[len(layout.model) :], strict=True):
                    write_archive(folder / file.name, contents.state, _reader(records, done))
        copy_other_files(layout, made)
        size_after = sum(file.stat().st_size for file in folder.iterdir())
    return Pruned(str(source), str(target), size, size_after, manifest)


def _fingerprints(records: Records, found: Weights, are_partitions_in_int8: bool, quiet: bool) -> dict[str, str]:
    prints = {}
    with progress("fingerprints", sum(item.nbytes for item in found.base.values()), quiet) as done:
        for name, item in found.base.items():
            # ZeRO++ does not save the scales of what it quantizes, so that says nothing.
            is_partition_in_int8 = are_partitions_in_int8 and item.dtype == "int8" and name in found.frozen
            if not is_partition_in_int8:
                chunks = records.chunks(item) if item.view is None else [records.read(item)]
                prints[name] = of_stream(item.dtype, item.numel, _counted(chunks, done))
    return prints


def _manifest(states: States, found: Weights, prints: Mapping[str, str]) -> Manifest:
    return Manifest(
        left_out=tuple(_left_out(found, prints)),
        total_bytes=sum(item.nbytes for item in found.base.values()),
        zero_stage=states.zero_stage,
        world_size=states.world_size,
        versions={"ds_frozen_patch": metadata.version("ds_frozen_patch"), **states.versions},
    )


def _left_out(found: Weights, prints: Mapping[str, str]) -> Iterator[LeftOut]:
    for name, item in found.frozen.items():
        yield LeftOut(found.names_of(name), item.shape, item.dtype, prints.get(name))
    for name, one in found.subclasses.items():
        # Its settings have a fingerprint in a save, which the library alone can make.
        yield LeftOut(found.names_of(name), one.shape, one.name, None)
    for name, item in found.base.items():
        if owner := found.owners.get(name):
            yield LeftOut(found.names_of(name), item.shape, item.dtype, prints.get(name), PART, owner)
    for name, item in found.packed.items():
        yield LeftOut((name,), item.shape, item.dtype, prints.get(name), BUFFER)


def _without(state: Mapping[str, Any], left_out: Container[str], told: dict[str, Any]) -> dict[str, Any]:
    """A file's state as a trainable-only save makes it, with the manifest or a reference to it."""
    module = state["module"]
    kept = type(module)((name, item) for name, item in module.items() if plain(name) not in left_out)
    if hasattr(module, "_metadata"):
        kept._metadata = module._metadata
    changed = {"module": kept, "frozen_param_shapes": None, "frozen_param_fragments": None}
    return {**state, **{key: value for key, value in changed.items() if key in state}, KEY: told}


def _reader(records: Records, done: Callable[[int], object]) -> Callable[[Storage, int, int], Iterator[memoryview]]:
    """What gives the bytes of storages to be copied."""

    def read(storage: Storage, begin: int, count: int) -> Iterator[memoryview]:
        return _counted(records.chunks(Whole("uint8", (count,), (Piece(storage, begin, count),))), done)

    return read


def _counted(chunks: Iterable[Any], done: Callable[[int], object]) -> Iterator[Any]:
    for chunk in chunks:
        yield chunk
        done(len(chunk))

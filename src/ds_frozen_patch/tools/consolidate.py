"""Collect the weights that the ranks have saved into one or more files, to use without DeepSpeed or to share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.format.archive import read_archive
from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.format.stored import ITEM_SIZES, StandIn, StoredTensor
from ..checkpoint.quantization import is_torchao
from ..checkpoint.zero.opening import Checkpoint, open_any
from ..common.errors import CheckpointError, named
from ..common.text import human_bytes, printable_lines, progress
from ..parameters import PARAMETER, with_compiled
from ..record import KEY, LeftOut, Record
from .base import Base, match_base, open_base
from .output import check_output, new_output
from .tensors import TORCH_SUFFIXES, OutputTensor, converted, write_folder, write_shard, write_torch

FILE_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors")
DEFAULT_SHARD_BYTES = 5_000_000_000
"""The default of Hugging Face's libraries."""


@dataclass(frozen=True)
class Consolidated:
    """What `consolidate` has written, or would write.

    Attributes:
        source: the path of the checkpoint, as passed.
        target: the path of the output, as passed.
        dtype: "fp32", "bf16" or "fp16" if all floating-point tensors were converted, else None.
        is_whole: whether it contains the frozen parameters, so that a module can be loaded from it strictly.
        tensors: the number of tensors; tied ones count once.
        size: the size of these tensors, in bytes.
        files: the names of the files.
        unverified: the parameters from a base that could not be verified, because they have no fingerprint.
    """

    source: str
    target: str
    dtype: str | None
    is_whole: bool
    tensors: int
    size: int
    files: tuple[str, ...]
    unverified: tuple[str, ...]

    def __str__(self) -> str:
        files = f" in {len(self.files)} files" if len(self.files) > 1 else ""
        lines = [f"{self.target}: {self.tensors} tensors, {human_bytes(self.size)}{files}."]
        if not self.is_whole:
            lines.append("It lacks the frozen parameters, which the checkpoint left out; add them with --base.")
        if self.unverified:
            lines.append(f"Not verified, because they have no fingerprint: {named(self.unverified, 3)}.")
        return printable_lines(lines)


@dataclass(frozen=True)
class _Plan:
    """What an output contains; `pickled` are tensor subclasses, which only files of torch can contain."""

    tensors: dict[str, OutputTensor]
    aliases: dict[str, str]
    pickled: dict[str, StandIn]

    @property
    def cost(self) -> int:
        """How many bytes are read for it."""
        return sum(tensor.cost for tensor in self.tensors.values())


def consolidate(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    dtype: str | None = None,
    base: str | Path | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    dry_run: bool = False,
    quiet: bool = True,
) -> Consolidated:
    """Collect the weights of a checkpoint, tensor by tensor, the trained ones from their fp32 masters.

    Args:
        source: the directory of a DeepSpeed checkpoint, full or trainable-only, or the file of a weights-only save. It
            is not changed.
        target: a `.ckpt` (or `.pt`, `.pth`, `.bin`), which also gets everything else that Lightning saves; a
            `.safetensors`; or a directory to create, with sharded safetensors.
        tag: the subdirectory to read; by default the one named in `latest`.
        dtype: "fp32", "bf16" or "fp16", to convert all floating-point tensors except those of a quantized base. By
            default trained weights are in fp32, like the optimizer's masters, and others in the dtype that they were
            saved in, as with DeepSpeed's own converter. A weights-only file has no masters: all keep their dtype.
        base: what the run was built from, to add the frozen parameters to a trainable-only checkpoint: a directory of
            safetensors, a single file, or a full checkpoint. It is verified with the fingerprints in the record.
        max_shard_size: the maximum size of each file in a directory, in bytes; a single tensor may be larger.
        dry_run: write nothing and read no tensors.
        quiet: do not show progress on stderr.

    Returns:
        What the output contains.

    Raises:
        CheckpointError: a file of the source or the base is missing, damaged or from another run; the base differs from
            that of the run; the target exists, or cannot be written. Nothing is left there.
        ValueError: the dtype is unknown.
    """
    kind = dtypes.torch_dtype(dtype)
    checkpoint = open_any(source, tag)
    if base is not None and not checkpoint.record.is_trainable_only:
        raise CheckpointError(
            f"{source} has no record that lists what was left out"
            + (
                ", and is a full checkpoint: it needs no base."
                if checkpoint.weights.base
                else ", so no base can be added to it."
            )
        )
    path = Path(target)
    opened = open_base(base) if base is not None else None
    matched = _match(checkpoint.record, opened) if opened else {}
    plan = _plan_output(checkpoint, opened, matched, kind)
    shards = _split_into_files(plan.tensors, path, max_shard_size)
    is_whole = base is not None or not checkpoint.states.lacks_frozen
    if plan.pickled and path.suffix not in TORCH_SUFFIXES:
        raise CheckpointError(
            f"{named(plan.pickled, 3)} are torchao tensors, which safetensors files cannot contain. Write a file of"
            f" torch.save instead, such as {path.with_suffix('.ckpt').name}."
        )
    done = Consolidated(
        source=str(source),
        target=str(target),
        dtype=dtype,
        is_whole=is_whole,
        tensors=len(plan.tensors),
        size=sum(tensor.size for tensor in plan.tensors.values()),
        files=tuple(shards),
        unverified=tuple(entry.name for entry in matched if entry.fingerprint is None),
    )
    sources = [checkpoint.states.layout.root, *([Path(base)] if base is not None else [])]
    if dry_run:
        check_output(path, *sources)
        return done
    with (
        new_output(path, *sources) as output,
        progress("writing", plan.cost, quiet) as progressed,
        Records(progressed=progressed) as records,
    ):
        if path.suffix in TORCH_SUFFIXES:
            _write_torch(output, checkpoint, plan, is_whole, records)
        elif path.suffix == ".safetensors":
            write_shard(output, plan.tensors, plan.aliases, records)
        else:
            write_folder(output, shards, plan.aliases, records)
    return done


def consolidate_over(checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Consolidate into a Lightning checkpoint of any name, replacing an existing file, and return what was written.

    Returns:
        The file's state: its tensors are mapped from the file, and objects are stand-ins.

    Raises:
        CheckpointError: as `consolidate`.
    """
    checkpoint = open_any(checkpoint_dir, tag)
    plan = _plan_output(checkpoint, None, {}, None)
    file = Path(output_file)
    with (
        new_output(file, replace=True) as output,
        progress("writing", plan.cost, quiet=False) as progressed,
        Records(progressed=progressed) as records,
    ):
        is_whole = not (checkpoint.record.is_trainable_only and checkpoint.states.lacks_frozen)
        _write_torch(output, checkpoint, plan, is_whole, records)
    import torch

    state: dict[str, Any] = read_archive(file).state
    mapped = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
    weights = dict(state["state_dict"])
    for name, item in weights.items():
        if isinstance(item, StoredTensor):
            begin = item.storage.begin + item.offset * ITEM_SIZES[item.dtype]
            content = mapped[begin : begin + item.numel * ITEM_SIZES[item.dtype]]
            weights[name] = content.view(getattr(torch, item.dtype)).view(item.shape)
    return {**state, "state_dict": weights}


def _plan_output(
    checkpoint: Checkpoint, base: Base | None, matched: Mapping[LeftOut, TensorSource], dtype: str | None
) -> _Plan:
    weights, record, compiled = checkpoint.weights, checkpoint.record, checkpoint.states.compiled
    pickled = {name: subclass.item for name, subclass in weights.subclasses.items() if subclass.is_in_module}
    as_saved = weights.quantized | _quantized_names(matched)
    tensors = {
        name: converted(item, None if name in as_saved else dtype)
        for name, item in weights.all.items()
        if weights.owners.get(name) not in pickled
    }
    if base is not None:
        for entry, item in matched.items():
            tensors[entry.name] = base.verified(item, entry, record, None if entry.name in as_saved else dtype)
    aliases = {**weights.aliases, **{alias: entry.name for entry in matched for alias in entry.names[1:]}}
    return _Plan(
        {with_compiled(name, compiled): tensor for name, tensor in tensors.items()},
        {with_compiled(alias, compiled): with_compiled(name, compiled) for alias, name in aliases.items()},
        {with_compiled(name, compiled): item for name, item in pickled.items()},
    )


def _match(record: Record, base: Base) -> dict[LeftOut, TensorSource]:
    """The base's tensor for everything that was left out."""
    matched = match_base(record, base)
    if unlike := [entry.name for entry in record.left_out if is_torchao(entry.dtype)]:
        raise CheckpointError(
            f"{named(unlike, 3)} are torchao tensors, which only torchao can create. Consolidate without a base, and"
            " let the program that loads the file build the base."
        )
    return matched


def _quantized_names(left_out: Iterable[LeftOut]) -> frozenset[str]:
    """The names of the tensors of a quantized base: buffers, parts, and the parameters that these belong to."""
    return frozenset(
        name
        for entry in left_out
        if entry.kind != PARAMETER
        for name in ((entry.name, entry.group) if entry.group else entry.names)
    )


def _split_into_files(tensors: dict[str, OutputTensor], target: Path, most: int) -> dict[str, dict[str, OutputTensor]]:
    """The tensors of each file of the output."""
    if target.suffix in FILE_SUFFIXES:
        return {target.name: tensors}
    shards: list[dict[str, OutputTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.size > most:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _write_torch(file: Path, checkpoint: Checkpoint, plan: _Plan, is_whole: bool, records: Records) -> None:
    """Write a Lightning checkpoint: the client state, and the weights as `state_dict`."""
    kept = {key: value for key, value in checkpoint.client_state.items() if key != KEY}
    if not is_whole and checkpoint.record.is_trainable_only:
        kept[KEY] = replace(checkpoint.record, files={}).to_json()
    write_torch(file, kept, plan.tensors, plan.aliases, plan.pickled, records)

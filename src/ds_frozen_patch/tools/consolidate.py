"""Collect the weights that the ranks have saved into one or more files, to use without DeepSpeed or to share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint import dtypes
from ..checkpoint.format import safetensors as safetensors_file
from ..checkpoint.format.archive import read_archive
from ..checkpoint.format.records import Piece, Records, TensorSource, from_stored, map_into_memory
from ..checkpoint.format.stored import ITEM_SIZES, StandIn, Storage, children, new_tensor
from ..checkpoint.format.writing import write_archive
from ..checkpoint.quantization import is_torchao
from ..common.errors import CheckpointError, named
from ..common.text import human_bytes, printable_lines, progress
from ..parameters import PARAMETER, with_compiled
from ..record import KEY, LeftOut, Record, unknown
from .base import Base, check_values, match_base, open_base
from .output import check_output, new_output
from .source import Source, open_source

TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
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
class OutputPlan:
    """What an output contains.

    Attributes:
        tensors: the source of each tensor.
        aliases: the first name of each tied alias.
        from_base: what the record says of each tensor that comes from the base, to verify it.
        base: the base, if any.
        dtype: what floating-point tensors are converted to; None to keep their dtypes.
        quantized: the names of tensors that keep their dtype in any case.
        pickled: tensor subclasses, which only files of `torch.save` can contain.
        record: the checkpoint's.
        compiled: the modules whose names in the output are those that `torch.compile` gives them.
    """

    tensors: dict[str, TensorSource]
    aliases: dict[str, str]
    from_base: dict[str, LeftOut]
    base: Base | None
    dtype: str | None
    quantized: frozenset[str] = frozenset()
    pickled: Mapping[str, StandIn] = field(default_factory=dict)
    record: Record = field(default_factory=unknown)
    compiled: frozenset[str] = frozenset()

    def name_of(self, name: str) -> str:
        """The name of a tensor in the output."""
        return with_compiled(name, self.compiled)

    def dtype_of(self, name: str) -> str:
        """The dtype of a tensor in the output. One from the base is first read in the dtype of the run."""
        saved = self.from_base[name].dtype if name in self.from_base else self.tensors[name].dtype
        if name in self.quantized:
            return saved
        return dtypes.output_dtype(saved, self.dtype)

    def size_of(self, name: str) -> int:
        """The size of a tensor in the output, in bytes."""
        return self.tensors[name].numel * ITEM_SIZES[self.dtype_of(name)]

    @property
    def size(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(map(self.size_of, self.tensors))


def consolidate(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    dtype: str | None = None,
    base: str | Path | None = None,
    max_shard_size: int = DEFAULT_SHARD_BYTES,
    trust: bool = False,
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
        trust: read files that are links out of the checkpoint.
            Also keep hyper-parameters that name classes, which Lightning would import and instantiate; otherwise they
            are dropped with a warning.
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
    checkpoint = open_source(source, tag, trust)
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
    plan = _plan_output(checkpoint, open_base(base, trust) if base is not None else None, kind)
    shards = _split_into_files(plan, path, max_shard_size)
    is_whole = base is not None or not checkpoint.lacks_frozen
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
        size=plan.size,
        files=tuple(shards),
        unverified=tuple(name for name, entry in plan.from_base.items() if entry.fingerprint is None),
    )
    sources = [checkpoint.path, *([Path(base)] if base is not None else [])]
    if dry_run:
        check_output(path, *sources)
        return done
    with (
        new_output(path, *sources) as output,
        Records() as records,
        progress("writing", done.size, quiet) as progressed,
    ):
        reader = OutputReader(records, plan, progressed)
        if path.suffix in TORCH_SUFFIXES:
            _write_torch(output, checkpoint, plan, is_whole, reader, trust)
        elif path.suffix == ".safetensors":
            write_shard(output, plan.tensors, plan, reader)
        else:
            write_folder(output, shards, plan, reader)
    return done


def consolidate_over(checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Consolidate into a Lightning checkpoint of any name, replacing an existing file, and return what was written.

    Returns:
        The file's state: its tensors are mapped from the file, and objects are stand-ins.

    Raises:
        CheckpointError: as `consolidate`.
    """
    checkpoint = open_source(checkpoint_dir, tag, trust=True)
    plan = _plan_output(checkpoint, None, None)
    file = Path(output_file)
    with new_output(file, replace=True) as output, Records() as records, progress("writing", plan.size, False) as done:
        is_whole = not (checkpoint.record.is_trainable_only and checkpoint.lacks_frozen)
        _write_torch(output, checkpoint, plan, is_whole, OutputReader(records, plan, done), trust=True)
    state: dict[str, Any] = read_archive(file).state
    stored = {name: from_stored(item) for name, item in state["state_dict"].items()}
    return {**state, "state_dict": map_into_memory(stored)}


def _plan_output(source: Source, base: Base | None, dtype: str | None) -> OutputPlan:
    weights, record = source.weights, source.record
    from_base = match_base(record, base) if base else {}
    if base and (unlike := [entry.name for entry in record.left_out if is_torchao(entry.dtype)]):
        raise CheckpointError(
            f"{named(unlike, 3)} are torchao tensors, which only torchao can create. Consolidate without a base, and"
            " let the program that loads the file build the base."
        )
    more = {alias: entry.name for entry in from_base for alias in entry.names[1:]}
    pickled = {name: subclass.item for name, subclass in weights.subclasses.items() if subclass.is_in_module}
    return OutputPlan(
        tensors={n: item for n, item in weights.all.items() if weights.owners.get(n) not in pickled}
        | {entry.name: tensor for entry, tensor in from_base.items()},
        aliases={**weights.aliases, **more},
        from_base={entry.name: entry for entry in from_base},
        base=base,
        dtype=dtype,
        quantized=weights.quantized | _quantized_names(from_base),
        pickled=pickled,
        record=record,
        compiled=source.compiled,
    )


def _quantized_names(left_out: Iterable[LeftOut]) -> frozenset[str]:
    """The names of the tensors of a quantized base: buffers, parts, and the parameters that these belong to."""
    return frozenset(
        name
        for entry in left_out
        if entry.kind != PARAMETER
        for name in ((entry.name, entry.group) if entry.group else entry.names)
    )


def _split_into_files(plan: OutputPlan, target: Path, max_shard_size: int) -> dict[str, dict[str, TensorSource]]:
    """The tensors of each file of the output."""
    if target.suffix in FILE_SUFFIXES:
        return {target.name: plan.tensors}
    shards: list[dict[str, TensorSource]] = [{}]
    filled = 0
    for name, tensor in plan.tensors.items():
        size = plan.size_of(name)
        if shards[-1] and filled + size > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


class OutputReader:
    """Reads a tensor of the plan, verifies it if it comes from the base, and converts it for the output."""

    def __init__(self, records: Records, plan: OutputPlan, progressed: Callable[[int], object]) -> None:
        self.records, self.plan, self.progressed = records, plan, progressed

    def __call__(self, name: str) -> bytearray:
        tensor = self.plan.tensors[name]
        entry = self.plan.from_base.get(name)
        if entry is None or self.plan.base is None:
            values, dtype = self.records.read(tensor), tensor.dtype
        else:
            values, dtype = self.plan.base.read(self.records, tensor, entry), entry.dtype
            check_values(self.plan.base, self.records, tensor, entry, values, self.plan.record)
        converted = dtypes.convert(values, dtype, self.plan.dtype_of(name))
        self.progressed(len(converted))
        return converted


def _write_torch(
    file: Path, source: Source, plan: OutputPlan, is_whole: bool, reader: OutputReader, trust: bool
) -> None:
    """Write a Lightning checkpoint: the client state, and the weights as `state_dict`."""
    kept = {key: value for key, value in source.content.items() if key != KEY}
    if not is_whole and source.record.is_trainable_only:
        kept[KEY] = replace(source.record, files={}).to_json()
    if not trust:
        kept, dropped = _without_code(kept)
        if dropped:
            warnings.warn(
                f"{file.name} does not contain these hyper-parameters, because load_from_checkpoint or LightningCLI"
                f" would import and call what they name: {named(dropped)}. Pass their values to load_from_checkpoint as"
                " arguments. If you trust the checkpoint, keep them with --trust (trust=True).",
                stacklevel=3,
            )
    tensors: dict[str, Any] = dict(plan.pickled)
    for name, tensor in plan.tensors.items():
        tensors[name] = new_tensor(name, plan.dtype_of(name), tensor.shape)
    for alias, name in plan.aliases.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    tensors = {plan.name_of(name): item for name, item in tensors.items()}

    def content(storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        if storage.file is None:
            yield bytes(reader(storage.key)) if not storage.numel else memoryview(reader(storage.key))
        else:
            yield from reader.records.chunks(TensorSource("uint8", (count,), (Piece(storage, begin, count),)))

    write_archive(file, {**kept, "state_dict": tensors}, content)


_HYPER_PARAMETERS = {"hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments"}
_NAMES_OF_CODE = ("_instantiator", "_class_path", "class_path")


def _without_code(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove hyper-parameters that name what Lightning would call; returns the state and the removed names.

    `load_from_checkpoint` calls the function that `_instantiator` names. LightningCLI creates an object of each class
    that a dictionary inside the hyper-parameters names as its `class_path`.
    """
    kept: dict[str, Any] = dict(state)
    dropped: list[str] = []
    for key in _HYPER_PARAMETERS & state.keys():
        entries = state[key].items() if isinstance(state[key], dict) else ()
        unsafe = [name for name, item in entries if _names_code([name, item])]
        if unsafe or (not entries and _names_code(state[key])):
            dropped += map(str, unsafe or [key])
            kept[key] = {name: item for name, item in entries if name not in unsafe}
            if not kept[key]:
                del kept[key]
    return kept, dropped


def _names_code(value: Any) -> bool:
    """Whether one of the names is in a value."""
    waiting, seen = [value], set[int]()
    while waiting:
        item = waiting.pop()
        if isinstance(item, bytes):  # numpy's strings, with 4 bytes for each character
            item = item.replace(b"\0", b"").decode("latin-1")
            if any(name in item for name in _NAMES_OF_CODE):
                return True
        elif isinstance(item, str) and item in _NAMES_OF_CODE:
            return True
        elif id(item) not in seen:
            seen.add(id(item))
            waiting += children(item)
    return False


def write_shard(
    file: Path, tensors: dict[str, TensorSource], plan: OutputPlan, reader: Callable[[str], bytearray]
) -> None:
    """Write a safetensors file. It contains tied tensors once, and the aliases as metadata, as the library does it."""
    about = {plan.name_of(alias): plan.name_of(name) for alias, name in plan.aliases.items() if name in tensors}
    entries = {plan.name_of(name): (plan.dtype_of(name), tensor.shape) for name, tensor in tensors.items()}
    safetensors_file.write_file(file, entries, map(reader, tensors), about)


def write_folder(
    folder: Path, shards: dict[str, dict[str, TensorSource]], plan: OutputPlan, reader: Callable[[str], bytearray]
) -> None:
    """Write a new folder of safetensors files, and their index."""
    folder.mkdir()
    for name, tensors in shards.items():
        write_shard(folder / name, tensors, plan, reader)
    if len(shards) > 1:
        size = plan.size
        where = {plan.name_of(tensor): name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")

"""One file of weights, or some, from all that the ranks have saved: for a module without DeepSpeed, or to share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, named
from ...common.progress import progress
from ...common.text import human_bytes, printable_lines
from ...manifest import KEY, LeftOut, Manifest
from ...parameters import PARAMETER
from .. import dtypes as converting
from .. import hyperparameters
from ..format import safetensors as safetensors_file
from ..format.archive import read
from ..format.records import Piece, Records, Whole, mapped, whole
from ..format.stored import ITEM_SIZES, StandIn, Storage, StoredTensor
from ..format.writing import write_archive
from ..quantization import of_torchao
from ..zero.labels import LABEL
from ..zero.repartition import KEY as ELASTIC
from ..zero.states import DEEPSPEEDS_OWN, States, check_together, load
from ..zero.weights import Weights, check_one_run, weights
from .base import Base, open_base, refuse_wrong, tensors_for
from .output import check_output, new_output

TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
DEFAULT_SHARD_BYTES = 5_000_000_000
"""What Hugging Face's libraries take as well."""


@dataclass(frozen=True)
class Consolidated:
    """What `consolidate` has done, or would do.

    Attributes:
        source: the checkpoint's path, as it was given.
        target: the output's path, as it was given.
        dtype: "fp32", "bf16" or "fp16", which all floating tensors are in; None where each has its own.
        is_whole: whether frozen parameters are in it, so that a module can be loaded from it strictly.
        tensors: how many there are, tied ones counted once.
        size: the bytes of these tensors.
        files: the names of the files that hold them.
        unverified: the parameters from a base that could not be compared with those at the save, for want of a
            fingerprint.
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
class Plan:
    """What goes into an output: each tensor, those that a base must be verified for, and tied aliases.

    What is in `quantized` keeps its dtype. `pickled` are tensor subclasses, which only a file of `torch.save` can hold.
    """

    tensors: dict[str, Whole]
    aliases: dict[str, str]
    from_base: dict[str, LeftOut]
    base: Base | None
    dtype: str | None
    quantized: frozenset[str] = frozenset()
    pickled: Mapping[str, StandIn] = field(default_factory=dict)
    manifest: Manifest | None = None

    def dtype_of(self, name: str) -> str:
        """What a tensor is in the output. Those from a base are first what the run had of them."""
        saved = self.from_base[name].dtype if name in self.from_base else self.tensors[name].dtype
        if name in self.quantized:
            return saved
        return converting.dtype_in(saved, self.dtype)

    def size_of(self, name: str) -> int:
        """The bytes of a tensor in the output."""
        return self.tensors[name].numel * ITEM_SIZES[self.dtype_of(name)]

    @property
    def size(self) -> int:
        """The bytes of all of them."""
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
    """Put the weights of a checkpoint into one file, tensor by tensor, the trained ones from their fp32 masters.

    Args:
        source: the directory of a DeepSpeed checkpoint, full or trainable-only. It stays as it is.
        target: a `.ckpt` (or `.pt`, `.pth`, `.bin`), with all that Lightning keeps in one; a `.safetensors`; or a
            folder to make, of safetensors in shards.
        tag: the folder in the source; without one, what its file `latest` says.
        dtype: "fp32", "bf16" or "fp16", of all floating tensors but those of a quantized base. Without it, what was
            trained is in fp32, as the optimizer's masters are, and all else in the dtype that it was saved in, as
            DeepSpeed's own converter does.
        base: what the run was built from, to make a trainable-only checkpoint whole: a folder of safetensors, a single
            file, or a full checkpoint. Its parameters are compared with the fingerprints in the manifest.
        max_shard_size: of each file in a folder, in bytes; one tensor may be larger.
        trust: also read files that name classes which do not belong in a checkpoint, and follow links out of it. None
            of them is run. And keep hyper-parameters that name classes, by which Lightning would import and make them;
            without it they are dropped, with a warning.
        dry_run: write nothing and read no tensor.
        quiet: show no progress on stderr.

    Returns:
        What is in the output.

    Raises:
        CheckpointError: a file of the source or of the base is missing, damaged or of another run; the base is not that
            of the save; there is something at the target already, or it cannot be written. Nothing is left there then.
        CheckpointMismatchError: its manifest is damaged, or of a format that this release does not know.
        ValueError: the dtype is not known.
    """
    kind = converting.named_dtype(dtype)
    states = load(source, tag, trust)
    check_together(states)
    found = weights(states, ("*",))  # who was trained makes no difference here
    check_one_run(found)
    manifest = states.manifest
    if base is not None and manifest is None:
        raise CheckpointError(
            f"{source} has no manifest that says what was left out of it"
            + (", and is a full checkpoint: it needs no base." if found.base else ", so no base can be put into it.")
        )
    path = Path(target)
    plan = _plan(found, manifest, open_base(base, trust) if base is not None else None, kind)
    shards = _shards(plan, path, max_shard_size)
    lacks_frozen = manifest.left_out if manifest else states.leaves_out_frozen
    is_whole = base is not None or not lacks_frozen
    if plan.pickled and path.suffix not in TORCH_SUFFIXES:
        raise CheckpointError(
            f"{named(plan.pickled, 3)} are tensors of torchao's, which no file of safetensors holds. Name a file of"
            f" torch.save, such as {path.with_suffix('.ckpt').name}"
        )
    done = Consolidated(
        source=str(source),
        target=str(target),
        dtype=dtype,
        is_whole=is_whole,
        tensors=len(plan.tensors),
        size=plan.size,
        files=tuple(shards),
        unverified=tuple(name for name, parameter in plan.from_base.items() if parameter.fingerprint is None),
    )
    sources = [states.layout.root, *([Path(base)] if base is not None else [])]
    if dry_run:
        check_output(path, *sources)
        return done
    with new_output(path, *sources) as made, Records() as records, progress("writing", done.size, quiet) as told:
        if path.suffix in TORCH_SUFFIXES:
            _write_torch(made, states, plan, is_whole, Reader(records, plan, told), trust)
        elif path.suffix == ".safetensors":
            write_shard(made, plan.tensors, plan, Reader(records, plan, told))
        else:
            _write_folder(made, shards, plan, Reader(records, plan, told))
    return done


def consolidate_over(checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None) -> dict[str, Any]:
    """Consolidate into a Lightning checkpoint of any name, in place of what is there, and give what was written.

    Returns:
        The file's state: its tensors are mapped from the file, and objects of classes are stand-ins.

    Raises:
        CheckpointError: as `consolidate`, but for what is there.
    """
    states = load(checkpoint_dir, tag, trust=True)
    check_together(states)
    found = weights(states, ("*",))
    check_one_run(found)
    plan = _plan(found, states.manifest, None, None)
    file = Path(output_file)
    with (
        new_output(file, replace=True) as made,
        Records() as records,
        progress("writing", plan.size, False) as told,
    ):
        is_whole = not (states.manifest and states.manifest.left_out)
        _write_torch(made, states, plan, is_whole, Reader(records, plan, told), trust=True)
    state: dict[str, Any] = read(file, trust=True).state
    stored = {name: whole(item) for name, item in state["state_dict"].items()}
    return {**state, "state_dict": mapped(stored)}


def _plan(found: Weights, manifest: Manifest | None, base: Base | None, dtype: str | None) -> Plan:
    from_base = tensors_for(manifest, base) if manifest and base else {}
    if base and (unlike := [one.name for one in manifest.left_out if of_torchao(one.dtype)] if manifest else []):
        raise CheckpointError(
            f"{named(unlike, 3)} are tensors of torchao's, which cannot be made without it. Consolidate without a base,"
            " and let the program that loads the file build it."
        )
    more = {alias: one.name for one in from_base for alias in one.names[1:]}
    pickled = {name: one.item for name, one in found.subclasses.items() if one.is_in_module}
    return Plan(
        tensors={n: item for n, item in found.all.items() if found.owners.get(n) not in pickled}
        | {one.name: tensor for one, tensor in from_base.items()},
        aliases={**found.aliases, **more},
        from_base={one.name: one for one in from_base},
        base=base,
        dtype=dtype,
        quantized=found.quantized | _quantized(from_base),
        pickled=pickled,
        manifest=manifest,
    )


def _quantized(left_out: Iterable[LeftOut]) -> frozenset[str]:
    """The names of what belongs to a quantized base: buffers, parts, and the parameters that these are of."""
    return frozenset(
        name
        for one in left_out
        if one.kind != PARAMETER
        for name in ((one.name, one.group) if one.group else one.names)
    )


def _shards(plan: Plan, target: Path, max_shard_size: int) -> dict[str, dict[str, Whole]]:
    """The tensors of each file of the output."""
    if target.suffix in (*TORCH_SUFFIXES, ".safetensors"):
        return {target.name: plan.tensors}
    shards: list[dict[str, Whole]] = [{}]
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


class Reader:
    """Reads a tensor of the plan as it goes into the output, and checks it against what else is known of it."""

    def __init__(self, records: Records, plan: Plan, told: Callable[[int], object]) -> None:
        self.records, self.plan, self.told = records, plan, told

    def __call__(self, name: str) -> bytearray:
        tensor = self.plan.tensors[name]
        parameter = self.plan.from_base.get(name)
        if parameter is None or self.plan.base is None or self.plan.manifest is None:
            values, dtype = self.records.read(tensor), tensor.dtype
        else:
            values, dtype = self.plan.base.read(self.records, tensor, parameter), parameter.dtype
            if not converting.is_base(parameter, values):
                for piece in tensor.pieces:
                    self.records.check(piece.storage)  # if it is that, it is said
                refuse_wrong(self.plan.base, [name], self.plan.manifest)
        made = converting.converted(values, dtype, self.plan.dtype_of(name))
        self.told(len(made))
        return made


def _write_torch(file: Path, states: States, plan: Plan, is_whole: bool, reader: Reader, trust: bool) -> None:
    """A Lightning checkpoint: the client's state, and the weights as `state_dict`."""
    kept = {key: value for key, value in states.models[0].items() if key not in (*DEEPSPEEDS_OWN, ELASTIC, LABEL)}
    if is_whole:
        kept.pop(KEY, None)
    if not trust:
        kept, dropped = hyperparameters.without_classes(kept)
        if dropped:
            warnings.warn(
                f"{file.name} is without these hyper-parameters, by which load_from_checkpoint or LightningCLI would"
                f" import and make classes: {named(dropped)}. Pass what they stood for to load_from_checkpoint as"
                " arguments. If you know where the checkpoint is from, keep them with --trust (trust=True).",
                stacklevel=3,
            )
    made: dict[str, Any] = dict(plan.pickled)
    for name, tensor in plan.tensors.items():
        storage = Storage(None, name, plan.dtype_of(name), tensor.numel)
        made[name] = StoredTensor(storage, storage.dtype, 0, tensor.shape, _strides(tensor.shape))
    for alias, name in plan.aliases.items():
        if name in made:
            made[alias] = made[name]

    def content(storage: Storage, begin: int, count: int) -> Iterator[bytes | memoryview]:
        if storage.file is None:
            yield bytes(reader(storage.key)) if not storage.numel else memoryview(reader(storage.key))
        else:
            yield from reader.records.chunks(Whole("uint8", (count,), (Piece(storage, begin, count),)))

    write_archive(file, {**kept, "state_dict": made}, content)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        strides[place] = strides[place + 1] * max(shape[place + 1], 1)
    return tuple(strides)


def write_shard(file: Path, tensors: dict[str, Whole], plan: Plan, reader: Reader) -> None:
    """A file of safetensors. It cannot hold a tensor twice: of tied ones it says the first's name, as the library."""
    about = {alias: name for alias, name in plan.aliases.items() if name in tensors}
    entries = {name: (plan.dtype_of(name), tensor.shape) for name, tensor in tensors.items()}
    safetensors_file.write_file(file, entries, map(reader, tensors), about)


def _write_folder(folder: Path, shards: dict[str, dict[str, Whole]], plan: Plan, reader: Reader) -> None:
    folder.mkdir()
    for name, tensors in shards.items():
        write_shard(folder / name, tensors, plan, reader)
    if len(shards) > 1:
        size = plan.size
        where = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")

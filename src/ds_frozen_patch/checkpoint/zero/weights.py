"""The weights of a checkpoint by name, put together from what its ranks have saved; where they lie, not what they are.

Trained weights come from the optimizer's fp32 masters, where there are any. How they are laid out, as
`deepspeed.utils.zero_to_fp32` reads them too: in ZeRO 1 and 2 each group of parameters is one flat tensor, in the order
of `param_shapes` and cut into one part for each rank. In ZeRO-3 each parameter is cut into as many parts, all of one
size, and each rank has its parts one after the other.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, named
from ...manifest import Manifest
from ...parameters import plain
from ..dtypes import FLOATING
from ..format.records import Piece, Records, Whole, joined, whole
from ..format.stored import StoredTensor, tensors
from ..quantization import Subclass, of_base, owners, subclass
from .partitions import ALIGNMENT, numel, part_of_group, part_of_parameter
from .states import States, names, names_of_groups

SAMPLE = 64
"""How many elements of each rank's part of a master `check_one_run` looks at."""


@dataclass(frozen=True)
class Weights:
    """All weights of a checkpoint by their plain names, each tied one by its first name only.

    `aliases` gives the first name of each tied alias. `halves` are the weights that the model computed with, of those
    that are in `trained` as fp32 masters; ZeRO-3 does not save them.

    Of a quantized base, `parts` are what its parameters need besides, such as scales, and `owners` the parameter that
    each is of; `packed` are the buffers that belong to it, which are not among `buffers`. A frozen parameter that
    consists of other tensors has these among its parts and is itself in `subclasses`, not in `frozen`.
    """

    trained: dict[str, Whole]
    frozen: dict[str, Whole]
    buffers: dict[str, Whole]
    aliases: dict[str, str]
    halves: dict[str, Whole]
    parts: dict[str, Whole]
    owners: dict[str, str]
    packed: dict[str, Whole]
    subclasses: dict[str, Subclass]

    @property
    def base(self) -> dict[str, Whole]:
        """All that a trainable-only checkpoint leaves out."""
        return {**self.frozen, **self.parts, **self.packed}

    @property
    def all(self) -> dict[str, Whole]:
        """All weights, the trained ones from their masters."""
        return {**self.base, **self.trained, **self.buffers}

    @property
    def quantized(self) -> frozenset[str]:
        """The names of what must stay as it is stored, because other tensors say what it means."""
        return frozenset((*self.parts, *self.owners.values(), *self.packed))

    def names_of(self, name: str) -> tuple[str, ...]:
        """A parameter's name and its tied aliases."""
        return (name, *self._aliases_of.get(name, ()))

    @cached_property
    def _aliases_of(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for alias, first in self.aliases.items():
            found.setdefault(first, []).append(alias)
        return found


def weights(states: States, trainable: Sequence[str] = ()) -> Weights:
    """Where the weights of a checkpoint lie.

    Args:
        states: what the files of the checkpoint say.
        trainable: patterns (as in `fnmatch`) of the names that were trained, for a full checkpoint of ZeRO stage 0 that
            does not say it, or that are not frozen though no optimizer holds them, which stage 1 does not say.

    Raises:
        CheckpointError: the files do not fit together, or do not say which weights were trained.
    """
    models = [plain_names(model) for model in states.models]
    model = models[0]
    listed = [name for group in names_of_groups(model) for name in group]
    module, subclasses, parts, buffers = contents(model, states.manifest)
    first = _first_names(module, model, states.zero_stage)
    packed = of_base(buffers, parts)
    masters = _masters(states, names_of_groups(model))
    if missing := [name for name in listed if name not in module]:
        raise CheckpointError(
            f"{states.layout.model[0]} lacks the weights of {named(missing)}. Take a whole copy of it."
        )
    known = masters or {name: whole(module[name]) for name in listed}
    candidates = [
        name
        for name in module
        if name == first[name] and name not in buffers and name not in parts and not name.endswith("_extra_state")
    ]
    says_what_is_frozen = isinstance(model.get("frozen_param_fragments"), dict)
    if not known and not states.manifest and not says_what_is_frozen:
        known = {name: whole(module[name]) for name in _chosen(candidates, module, model, trainable)}
    frozen = _frozen(states, models, module) if says_what_is_frozen else {}
    trained = dict(known)
    for name in candidates:
        if name in trained:
            frozen.pop(name, None)
        elif name not in frozen and (module[name].numel or states.zero_stage < 3):
            # Neither trained nor known to be frozen: a parameter that no optimizer holds.
            kept = states.manifest or says_what_is_frozen or _matches(name, trainable)
            (trained if kept else frozen)[name] = whole(module[name])
    # What is tied has its parts under each of its names.
    same = {n: first.get(o, o) + n.removeprefix(o) for n, o in parts.items() if n.startswith(f"{o}.")}
    same = {name: to for name, to in same.items() if name != to and to in parts}
    ours = {*trained, *frozen, *subclasses}
    found = Weights(
        trained=trained,
        frozen=frozen,
        buffers={name: whole(module[name]) for name in module if name in buffers and name not in packed},
        aliases={name: to for name, to in first.items() if name != to and to in ours} | same,
        halves={
            name: whole(module[name])
            for name in masters
            if name in module and module[name].numel and module[name].is_contiguous and module[name].dtype in FLOATING
        },
        parts={name: whole(module[name]) for name in module if name in parts and name not in same},
        owners={name: first.get(owner, owner) for name, owner in parts.items() if name not in same},
        packed={name: whole(module[name]) for name in module if name in packed},
        subclasses=subclasses,
    )
    check_proportion(sum(item.nbytes for item in found.all.values()), *states.layout.files)
    return found


def check_proportion(size: int, *files: Path) -> None:
    """Raise CheckpointError where tensors have far more bytes than the files that hold them.

    Many names can be given to one tensor, and its elements can be one that is repeated: who writes or reads such
    tensors one by one takes room and time for each.
    """
    if size > 100 * sum(file.stat().st_size for file in files) + (1 << 26):
        shown = files[0] if len(files) == 1 else files[0].parent
        raise CheckpointError(
            f"{shown} is damaged: its tensors would take {size} bytes, far more than the checkpoint has. Take a"
            " whole copy of it."
        )


def plain_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """A file's model states with plain names throughout: DeepSpeed takes some from the module and some from its state
    dict, which differ where a layer is wrapped."""
    changed: dict[str, Any] = {"buffer_names": [plain(name) for name in names(model.get("buffer_names"))]}
    changed["param_shapes"] = [
        {plain(name): shape for name, shape in group.items()} for group in names_of_groups(model)
    ]
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params"):
        if isinstance(model.get(key), dict):
            changed[key] = {plain(name): item for name, item in model[key].items()}
    if "shared_params" in changed:
        changed["shared_params"] = {name: plain(to) for name, to in changed["shared_params"].items()}
    return {**model, **changed}


def contents(
    model: Mapping[str, Any], manifest: Manifest | None
) -> tuple[dict[str, StoredTensor], dict[str, Subclass], dict[str, str], set[str]]:
    """What a file's model states hold by name: tensors, tensor subclasses, the owners of parts, names of buffers.

    Args:
        model: as `plain_names` gives it.
        manifest: the checkpoint's.
    """
    module: dict[str, StoredTensor] = {}
    subclasses = {}
    inner: dict[str, str] = {}
    for name, item in model["module"].items():
        if isinstance(item, StoredTensor):
            module[name] = item
        elif (found := subclass(item)) is not None:
            subclasses[name] = found
            for rest, tensor in found.inner.items():
                module[f"{name}.{rest}"] = tensor
                inner[f"{name}.{rest}"] = name
    fragments = model.get("frozen_param_fragments") or {}
    for name, item in fragments.items():
        if name not in subclasses and (found := subclass(item)) is not None:
            subclasses[name] = replace(found, is_in_module=False)
    buffers = _buffers(model, module)
    listed = {name for group in names_of_groups(model) for name in group}
    listed |= {*(model.get("frozen_param_shapes") or {})}
    listed |= {name for one in (manifest.parameters if manifest else ()) for name in one.names}
    dtypes = {name: tensor.dtype for name, tensor in module.items() if name not in buffers}
    return module, subclasses, {**owners(dtypes, listed), **inner}, buffers


def _buffers(model: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> set[str]:
    """The names of all buffers. DeepSpeed lists only the first name of one that has several."""
    listed = names(model.get("buffer_names")) & module.keys()
    places = {_place(module[name]) for name in listed if module[name].numel}
    return listed | {name for name, tensor in module.items() if _place(tensor) in places}


def _place(tensor: StoredTensor) -> tuple[Any, ...]:
    return tensor.storage, repr((tensor.offset, tensor.shape))  # whose hash nobody can choose, other than a shape's


def check_one_run(found: Weights) -> None:
    """Raise CheckpointError where a master is not that of the weight that the model had: its file is of another run.

    It looks at the first elements of each rank's part; rounding apart, most of them must agree. ZeRO-3 does not save
    what it would take.
    """
    apart: dict[str, set[str]] = {}
    with Records(check=False) as records:
        for name, half in found.halves.items():
            begin, (place,) = 0, half.pieces
            for piece in found.trained[name].pieces:
                count = min(piece.count, SAMPLE)
                theirs = Piece(place.storage, place.begin + begin, count)
                master, weight = (
                    _numbers(records.read(Whole(dtype, (count,), (sample,))), dtype)
                    for dtype, sample in (
                        (found.trained[name].dtype, Piece(piece.storage, piece.begin, count)),
                        (half.dtype, theirs),
                    )
                )
                agree = sum(abs(m - w) <= 0.01 * abs(m) + 1e-6 for m, w in zip(master, weight, strict=True))
                if 2 * agree < count:
                    apart.setdefault(name, set()).update((piece.storage.path.name, place.storage.path.name))
                begin += piece.count
    if apart:
        raise CheckpointError(
            f"{' and '.join(sorted(set().union(*apart.values())))} are not of one run: the optimizer's masters are not"
            f" the weights that the model had: {named(list(apart), 3)}. Take all files from one checkpoint."
        )


def _numbers(content: bytearray, dtype: str) -> Sequence[float]:
    if dtype == "bfloat16":  # the upper half of an fp32
        content = bytearray(b"".join(b"\0\0" + content[i : i + 2] for i in range(0, len(content), 2)))
    code, width = {"float16": ("e", 2), "float64": ("d", 8)}.get(dtype, ("f", 4))
    return struct.unpack(f"<{len(content) // width}{code}", content)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(plain(name), pattern) for pattern in patterns)


def _first_names(module: Mapping[str, StoredTensor], model: Mapping[str, Any], stage: int) -> dict[str, str]:
    """The first of all names that share one tensor, for each of them, in the module's order."""
    shared = model.get("shared_params")
    first = {}
    for alias, to in (shared if isinstance(shared, dict) else {}).items():
        # DeepSpeed goes by addresses but in ZeRO-3, and what has no elements has none of its own.
        if alias in module and (module[alias].numel or stage == 3):
            first[alias] = to
    places: dict[Any, str] = {}
    for name, tensor in module.items():
        place = _place(tensor) if tensor.numel else name
        first.setdefault(name, places.setdefault(place, name))
    return {name: first[name] for name in module}


def _masters(states: States, groups: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, Whole]:
    """The fp32 masters by name, in the order of the optimizer; none where the optimizer keeps none of its own."""
    if not states.optimizers or not groups:
        return {}
    partitions = [
        _tensors_of(state, "fp32_flat_groups") or _tensors_of(state, "single_partition_of_fp32_groups")
        for state in states.optimizers
    ]
    if not all(partitions) or any(tensor.dtype not in FLOATING for own in partitions for tensor in own):
        raise CheckpointError(f"{states.layout.root} has no fp32 master weights among its optimizer states.")
    found: dict[str, Whole] = {}
    if states.zero_stage == 3:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        parts = {name: -(-prod(shape) // len(partitions)) for name, shape in shapes.items()}
        wanted = sum(parts.values())
        _check_master_sizes(states, [sum(item.numel for item in own) for own in partitions], [wanted] * len(partitions))
        begin = 0
        for name, shape in shapes.items():
            pieces = _cut([piece for own in partitions for piece in joined(own, begin, parts[name])], prod(shape))
            found[name] = Whole(partitions[0][0].dtype, tuple(shape), pieces)
            begin += parts[name]
        return found
    for index, group in enumerate(groups):
        for file, ranks in zip(states.layout.optimizer, partitions, strict=True):
            if len(ranks) <= index:
                raise CheckpointError(f"{file} lacks the masters of parameter group {index}. Take a whole copy of it.")
        own = [ranks[index] for ranks in partitions]
        size, part = numel(group), part_of_group(group, len(partitions))
        least = [min(max(size - rank * part, 0), part) for rank in range(len(own))]
        _check_master_sizes(states, [item.numel for item in own], least, ALIGNMENT * len(partitions))
        begin = 0
        for name, shape in group.items():
            found[name] = Whole(own[0].dtype, tuple(shape), joined(own, begin, prod(shape)))
            begin += prod(shape)
    return found


def _check_master_sizes(states: States, sizes: Sequence[int], expected: Sequence[int], padding: int = 0) -> None:
    """Raise CheckpointError if the masters have too few or too many elements, and name the file that is wrong.

    Args:
        states: of the checkpoint.
        sizes: the number of elements that each rank's file holds.
        expected: the number that it should hold.
        padding: how many more all files together may hold.
    """
    if sum(expected) <= sum(sizes) <= sum(expected) + padding and (padding or list(sizes) == list(expected)):
        return
    wrong = [rank for rank, (size, wanted) in enumerate(zip(sizes, expected, strict=True)) if size != wanted]
    rank = next((rank for rank in wrong if sizes[rank] < expected[rank]), wrong[0])
    raise CheckpointError(
        f"{states.layout.optimizer[rank]} does not fit the model's states: the masters have {sizes[rank]} elements in"
        f" place of {expected[rank]}. It is of another run, or they are on NVMe; take all files from one checkpoint."
    )


def _tensors_of(state: Mapping[str, Any], key: str) -> list[StoredTensor]:
    """The flat tensors of a rank, by group."""
    found = [
        tensor for _, tensor in sorted(tensors(state.get(key)), key=lambda item: [str(k).zfill(9) for k in item[0]])
    ]
    return [tensor for tensor in found if tensor.is_contiguous]


def _cut(pieces: Sequence[Piece], count: int) -> tuple[Piece, ...]:
    """The first elements of some pieces: what is beyond is padding."""
    kept = []
    for piece in pieces:
        if count > 0:
            kept.append(Piece(piece.storage, piece.begin, min(piece.count, count)))
        count -= piece.count
    return tuple(kept)


def _frozen(
    states: States, models: Sequence[Mapping[str, Any]], module: Mapping[str, StoredTensor]
) -> dict[str, Whole]:
    """The frozen parameters that DeepSpeed lists, which it does from ZeRO-2 on."""
    shapes = models[0].get("frozen_param_shapes") or {}
    if states.zero_stage < 3:
        return {name: whole(module[name]) for name in shapes if name in module}
    found = {}
    for name, shape in shapes.items():
        parts: list[Any] = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if subclass(parts[0]) is not None:
            continue
        if not all(isinstance(part, StoredTensor) and part.is_contiguous for part in parts):
            raise CheckpointError(f"{states.layout.root} lacks a partition of {name!r}. Take a whole copy of it.")
        if sum(part.numel for part in parts) < prod(shape):
            size = part_of_parameter(shape, len(parts))
            file = next(file for file, part in zip(states.layout.model, parts, strict=True) if part.numel < size)
            raise CheckpointError(f"{file} does not hold its part of {name!r}. Take a whole copy of it.")
        pieces = [piece for part in parts for piece in joined([part], 0, part.numel)]
        found[name] = Whole(parts[0].dtype, tuple(shape), _cut(pieces, prod(shape)))
    return found


def _chosen(
    candidates: Sequence[str], module: Mapping[str, StoredTensor], model: Mapping[str, Any], trainable: Sequence[str]
) -> list[str]:
    """The trained ones of a full checkpoint of stage 0, where only the optimizer's state tells them from the others.

    Its moments have the shapes of what it trained. Where it trained all of a shape, or none, they are known by that.
    """
    optimizer = model.get("optimizer")
    state = optimizer.get("state", optimizer) if isinstance(optimizer, dict) else {}
    trained = Counter(_said(tensor) for path, tensor in tensors(state) if path[-1:] == ("exp_avg",))
    if trainable:
        chosen = [name for name in candidates if _matches(name, trainable)]
        left = trained - Counter(_said(module[name]) for name in chosen)
        if left:
            raise CheckpointError(
                f"The optimizer has trained {left.total()} parameters more than the given patterns choose, of shape"
                f" {named(left)}. Choose all that were trained."
            )
        return chosen
    there = Counter(_said(module[name]) for name in candidates)
    unclear = [name for name in candidates if trained[_said(module[name])] not in (0, there[_said(module[name])])]
    if unclear or not trained:
        raise CheckpointError(
            "A full checkpoint of ZeRO stage 0 does not say which parameters were trained, and the optimizer's state"
            f" leaves it open for {named(unclear or list(candidates), 3)}. Say it with --trainable, such as"
            " --trainable '*lora_*'."
        )
    return [name for name in candidates if trained[_said(module[name])]]


def _said(tensor: StoredTensor) -> str:
    """A shape as a text, as `_place` has it."""
    return str(list(tensor.shape))

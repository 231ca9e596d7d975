"""A base on disk: the frozen parameters' values in the files that a program builds its model from.

Their names there are not those in the module that was trained, which has wrappers around the model: the attribute of a
LightningModule before them, and PEFT's names in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, named
from ...manifest import LeftOut, Manifest
from ...parameters import PARAMETER, is_name, plain
from .. import dtypes as converting
from ..format import safetensors as safetensors_file
from ..format.archive import read
from ..format.records import Piece, Records, Whole, whole
from ..format.safetensors import MAX_HEADER
from ..format.stored import Storage, StoredTensor
from ..quantization import groups, is_subclass, subclass
from ..zero.states import check_together, load
from ..zero.weights import check_proportion, weights
from .requantize import Made, Quantizer, check_installed, made

_PEFTS_OWN = ("base_model.model.", "base_layer.", "original_module.", "quant_linear_module.", "token_adapter.")
# PEFT's values of `init_lora_weights` that change the base's weights, by how they begin.
_REWRITING_INITS = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "loftq": "LoftQ", "lora_ga": "LoRA-GA"}


@dataclass(frozen=True)
class Base:
    """The tensors of a base by name, and where it is."""

    path: Path
    tensors: dict[str, Whole]
    quantizer: Quantizer = field(default_factory=Quantizer)

    def read(self, records: Records, tensor: Whole, parameter: LeftOut) -> bytearray:
        """The content of what was left out, as the run had it: in its dtype, and quantized where that was."""
        if isinstance(tensor, Made):
            return self.quantizer.read(records, tensor, parameter)
        # A program may load its base in another dtype than the file has.
        return converting.converted(records.read(tensor), tensor.dtype, parameter.dtype)

    def find(self, parameter: LeftOut) -> Whole | None:
        """The tensor for a parameter that was left out of a checkpoint, under any of its names; None without one."""
        for name in parameter.names:
            found = self.tensors.get(name) or self._by_ending(_without_wrappers(name))
            if found is not None:
                return found
        return None

    def _by_ending(self, name: str) -> Whole | None:
        # The trained module has the model as an attribute: its name has more in front. Or the files are of a larger
        # model, such as one with a head: then theirs has.
        ending = name
        while ending:
            if ending in self.tensors:
                return self.tensors[ending]
            ending = ending.partition(".")[2]
        for ending in (name, *_endings(name)):
            if "." in ending and (longer := self._longer.get(ending)) is not None:
                return self.tensors[longer]
        return None

    @cached_property
    def _longer(self) -> dict[str, str | None]:
        """The name that ends so, by each ending; None where several do."""
        found: dict[str, str | None] = {}
        for known in filter(is_name, self.tensors):
            for ending in _endings(known):
                found[ending] = None if ending in found else known
        return found


def _endings(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _without_wrappers(name: str) -> str:
    for part in _PEFTS_OWN:
        name = name.replace(part, "")
    return name


def open_base(path: str | Path, trust: bool = False) -> Base:
    """Read what a base has, and no tensor of it.

    Args:
        path: a folder of safetensors, one such file, one of `torch.save` (a state dict, or with one under
            "state_dict"), or the directory of a full DeepSpeed checkpoint.
        trust: also read files that name classes which do not belong there. Nothing of them is run.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    base = Path(path)
    if base.is_dir():
        return Base(base, _of_folder(base, trust))
    if not base.is_file():
        raise CheckpointError(f"There is no base at {base}. Check the path.")
    return Base(base, _of_file(base, trust))


def _of_folder(folder: Path, trust: bool) -> dict[str, Whole]:
    if (folder / "latest").is_file():
        states = load(folder, None, trust)
        check_together(states)
        # Stage 0 may not say what was trained; what was left out elsewhere is found by its name, and verified.
        all_ = weights(states, () if states.zero_stage else ("*",))
        tensors = {**all_.buffers, **all_.base, **({} if states.zero_stage else all_.trained)}
        return {**tensors, **{alias: tensors[to] for alias, to in all_.aliases.items() if to in tensors}}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            if index.stat().st_size > MAX_HEADER:
                raise ValueError("it is too long")
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if odd := [name for name in files if name != Path(name).name]:
                raise ValueError(f"it names {odd[0][:100]!r}, which is no file beside it")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is damaged ({error}). Take a whole copy of it.") from None
        paths = [folder / name for name in files]
        if missing := [item.name for item in paths if not item.is_file()]:
            raise CheckpointError(f"{folder} lacks {named(missing)}, which its index names. Take a whole copy of it.")
    else:
        found = sorted(item for item in folder.iterdir() if item.is_file())
        paths = [item for item in found if item.match("*.safetensors")]
        paths = paths or [item for item in found if item.match("pytorch_model*.bin")]
    if not paths:
        raise CheckpointError(
            f"{folder} holds no base: no *.safetensors, no pytorch_model*.bin and no DeepSpeed checkpoint (`latest`)."
        )
    return {name: tensor for item in paths for name, tensor in _of_file(item, trust).items()}


def _of_file(file: Path, trust: bool) -> dict[str, Whole]:
    """The tensors of one file; a tied alias, that safetensors leaves out, is among them where the file says it."""
    if file.suffix == ".safetensors":
        found = {}
        for name, (dtype, shape) in safetensors_file.described(file).items():
            tensor = Whole(dtype, shape, ())
            storage = Storage(file, name, dtype, tensor.numel)
            found[name] = Whole(dtype, shape, (Piece(storage, 0, tensor.numel),))
        about = safetensors_file.metadata(file)
        tied = {alias: found[to] for alias, to in about.items() if to in found and alias not in found}
        return {**found, **tied, **_flattened(found, about)}
    state: Any = read(file, trust=trust).state
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not any(isinstance(item, StoredTensor) for item in state.values()):
        raise CheckpointError(f"{file} holds no weights: it is neither a state dict nor has one. Check the path.")
    tensors = {plain(str(name)): whole(item) for name, item in state.items() if isinstance(item, StoredTensor)}
    for name, item in state.items():
        if (one := subclass(item)) is not None:
            tensors |= {f"{plain(str(name))}.{rest}": whole(tensor) for rest, tensor in one.inner.items()}
    return tensors


def _flattened(tensors: Mapping[str, Whole], about: Mapping[str, str]) -> dict[str, Whole]:
    """The inner tensors of torchao's by the names of parts: a file names `layer.weight.scale` `layer._weight_scale`."""
    found: dict[str, Whole] = {}
    for name in about.keys() - tensors.keys():
        layer, _, last = name.rpartition(".")
        prefix = f"{layer}._{last}_"
        found |= {f"{name}.{own.removeprefix(prefix)}": tensors[own] for own in tensors if own.startswith(prefix)}
    return found


def tensors_for(manifest: Manifest, base: Base) -> dict[LeftOut, Whole]:
    """The base's tensor for all that was left out, the parts of each parameter together.

    A parameter that consists of other tensors has none of its own, and may be missing.

    Raises:
        CheckpointError: one is missing or has another shape, or it takes bitsandbytes, which is not installed.
    """
    there: dict[LeftOut, Whole] = {}
    missing, reshaped = [], []
    for group in groups(manifest.left_out):
        found = {one: base.find(one) for one in group if not is_subclass(one)}
        weight = found.get(group[0])
        if weight is not None and not any(found.get(one) for one in group[1:]):
            found |= made(group, weight) or {}
        for one, tensor in found.items():
            if tensor is not None and tensor.shape == one.shape:
                there[one] = tensor
            elif tensor is not None:
                reshaped.append(f"{one.name!r} is {list(tensor.shape)} there, {list(one.shape)} at the save")
            else:
                missing.append(one)
    if missing:
        raise CheckpointError(f"{base.path} lacks {named([one.name for one in missing])}. {_remedy(missing, manifest)}")
    if reshaped:
        raise CheckpointError(f"{base.path} is not the base that was saved with: {'; '.join(reshaped[:5])}.")
    check_proportion(
        sum(tensor.nbytes for tensor in there.values()),
        *{piece.storage.path for tensor in there.values() for piece in tensor.pieces},
    )
    if any(isinstance(tensor, Made) for tensor in there.values()):
        check_installed()
    return there


def _remedy(missing: Iterable[LeftOut], manifest: Manifest) -> str:
    """What to do about a base that lacks this."""
    adapters = {adapter for known in manifest.adapters.values() for adapter in known}
    owners = [adapters & set(one.name.split(".")) for one in missing]
    if all(owners):
        return (
            f"They belong to the adapter {named(sorted(set().union(*owners)))} and were frozen; a base has no adapters."
            " Save them with patch(keep=[...]), or pass a full checkpoint of the run as the base."
        )
    was_quantized = any(one.kind != PARAMETER for one in missing)
    return "Name the base that the run was built from" + (": it was quantized." if was_quantized else ".")


def refuse_wrong(base: Base, names: Iterable[str], manifest: Manifest) -> None:
    """Raise CheckpointError where the base has other values than the one that was saved with."""
    wrong = list(names)
    if wrong:
        raise CheckpointError(other_values(base, wrong, manifest) + " Name the base that the run was built from.")


def other_values(base: Base, names: Iterable[str], manifest: Manifest) -> str:
    """What to say of a base that has other values than the one that was saved with."""
    said = f"{base.path} is not the base that was saved with: it has other values in {named(list(names))}."
    inits = _rewriting_inits(manifest)
    if not inits:
        return said
    return (
        f"{said} A possible cause: the adapter was initialised with {' and '.join(inits)}, which rewrites the base's"
        " weights; pass them as they were after that, such as in a full checkpoint of the run."
    )


def _rewriting_inits(manifest: Manifest) -> list[str]:
    """The names of the adapters' initialisations that change the base."""
    found = set()
    for config in (config for adapters in manifest.adapters.values() for config in adapters.values()):
        try:
            init = str(json.loads(config)["init_lora_weights"]).lower()
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        found |= {name for begin, name in _REWRITING_INITS.items() if init.startswith(begin)}
    return sorted(found)

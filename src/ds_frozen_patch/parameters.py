"""What a module contains, by name: parameters, buffers, and other entries of its state dict that belong to parameters.

A quantized layer has more than a packed weight: scales, zero points, a code book, the quantization settings. Some of
these are buffers, some are inner tensors of a tensor subclass, and some are only in the layer's state dict. `contents`
finds all of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from .internals import shape_of

if TYPE_CHECKING:
    import torch

PREFIX = "_forward_module."
"""The prefix that Lightning before 2.1 adds to the parameter names of a LightningModule, also in checkpoints."""
_COMPILED, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
WRAPPERS = (f"{_COMPILED}.", f"{_CHECKPOINTED}.")
"""What `torch.compile` and activation checkpointing insert into names; the latter not into those of state dicts."""

PARAMETER, BUFFER, PART = "parameter", "buffer", "part"
"""The kinds of contents. A part is something that a parameter needs besides its values, such as its scales."""

# The packages with quantized layers, and which buffers of these belong to the base. (GPTQ's bias is a buffer, too.)
# State dict entries of these layers that are neither parameter nor buffer belong to the base, too.
_PACKED = ("qweight", "qzeros", "scales", "g_idx", "bias")
_QUANTIZED: Mapping[str, Collection[str]] = {
    "auto_gptq": _PACKED,
    "awq": _PACKED,
    "bitsandbytes": (),
    "gptqmodel": _PACKED,
    "hqq": (),
    "optimum.quanto": ("input_scale", "output_scale"),
    "torchao": ("weight", "scales", "zeros", "scales_and_zeros"),
}
_TRAINING = "torchao.quantization.qat"  # layers for quantization-aware training; their scales are trained


@dataclass(eq=False, slots=True)
class ModuleTensor:
    """A parameter, buffer or part of a module.

    Attributes:
        names: all its plain names: the one in `named_parameters()`, then its tied aliases.
        kind: `PARAMETER`, `BUFFER` or `PART`.
        shape: the shape of the whole tensor, even if ZeRO-3 has partitioned it.
        dtype: torch's name of the dtype, such as "bfloat16"; for a tensor subclass its class, such as "Int8Tensor".
        tensor: the tensor that is fingerprinted. For a subclass it contains its settings, as bytes; the inner tensors
            are parts.
        group: for a part, the first name of its parameter; else its own first name.
        is_frozen: whether it belongs to the base: a frozen parameter, a part of one, or a buffer of a quantized layer.
        suffix: of a part's names, see `part_name`; else empty.
        is_subclass: whether it is a parameter whose tensor subclass consists of other tensors.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    tensor: torch.Tensor
    group: str
    is_frozen: bool
    suffix: str = ""
    is_subclass: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Its size in bytes; 0 for a tensor subclass, whose parts are counted."""
        return 0 if self.is_subclass else prod(self.shape) * self.tensor.element_size()


def is_of_lora(name: str) -> bool:
    """Whether a parameter is called like one of LoRA's: `layer.lora_A`, `lora_A.default.weight`, `lora_down.weight`."""
    return any(part.startswith("lora_") for part in name.split(".")[-3:])


def plain(name: str) -> str:
    """A name as in the user's module, without those of wrappers."""
    name = name.removeprefix(PREFIX)
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def compiled_modules(names: Iterable[str]) -> frozenset[str]:
    """The plain names of the modules that `torch.compile` has wrapped, from the names of their parameters."""
    wrapped = set()
    for name in names:
        before, *others = name.removeprefix(PREFIX).split(f"{_COMPILED}.")
        for after in others:
            wrapped.add(plain(before).removesuffix("."))
            before += after
    return frozenset(wrapped)


def with_compiled(name: str, compiled: Collection[str]) -> str:
    """A plain name as in the state dict of a module with compiled parts; see `compiled_modules`."""
    if not compiled:
        return name
    parts = name.split(".")
    inserted = [[part, _COMPILED] if ".".join(parts[:i]) in compiled else [part] for i, part in enumerate(parts, 1)]
    whole = [_COMPILED] if "" in compiled else []
    return ".".join([*whole, *(part for part_and_mark in inserted for part in part_and_mark)])


def with_adapters(name: str, names: Container[str]) -> str:
    """A plain name in a module whose `names` are others since PEFT has wrapped more layers, or the whole model."""
    if name in names:
        return name
    parts = name.split(".")
    models = [parts, *([*parts[:at], "base_model", "model", *parts[at:]] for at in range(len(parts)))]
    wrapped = (
        [*model[:end], *layer, *model[end:]]
        for model in models
        for end in range(len(model) - 1, 0, -1)
        for layer in ((), ("base_layer",))
    )
    return next((found for found in map(".".join, wrapped) if found in names), name)


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a parameter or buffer: a string that is short enough to be parsed."""
    return isinstance(value, str) and len(value) <= 1000 and value.count(".") <= 100


def prefix_of(names: Iterable[str]) -> str:
    """`PREFIX` if the names of a module have it (all or none do), else an empty string."""
    return PREFIX if next(iter(names), "").startswith(PREFIX) else ""


def dtype_of(parameter: torch.Tensor) -> str:
    """torch's name of a parameter's dtype, such as "bfloat16"; for a tensor subclass the name of its class."""
    return _class_of(parameter) if inner_tensors(parameter) else str(parameter.dtype).removeprefix("torch.")


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """The inner tensors of a tensor subclass, by attribute path; empty for a plain tensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for attribute in _flattened(tensor)[0]:
        inner = getattr(tensor, attribute)
        deeper = inner_tensors(inner)
        tensors |= {f"{attribute}.{rest}": innermost for rest, innermost in deeper.items()} or {attribute: inner}
    return tensors


class Contents:
    """What a module contains at present, by plain name.

    A walk through a large module takes milliseconds, so it is made only once.

    Attributes:
        module: the module.
        layers: it, and all modules in it, by path.
        raw_names: of its parameters, with those of wrappers.
        parameters: including tied aliases, in the module's order.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.layers = module, dict(module.named_modules(remove_duplicate=False))
        named, self._buffers = (
            {
                f"{path}.{name}" if path else name: member
                for path, layer in self.layers.items()
                for name, member in getattr(layer, kind).items()
                if member is not None
            }
            for kind in ("_parameters", "_buffers")
        )
        self.raw_names = named.keys()
        self.parameters = {plain(name): parameter for name, parameter in named.items()}

    @cached_property
    def names(self) -> dict[torch.nn.Parameter, tuple[str, ...]]:
        """Each parameter with all its names, tied aliases included, in the module's order."""
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self.parameters.items():
            names.setdefault(parameter, []).append(name)
        return {parameter: tuple(all_names) for parameter, all_names in names.items()}

    @cached_property
    def state(self) -> dict[str, Any]:
        """The module's state dict, with the parameters themselves if the module supports that."""
        try:
            return {plain(name): value for name, value in self.module.state_dict(keep_vars=True).items()}
        except TypeError:  # one that takes no arguments
            return {plain(name): value for name, value in self.module.state_dict().items()}

    @property
    def names_in_state(self) -> dict[torch.nn.Parameter, tuple[str, ...]]:
        """The parameters that the state dict contains, each with all its names there.

        These can be others than in `parameters`. They are found by identity, or by name or storage where the module has
        a `state_dict` of its own.
        """
        saved_names: dict[torch.nn.Parameter, tuple[str, ...]] = {}
        at: dict[int, list[str]] = {}
        for name, value in self.state.items():
            at.setdefault(id(value), []).append(name)
        others = {} if all(id(parameter) in at for parameter in self.names) else self.state
        storages = {value.data_ptr(): [name] for name, value in others.items() if hasattr(value, "data_ptr")}
        for parameter, names in self.names.items():
            saved = at.get(id(parameter)) or [name for name in names if name in self.state]
            if saved := saved or (storages.get(parameter.data_ptr(), []) if parameter.numel() else []):
                saved_names[parameter] = tuple(saved)
        return saved_names

    @cached_property
    def tensors(self) -> list[ModuleTensor]:
        """Everything that the module contains: parameters, each with its parts, and persistent buffers."""
        buffers = {plain(name): buffer for name, buffer in self._buffers.items()}
        quantized = dict(_quantized_layers(self.layers))
        by_identity = {id(parameter): parameter for parameter in self.names}
        names = dict(self.names)
        for name, value in self.state.items():  # it may have other names
            if name not in self.parameters and id(value) in by_identity:
                names[by_identity[id(value)]] += (name,)
        first = {name: all_names[0] for all_names in names.values() for name in all_names}
        by_parameter: dict[str, list[ModuleTensor]] = {}
        for parameter, all_names in names.items():
            is_subclass, is_frozen = hasattr(type(parameter), "__tensor_flatten__"), not parameter.requires_grad
            tensor = described(settings_of(parameter)) if is_subclass else parameter
            shape, dtype = shape_of(parameter), dtype_of(parameter)
            whole = ModuleTensor(
                all_names, PARAMETER, shape, dtype, tensor, all_names[0], is_frozen, is_subclass=is_subclass
            )
            by_parameter[whole.name] = [whole]
        assigned = set(first)
        others = []
        for name, value in self.state.items():
            if name in assigned:
                continue
            if name in buffers:
                layer, _, last = name.rpartition(".")
                tensor, is_frozen = buffers[name], last in quantized.get(layer, ())
                others.append(
                    ModuleTensor((name,), BUFFER, tuple(tensor.shape), dtype_of(tensor), tensor, name, is_frozen)
                )
            elif (owner := _owner(name, first, quantized)) is not None:
                group, suffix = owner
                part = _part(
                    by_parameter[group][0], suffix, value if hasattr(value, "element_size") else described(value)
                )
                by_parameter[group].append(part)
                assigned.update(part.names)
        for parameter, (whole, *parts) in zip(names, by_parameter.values(), strict=True):
            # A subclass that saves its parts itself (optimum-quanto's) does so in a layout that is no kernel's.
            if whole.is_subclass and not parts:
                by_parameter[whole.name] += [
                    _part(whole, f".{rest}", inner) for rest, inner in inner_tensors(parameter).items()
                ]
        return [*(entry for its_tensors in by_parameter.values() for entry in its_tensors), *others]

    @cached_property
    def by_name(self) -> dict[str, ModuleTensor]:
        """The same, by all names."""
        return {name: entry for entry in self.tensors for name in entry.names}


def part_name(name: str, suffix: str) -> str:
    """The name of a part of a parameter: below the parameter's name (".absmax") or beside it ("SCB")."""
    layer = name.rpartition(".")[0]
    return name + suffix if suffix.startswith(".") else f"{layer}.{suffix}" if layer else suffix


def part_suffix(name: str, of: str) -> str:
    """The inverse of `part_name`: the suffix of a part's name."""
    return name[len(of) :] if name.startswith(f"{of}.") else name.removeprefix(f"{of.rpartition('.')[0]}.")


def _part(of: ModuleTensor, suffix: str, tensor: Any) -> ModuleTensor:
    names = tuple(dict.fromkeys(part_name(name, suffix) for name in of.names))
    return ModuleTensor(names, PART, tuple(tensor.shape), dtype_of(tensor), tensor, of.name, of.is_frozen, suffix)


def _quantized_layers(layers: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Collection[str]]]:
    """The quantized ones of a module's layers, by plain path, and which of their buffers belong to the base."""
    for path, layer in layers.items():
        cls: Any = type(layer)
        package = _package_of(cls)
        if package is not None and not any(p.requires_grad for p in layer.parameters(recurse=False)):
            yield plain(f"{path}.").removesuffix("."), _QUANTIZED[package]


@cache
def _package_of(layer: type) -> str | None:
    """The package of a class of quantized layers; None for other layers, and for those whose scales are trained."""
    for cls in layer.__mro__:
        if cls.__module__.startswith(_TRAINING):
            return None
        package = next((p for p in _QUANTIZED if f"{cls.__module__}.".startswith(f"{p}.")), None)
        if package is not None:
            return package
    return None


def _owner(name: str, first: Mapping[str, str], quantized: Mapping[str, Any]) -> tuple[str, str] | None:
    """For a part in a state dict, the first name of its parameter and the suffix; None for other entries."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in first:
            return first[prefix], name[len(prefix) :]
    layer, _, last = name.rpartition(".")
    if layer not in quantized or last == "_extra_state":
        return None
    return next(((owner, last) for prefix, owner in first.items() if prefix.rpartition(".")[0] == layer), None)


def _flattened(tensor: Any) -> tuple[Iterable[str], Any]:
    flattened = tensor.__tensor_flatten__()
    return (flattened[0], flattened[1]) if isinstance(flattened, tuple) else (flattened, None)


def settings_of(tensor: Any) -> Any:
    """The settings of a tensor subclass besides its inner tensors, as values that are equal in every process."""
    return [_class_of(tensor), _stable(_flattened(tensor)[1])]


def _class_of(tensor: Any) -> str:
    """The name of a tensor subclass; for optimum-quanto's kernel-specific ones that of their base class."""
    classes = [cls for cls in type(tensor).__mro__ if "__tensor_flatten__" in vars(cls)]
    of_quanto = [cls for cls in classes if cls.__module__.startswith("optimum.quanto.")]
    return (of_quanto[-1] if of_quanto else type(tensor)).__name__


def _stable(value: Any) -> Any:
    """A value for JSON, without anything that differs between processes, such as addresses."""
    if isinstance(value, Enum):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _stable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, {field.name: _stable(getattr(value, field.name)) for field in fields(value)}]
    text = value.__qualname__ if hasattr(value, "__qualname__") else str(value)
    return type(value).__name__ if " at 0x" in text else text


def described(value: Any) -> torch.Tensor:
    """A plain value as a tensor of bytes, to be fingerprinted."""
    import torch

    return torch.frombuffer(bytearray(json.dumps(_stable(value), sort_keys=True).encode()), dtype=torch.uint8)

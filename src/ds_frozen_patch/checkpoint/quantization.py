"""Recognise quantized bases in files, by the names, shapes and dtypes that each library uses.

A parameter's *parts* are entries of a state dict that are neither parameter nor buffer, such as its scales. GPTQ and
AWQ use *buffers* instead of parameters. At runtime both are found by a module's classes (see
`ds_frozen_patch.parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..parameters import PART
from ..record import LeftOut
from .format.stored import ITEM_SIZES, StandIn, StoredTensor, is_shape

BESIDE_INT8 = ("SCB", "weight_format")
"""What bitsandbytes saves beside a weight in 8 bits."""
PACKED = ("qweight", "qzeros", "scales", "g_idx", "bias")
"""The buffers of a layer of GPTQ or AWQ."""
_QUANTOS_BUFFERS = ("input_scale", "output_scale")
_QUANTOS_PARTS = ("_data", "_scale", "_shift")
_HQQS = ("nbits", "group_size")
_IN_4_BITS = re.compile(
    r"(.+)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
)
_DEPTH = 4  # of nested subclasses
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_TORCHAO = (
    "Float8Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor", "Int4TilePackedTo4dTensor",
    "Int8Tensor", "IntxUnpackedToInt8Tensor",
)  # fmt: skip
_QUANTOS_OWN = ("WeightQBytesTensor", "WeightQBitsTensor")


@dataclass(frozen=True)
class Subclass:
    """A tensor subclass in a file: the full name of its class, its shape, and its inner tensors by attribute.

    `is_in_module` is False if the module's state dict contains other tensors instead.
    """

    item: StandIn
    full_name: str
    shape: tuple[int, ...]
    inner: Mapping[str, StoredTensor]
    is_in_module: bool = True

    @property
    def name(self) -> str:
        """The name of the class, without its module; for quanto's kernel-specific subclasses that of their base."""
        name = self.full_name.rpartition(".")[2]
        if not self.full_name.startswith("optimum.quanto."):
            return name
        return next((parent for parent in _QUANTOS_OWN if name.endswith(parent.removeprefix("Weight"))), name)


def parse_subclass(item: Any, depth: int = 0) -> Subclass | None:
    """Parse the stand-in of a tensor subclass; None for anything else."""
    if depth > _DEPTH or not isinstance(item, StandIn) or item.stands_for != _SUBCLASS or len(item.arguments) != 4:
        return None
    _, cls, arguments, state = item.arguments
    attributes = state[0] if isinstance(state, tuple) and state else state
    is_class = isinstance(cls, type) and issubclass(cls, StandIn)
    shape = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else ()
    if not is_class or not isinstance(attributes, dict) or not is_shape(shape):
        return None
    inner: dict[str, StoredTensor] = {}
    for name, value in attributes.items():
        if isinstance(value, StoredTensor):
            inner[str(name)] = value
        elif (deeper := parse_subclass(value, depth + 1)) is not None:
            inner |= {f"{name}.{rest}": tensor for rest, tensor in deeper.inner.items()}
    return Subclass(item, cls.stands_for, tuple(shape), inner)


def find_owners(there: Mapping[str, str], parameters: Collection[str]) -> dict[str, str]:
    """Find the parameter that each part belongs to.

    Args:
        there: the dtype of each entry of a state dict, by plain name, without buffers.
        parameters: the plain names of known parameters, also of those that were left out.
    """
    parts = [name for name in there if name not in parameters and not name.endswith("_extra_state")]
    return {name: owner for name in parts if (owner := _owner(name, there, parameters)) is not None}


def _owner(name: str, there: Mapping[str, str], parameters: Collection[str]) -> str | None:
    for ancestor in ancestors(name):
        if ancestor in there or ancestor in parameters:
            return ancestor
    layer, _, last = name.rpartition(".")
    weight = f"{layer}.weight"
    if last in BESIDE_INT8 and (f"{layer}.SCB" in there) and there.get(weight, "int8") == "int8":
        return weight
    if last != "W_q" and all(f"{layer}.{setting}" in there for setting in _HQQS):
        return f"{layer}.W_q"
    if last in _QUANTOS_PARTS:
        while name.rpartition(".")[2] in _QUANTOS_PARTS:
            name = name.rpartition(".")[0]
        return name if f"{name}._scale" in there else None
    match = _IN_4_BITS.fullmatch(name)
    has_state = match and any(f"{match[1]}.quant_state.bitsandbytes__{kind}" in there for kind in ("nf4", "fp4"))
    return match[1] if match and has_state else None


def ancestors(name: str) -> Iterator[str]:
    """The prefixes of a dotted name, the longest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def base_buffers(buffers: Collection[str], parts: Mapping[str, str]) -> set[str]:
    """The buffers that belong to a quantized base.

    Args:
        buffers: the plain names of all buffers.
        parts: the owner of each part.
    """
    quantos = {owner for name, owner in parts.items() if name.rpartition(".")[2] == "_data"}
    of_base = set()
    for name in buffers:
        layer, _, last = name.rpartition(".")
        is_packed = last in PACKED and f"{layer}.qweight" in buffers and f"{layer}.scales" in buffers
        if is_packed or (last in _QUANTOS_BUFFERS and f"{layer}.weight" in quantos):
            of_base.add(name)
    return of_base


def group_with_parts(left_out: Sequence[LeftOut]) -> list[tuple[LeftOut, ...]]:
    """Group each parameter or buffer with its parts."""
    groups: dict[str, list[LeftOut]] = {entry.name: [] for entry in left_out if entry.kind != PART}
    for entry in left_out:
        groups.setdefault(entry.group if entry.kind == PART else entry.name, []).append(entry)
    return [tuple(members) for members in groups.values()]


def is_subclass(entry: LeftOut) -> bool:
    """Whether it is a tensor subclass that consists of its parts."""
    return entry.dtype not in ITEM_SIZES


def is_torchao(class_name: str) -> bool:
    """Whether a tensor subclass is one of torchao's, which state dicts contain as they are."""
    return class_name in _TORCHAO

"""What the tools know of quantized bases: from the names, shapes and dtypes in the files, for they have no module.

A parameter's *parts* are entries of a state dict that are neither parameter nor buffer, such as its scales. GPTQ and
AWQ have no parameters, but *buffers* for the same. The runtime finds both by a module's classes (see
`ds_frozen_patch.parameters`); here they are recognised by the names that each library gives them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..manifest import LeftOut
from ..parameters import PART
from .format.stored import ITEM_SIZES, StandIn, StoredTensor, is_shape

BESIDE_INT8 = ("SCB", "weight_format")
"""What bitsandbytes keeps beside a weight in 8 bits."""
PACKED = ("qweight", "qzeros", "scales", "g_idx", "bias")
"""The buffers of a layer of GPTQ or AWQ."""
_QUANTOS_BUFFERS = ("input_scale", "output_scale")
_QUANTOS_PARTS = ("_data", "_scale", "_shift")
_HQQS = ("nbits", "group_size")
_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(nf4|fp4)")
_IN_4_BITS = re.compile(
    r"(.+)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
)
_DEPTH = 4  # of subclasses in each other
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
_TORCHAO = (
    "Float8Tensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor", "Int4TilePackedTo4dTensor",
    "Int8Tensor", "IntxUnpackedToInt8Tensor",
)  # fmt: skip
_QUANTO = (
    "qbytes.WeightQBytesTensor", "qbits.WeightQBitsTensor", "awq.qbits.AWQWeightQBitsTensor",
    "marlin.fp8.qbits.MarlinF8QBytesTensor", "marlin.int4.qbits.MarlinInt4WeightQBitsTensor",
    "tinygemm.qbits.TinyGemmWeightQBitsTensor",
)  # fmt: skip
CLASSES = (
    *(f"torchao.quantization.{name}" for name in _TORCHAO),
    *(f"torchao.quantization.granularity.{name}" for name in ("PerRow", "PerTensor")),
    "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
    "torchao.quantization.quantize_.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs",
    "torchao.quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
    "torchao.float8.inference.Float8MMConfig",
    *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *(f"optimum.quanto.tensor.weights.{name}" for name in _QUANTO),
    "optimum.quanto.tensor.qtype.qtype", "optimum.quanto.tensor.packed.PackedTensor",
    "optimum.quanto.tensor.weights.awq.packed.AWQPackedTensor",
    "optimum.quanto.tensor.weights.awq.packed.AWQPacking",
    "optimum.quanto.tensor.weights.marlin.fp8.packed.MarlinF8PackedTensor",
    "optimum.quanto.tensor.weights.marlin.int4.packed.MarlinInt4PackedTensor",
    "optimum.quanto.tensor.weights.tinygemm.packed.TinyGemmPackedTensor",
)  # fmt: skip
"""What the weights of torchao and optimum-quanto are pickled as, by full name: these are read, and never imported."""
_QUANTOS_OWN = ("WeightQBytesTensor", "WeightQBitsTensor")


@dataclass(frozen=True)
class Subclass:
    """A tensor subclass as a file has it: the full name of its class, its shape, and the tensors that it consists of.

    Their names are the attributes that lead to them. `is_in_module` says that the module's state dict has it, which
    otherwise has other tensors instead.
    """

    item: StandIn
    full_name: str
    shape: tuple[int, ...]
    inner: Mapping[str, StoredTensor]
    is_in_module: bool = True

    @property
    def name(self) -> str:
        """The class's name, without the module that it is in, nor what quanto makes of it for one kernel or another."""
        name = self.full_name.rpartition(".")[2]
        of_quanto = self.full_name.startswith("optimum.quanto.")
        return next((one for one in _QUANTOS_OWN if of_quanto and name.endswith(one.removeprefix("Weight"))), name)


def subclass(item: Any, depth: int = 0) -> Subclass | None:
    """What a stand-in says of a tensor subclass; None for all else."""
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
        elif (deeper := subclass(value, depth + 1)) is not None:
            inner |= {f"{name}.{rest}": tensor for rest, tensor in deeper.inner.items()}
    return Subclass(item, cls.stands_for, tuple(shape), inner)


def owners(there: Mapping[str, str], parameters: Collection[str]) -> dict[str, str]:
    """The parameter that each part is of, by the part's name.

    Args:
        there: the dtype of each entry of a state dict, by its plain name; buffers are not among them.
        parameters: the plain names of what is known to be a parameter, whether it is there or not.
    """
    found = {}
    for name in there:
        if name not in parameters and not name.endswith("_extra_state"):
            owner = _owner(name, there, parameters)
            if owner is not None:
                found[name] = owner
    return found


def _owner(name: str, there: Mapping[str, str], parameters: Collection[str]) -> str | None:
    for ancestor in ancestors(name):
        if ancestor in there or ancestor in parameters:
            return ancestor
    layer, _, last = name.rpartition(".")
    weight = f"{layer}.weight"
    if last in BESIDE_INT8 and (f"{layer}.SCB" in there) and there.get(weight, "int8") == "int8":
        return weight
    if last != "W_q" and all(f"{layer}.{one}" in there for one in _HQQS):
        return f"{layer}.W_q"
    if last in _QUANTOS_PARTS:
        while name.rpartition(".")[2] in _QUANTOS_PARTS:
            name = name.rpartition(".")[0]
        return name if f"{name}._scale" in there else None
    match = _IN_4_BITS.fullmatch(name)
    if match and any(f"{match[1]}.quant_state.bitsandbytes__{kind}" in there for kind in ("nf4", "fp4")):
        return match[1]
    return None


def ancestors(name: str) -> Iterator[str]:
    """The names above one, the nearest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def of_base(buffers: Collection[str], parts: Mapping[str, str]) -> set[str]:
    """Which buffers belong to a quantized base.

    Args:
        buffers: their plain names.
        parts: the owner of each part.
    """
    quantos = {owner for name, owner in parts.items() if name.rpartition(".")[2] == "_data"}
    found = set()
    for name in buffers:
        layer, _, last = name.rpartition(".")
        is_packed = last in PACKED and f"{layer}.qweight" in buffers and f"{layer}.scales" in buffers
        if is_packed or (last in _QUANTOS_BUFFERS and f"{layer}.weight" in quantos):
            found.add(name)
    return found


def quant_type(group: Sequence[LeftOut]) -> str | None:
    """How bitsandbytes quantized a parameter: "nf4", "fp4" or "int8"; None where it did not.

    Args:
        group: the parameter and its parts.
    """
    for one in group[1:]:
        if match := _STATE.fullmatch(one.name):
            return match[2]
        if one.name.endswith(".SCB"):
            return "int8"
    return None


def groups(left_out: Sequence[LeftOut]) -> list[tuple[LeftOut, ...]]:
    """Each parameter or buffer with its parts."""
    found: dict[str, list[LeftOut]] = {one.name: [] for one in left_out if one.kind != PART}
    for one in left_out:
        found.setdefault(one.group if one.kind == PART else one.name, []).append(one)
    return [tuple(members) for members in found.values()]


def is_subclass(one: LeftOut) -> bool:
    """Whether it consists of other tensors, which are parts of it."""
    return one.dtype not in ITEM_SIZES


def of_torchao(class_name: str) -> bool:
    """Whether a tensor subclass is torchao's, which state dicts hold as they are, and not tensor by tensor."""
    return class_name in _TORCHAO


def kinds(dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """What a base was quantized with, in words; nothing where it was not.

    Args:
        dtypes: that of each parameter, part and buffer, by its plain name; of a tensor subclass its class's name.
    """
    found: dict[str, None] = {}
    for name, dtype in dtypes.items():
        layer, _, last = name.rpartition(".")
        if match := _STATE.fullmatch(name):
            double = ", double quantization" if f"{match[1]}.nested_absmax" in dtypes else ""
            found[f"bitsandbytes {match[2]}{double}"] = None
        elif last == "SCB":
            found["bitsandbytes int8"] = None
        elif last == "nbits" and f"{layer}.group_size" in dtypes:
            found["HQQ"] = None
        elif last == "qweight" and f"{layer}.scales" in dtypes:
            found["GPTQ or AWQ (packed in buffers)"] = None
        elif last == "_data" or dtype in _QUANTOS_OWN:
            found["optimum-quanto"] = None
        elif dtype in _TORCHAO:
            found[f"torchao {dtype}"] = None
    return tuple(found)

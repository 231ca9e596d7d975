"""Quantize an unquantized base with bitsandbytes as a run did, to compare it with the manifest's fingerprints.

The settings follow from the manifest: the quant type from a part's name, the block size from the sizes of the packed
weight and of its absmax, double quantization from the nested parts, and the storage from the packed dtype. The dtype
that the program loaded the weights in is not recorded; the usual ones are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ..checkpoint import dtypes
from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.format.stored import ITEM_SIZES
from ..checkpoint.quantization import quant_type
from ..common.errors import CheckpointError
from ..manifest import LeftOut

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32")
_BLOCK_SIZES = (64, 32, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Quantized(TensorSource):
    """The packed weight, or a part of it, that quantizing a weight results in. Its pieces are those of the weight.

    Attributes:
        weight: the unquantized one.
        group: what the manifest records: the packed weight first, then its parts.
    """

    weight: TensorSource
    group: tuple[LeftOut, ...]


def plan_quantized(group: tuple[LeftOut, ...], weight: TensorSource) -> dict[LeftOut, Quantized]:
    """The results of quantizing a weight; empty if its dtype or size does not fit.

    Args:
        group: a parameter and its parts, from the manifest.
        weight: the base's tensor of the parameter's name.
    """
    packed, kind = group[0], quant_type(group)
    fits = weight.shape == packed.shape if kind == "int8" else -(-weight.numel // 2) == _size(packed)
    if weight.dtype not in dtypes.FLOATING or kind is None or not fits:
        return {}
    return {entry: Quantized(entry.dtype, entry.shape, weight.pieces, weight=weight, group=group) for entry in group}


def _size(entry: LeftOut) -> int:
    return prod(entry.shape) * ITEM_SIZES.get(entry.dtype, 0)


def check_bitsandbytes() -> None:
    """Raise CheckpointError if bitsandbytes is not installed."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise CheckpointError(
            "The base is not quantized, but the run quantized it with bitsandbytes. To compare them, install it: pip"
            " install bitsandbytes. Or pass the directory of the quantized model."
        ) from None


class Quantizer:
    """Quantizes weights as a run did. It caches the last result and the settings that matched."""

    def __init__(self) -> None:
        self._way: Any = None
        self._name = ""
        self._values: dict[str, bytearray] = {}

    def read(self, records: Records, tensor: Quantized, entry: LeftOut) -> bytearray:
        """The content of a packed parameter or of a part of it."""
        if self._name != tensor.group[0].name:
            self._values = self._quantize(records.read(tensor.weight), tensor)
            self._name = tensor.group[0].name
        return self._values[entry.name]

    def _quantize(self, content: bytearray, tensor: Quantized) -> dict[str, bytearray]:
        """The values from the settings that match most fingerprints; for the right base they match all."""
        best: dict[str, bytearray] = {}
        most = -1
        for way in sorted(_ways(tensor), key=lambda way: way != self._way):  # first those that matched before
            values = _quantize(content, tensor, *way)
            right = sum(
                len(values[entry.name]) == _size(entry) and dtypes.matches_fingerprint(entry, values[entry.name])
                for entry in tensor.group
            )
            if right > most:
                best, most = values, right
            if right == len(tensor.group):
                self._way = way
                break
        return best


def _ways(tensor: Quantized) -> Iterable[tuple[str, str, int]]:
    """The devices, dtypes and block sizes to try; for 8 bits the block size is 0.

    Only some block sizes result in the recorded number of scales; for a small weight, several do.
    """
    import torch

    sizes = [0]
    if quant_type(tensor.group) != "int8":
        (scales,) = [prod(entry.shape) for entry in tensor.group if entry.name.endswith(".absmax")] or [0]
        sizes = [size for size in _BLOCK_SIZES if -(-tensor.weight.numel // size) == scales] or [64]
    return product(["cpu", *(["cuda"] if torch.cuda.is_available() else [])], _DTYPES, sizes)


def _quantize(content: bytearray, tensor: Quantized, device: str, dtype: str, block_size: int) -> dict[str, bytearray]:
    """The values of a group by name; empty for what this release of bitsandbytes does not return."""
    import torch

    converted = dtypes.convert(content, tensor.weight.dtype, dtype) or bytearray(1)
    values = torch.frombuffer(converted, dtype=getattr(torch, dtype)).view(tensor.weight.shape).to(device)
    try:
        parts = _to_4_bits(values, tensor.group, block_size) if block_size else _to_8_bits(values, tensor.group[0].name)
    except Exception as error:  # whatever its kernels say
        raise CheckpointError(
            f"bitsandbytes cannot quantize the base here ({type(error).__name__}: {error}). Pass the directory of the"
            " quantized model."
        ) from None
    flat = {name: value.detach().cpu().contiguous().flatten().view(torch.uint8) for name, value in parts.items()}
    return {entry.name: bytearray(flat[entry.name].numpy() if entry.name in flat else b"") for entry in tensor.group}


def _to_4_bits(values: torch.Tensor, group: Sequence[LeftOut], block_size: int) -> dict[str, torch.Tensor]:
    import torch
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        values,
        blocksize=block_size,
        compress_statistics=any(entry.name.endswith(".nested_absmax") for entry in group),
        quant_type=quant_type(group),
        quant_storage=getattr(torch, group[0].dtype),
    )
    name = group[0].name
    return {name: packed, **{f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}}


def _to_8_bits(values: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    packed, scales, _ = int8_vectorwise_quant(values.half())
    layer = name.removesuffix("weight")
    return {name: packed, f"{layer}SCB": scales, f"{layer}weight_format": torch.zeros((), dtype=torch.uint8)}

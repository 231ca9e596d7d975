"""Quantize an unquantized base with bitsandbytes as a run did, to compare it with the manifest's fingerprints.

The settings follow from the manifest: the quant type from a part's name, the block size from the sizes of the packed
weight and of its absmax, double quantization from the nested parts, and the storage from the packed dtype. The dtype
that the program loaded the weights in is not recorded; the usual ones are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ...common.errors import CheckpointError
from ...manifest import LeftOut
from .. import dtypes
from ..format.records import Records, TensorSource
from ..format.stored import ITEM_SIZES
from ..quantization import quant_type

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


def plan_quantized(group: Sequence[LeftOut], weight: TensorSource) -> dict[LeftOut, Quantized] | None:
    """The results of quantizing a weight; None if its dtype or size does not fit.

    Args:
        group: a parameter and its parts, from the manifest.
        weight: the base's tensor of the parameter's name.
    """
    packed, kind = group[0], quant_type(group)
    if weight.dtype not in dtypes.FLOATING or kind is None:
        return None
    bytes_ = prod(packed.shape) * ITEM_SIZES.get(packed.dtype, 0)
    fits = weight.shape == packed.shape if kind == "int8" else -(-weight.numel // 2) == bytes_
    if not fits:
        return None
    return {one: Quantized(one.dtype, one.shape, weight.pieces, weight=weight, group=tuple(group)) for one in group}


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
        self._last: tuple[Any, dict[str, bytearray]] = None, {}

    def read(self, records: Records, tensor: Quantized, parameter: LeftOut) -> bytearray:
        """The content of a packed parameter or of a part of it."""
        key = tensor.group[0].name
        if self._last[0] != key:
            self._last = key, self._values(records, tensor)
        return self._last[1][parameter.name]

    def _values(self, records: Records, tensor: Quantized) -> dict[str, bytearray]:
        """The values from the settings that match most fingerprints; for the right base they match all."""
        content = records.read(tensor.weight)
        best: tuple[int, dict[str, bytearray]] = -1, {}
        for way in self._ways(tensor):
            values = _quantize(content, tensor, *way)
            right = sum(_is_right(one, values[one.name]) for one in tensor.group)
            if right > best[0]:
                best = right, values
            if right == len(tensor.group):
                self._way = way
                break
        return best[1]

    def _ways(self, tensor: Quantized) -> Iterator[tuple[str, str, int]]:
        """The devices, dtypes and block sizes to try; first those that matched before."""
        import torch

        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        ways = [(device, dtype, size) for device in devices for dtype in _DTYPES for size in _block_sizes(tensor)]
        yield from sorted(ways, key=lambda way: way != self._way)


def _block_sizes(tensor: Quantized) -> list[int]:
    """The block sizes that result in the recorded number of scales; for a small weight, several do."""
    if quant_type(tensor.group) == "int8":
        return [0]
    (scales,) = [prod(one.shape) for one in tensor.group if one.name.endswith(".absmax")] or [0]
    return [size for size in _BLOCK_SIZES if -(-tensor.weight.numel // size) == scales] or [64]


def _is_right(one: LeftOut, values: bytearray) -> bool:
    return len(values) == prod(one.shape) * ITEM_SIZES.get(one.dtype, 0) and dtypes.matches_fingerprint(one, values)


def _quantize(content: bytearray, tensor: Quantized, device: str, dtype: str, block_size: int) -> dict[str, bytearray]:
    """The values of a group by name; empty for what this release of bitsandbytes does not return."""
    import torch

    values = torch.frombuffer(
        dtypes.convert(content, tensor.weight.dtype, dtype) or bytearray(1), dtype=getattr(torch, dtype)
    )
    values = values.view(tensor.weight.shape).to(device)
    try:
        found = _quantize_8_bits(values) if not block_size else _quantize_4_bits(values, tensor.group, block_size)
    except Exception as error:  # whatever its kernels say
        raise CheckpointError(
            f"bitsandbytes cannot quantize the base here ({type(error).__name__}: {error}). Pass the directory of the"
            " quantized model."
        ) from None
    packed = tensor.group[0].name
    layer = packed.removesuffix("weight")
    made = {f"{layer if not block_size else packed}{name}": _to_bytes(value) for name, value in found.items()}
    return {one.name: made.get(one.name, bytearray()) for one in tensor.group}


def _quantize_4_bits(values: torch.Tensor, group: Sequence[LeftOut], block_size: int) -> Mapping[str, torch.Tensor]:
    import torch
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        values,
        blocksize=block_size,
        compress_statistics=any(one.name.endswith(".nested_absmax") for one in group),
        quant_type=quant_type(group),
        quant_storage=getattr(torch, group[0].dtype),
    )
    return {"": packed, **{f".{name}": value for name, value in state.as_dict(packed=True).items()}}


def _quantize_8_bits(values: torch.Tensor) -> Mapping[str, torch.Tensor]:
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    packed, scales, _ = int8_vectorwise_quant(values.half())
    return {"weight": packed, "SCB": scales, "weight_format": torch.zeros((), dtype=torch.uint8)}


def _to_bytes(tensor: torch.Tensor) -> bytearray:
    import torch

    return bytearray(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

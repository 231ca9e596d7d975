"""Tensors on their way from one file into another: read, checked, and in another dtype if one is asked for."""

from __future__ import annotations

from math import prod

from ..fingerprint import of_stream
from ..manifest import LeftOut
from .records import Whole

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes of outputs, by their names on the command line."""
FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))


def dtype_in(tensor: Whole, dtype: str) -> str:
    """What a tensor becomes in a file of this dtype: integers stay what they are."""
    return dtype if tensor.dtype in FLOATING else tensor.dtype


def converted(values: bytearray, from_: str, to: str) -> bytearray:
    """Elements of one dtype in another, rounded to the nearest as torch does it."""
    if from_ == to or not values:
        return values
    import torch

    elements = torch.frombuffer(values, dtype=getattr(torch, from_))
    made = bytearray(len(elements) * getattr(torch, to).itemsize)
    torch.frombuffer(made, dtype=getattr(torch, to)).copy_(elements)
    return made


def is_base(parameter: LeftOut, values: bytearray) -> bool:
    """Whether these values, in the dtype of the save, are those of then, by the fingerprint; so it is without one."""
    if parameter.fingerprint is None:
        return True
    return of_stream(parameter.dtype, prod(parameter.shape), [values] if values else []) == parameter.fingerprint


def is_close(master: bytearray, dtype: str, half: bytearray, half_dtype: str) -> bool:
    """Whether a master is that of a weight the model computed with: all but rounding, in all but a few elements."""
    import torch

    wide = torch.frombuffer(master, dtype=getattr(torch, dtype)).float()
    narrow = torch.frombuffer(half, dtype=getattr(torch, half_dtype)).float()
    apart = (wide - narrow).abs() > 0.01 * wide.abs() + 1e-6
    return int(apart.sum()) <= len(wide) // 2

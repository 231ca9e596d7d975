"""Tensors on their way from one file into another: read, checked, and in another dtype if one is asked for."""

from __future__ import annotations

from math import prod

from ..fingerprint import of_stream
from ..manifest import LeftOut

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes of outputs, by their names on the command line."""
FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))


def dtype_in(saved: str, dtype: str | None) -> str:
    """What a tensor of one dtype becomes in a file of another, or as it is without one: integers stay what they are."""
    return dtype if dtype and saved in FLOATING else saved


def named_dtype(name: str | None) -> str | None:
    """torch's name of a dtype of `DTYPES`.

    Raises:
        ValueError: it is none of them.
    """
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, or None, not {name!r}")
    return DTYPES[name] if name else None


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

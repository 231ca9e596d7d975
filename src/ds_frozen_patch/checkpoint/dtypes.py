"""Convert the content of tensors between dtypes, and verify it with fingerprints."""

from __future__ import annotations

from ..fingerprint import of_stream
from ..record import LeftOut
from .format.records import new_memory

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of the dtypes of outputs, by their names on the command line."""
FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))


def output_dtype(saved: str, dtype: str | None) -> str:
    """The dtype of a tensor in an output: `dtype`, if there is one and the tensor is floating-point."""
    return dtype if dtype and saved in FLOATING else saved


def torch_dtype(name: str | None) -> str | None:
    """torch's name of a dtype.

    Raises:
        ValueError: it is not in `DTYPES`.
    """
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, or None, not {name!r}")
    return DTYPES[name] if name else None


def convert(values: memoryview, from_: str, to: str) -> memoryview:
    """Convert elements to another dtype, with torch's rounding; to their own, they are returned as they are."""
    if from_ == to or not values:
        return values
    import torch

    elements = torch.frombuffer(values, dtype=getattr(torch, from_))
    converted = new_memory(len(elements) * getattr(torch, to).itemsize)
    torch.frombuffer(converted, dtype=getattr(torch, to)).copy_(elements)
    return converted


def matches_fingerprint(parameter: LeftOut, values: memoryview) -> bool:
    """Whether values, in the dtype of the save, match a parameter's fingerprint; true if it has none."""
    return parameter.fingerprint is None or of_stream(len(values), [values]) == parameter.fingerprint

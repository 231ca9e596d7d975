"""Files of safetensors, read and written tensor by tensor: the library writes only what is in memory all at once.

The format: eight bytes with the length of the header, the header in JSON (dtype, shape and place of each tensor), and
the bytes of all tensors (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError
from .stored import ITEM_SIZES, is_shape
from .zip_directory import open_regular

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""The format's names of torch's dtypes."""
MAX_HEADER = 100_000_000
"""Bytes of JSON, which the library of safetensors takes at most too."""


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a file begin, and what its header says; checked to be whole and consistent.

    Raises:
        CheckpointError: it is no such file, cut or damaged.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError("its header is too long")
            said = json.loads(file.read(length), object_pairs_hook=_once)
        begin, size = 8 + length, path.stat().st_size
        about = said.get("__metadata__", {})
        if not all(isinstance(value, str) for value in about.values()):
            raise ValueError("its metadata are no text")
        named = {name: entry for name, entry in said.items() if name != "__metadata__"}
        last = 0
        for name, entry in sorted(named.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            width = ITEM_SIZES[_dtype(entry["dtype"])]
            if not is_shape((start, end)) or not is_shape(tuple(entry["shape"])):
                raise ValueError(f"{name} has no sizes")
            if not last <= start <= end <= size - begin or end - start != prod(entry["shape"]) * width:
                raise ValueError(f"{name} is not within it, or of another size")
            last = end
        return begin, said
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read, is cut, damaged, or no file of safetensors ({error}). Take a whole copy of it."
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    said = dict(pairs)
    if len(said) < len(pairs):
        raise ValueError("its header says something twice")
    return said


def places(path: Path) -> dict[str, range]:
    """Where in a file each tensor's bytes lie."""
    begin, said = header(path)
    return {
        name: range(begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
        for name, entry in said.items()
        if name != "__metadata__"
    }


def described(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, in torch's words, and the shape of each tensor of a file."""
    _, said = header(path)
    tensors = {name: entry for name, entry in said.items() if name != "__metadata__"}
    return {name: (_dtype(entry["dtype"]), tuple(entry["shape"])) for name, entry in tensors.items()}


def metadata(path: Path) -> dict[str, str]:
    """What a file says besides its tensors."""
    return dict(header(path)[1].get("__metadata__", {}))


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    contents: Iterable[bytes | bytearray | memoryview],
    about: Mapping[str, str],
) -> None:
    """Write a file tensor by tensor.

    Args:
        path: the file to create.
        tensors: the dtype (torch's name) and shape of each tensor.
        contents: the bytes of each tensor, in the same order; only one of them is in memory at a time.
        about: the metadata, besides the format.
    """
    header_: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * ITEM_SIZES[dtype]
        header_[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header_, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in contents:
            file.write(content)


def _dtype(name: str) -> str:
    for dtype, said in DTYPES.items():
        if said == name:
            return dtype
    raise ValueError(f"dtype {name} is unknown")

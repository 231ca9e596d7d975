"""Read and write safetensors files tensor by tensor; the library can write only tensors that are all in memory.

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
from ...common.files import open_regular
from .stored import ITEM_SIZES, is_shape, is_size

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""The names of torch's dtypes in the format."""
MAX_HEADER = 100_000_000
"""The maximum size of a header in bytes, as in the library."""


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Read and validate a header; returns the offset of the tensors in the file, and the header.

    Raises:
        CheckpointError: it is not a safetensors file, truncated or damaged.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        begin, size = 8 + length, path.stat().st_size
        about = header.get("__metadata__", {})
        if not all(isinstance(value, str) for value in about.values()):
            raise ValueError("its metadata are not strings")
        named = {name: entry for name, entry in header.items() if name != "__metadata__"}
        last = 0
        for name, entry in sorted(named.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            width = ITEM_SIZES[_torch_dtype(entry["dtype"])]
            if not (is_size(start) and is_size(end)) or not is_shape(tuple(entry["shape"])):
                raise ValueError(f"{name} has invalid sizes")
            if not last <= start <= end <= size - begin or end - start != prod(entry["shape"]) * width:
                raise ValueError(f"{name} is outside the file, or has the wrong size")
            last = end
        return begin, header
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read, is truncated, damaged, or not a safetensors file ({error}). Get a complete copy of"
            " it."
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    header = dict(pairs)
    if len(header) < len(pairs):
        raise ValueError("its header has duplicate keys")
    return header


def read_ranges(path: Path) -> dict[str, range]:
    """The range of bytes of each tensor in a file."""
    begin, header = read_header(path)
    return {
        name: range(begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_types(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype (torch's name) and the shape of each tensor in a file."""
    _, header = read_header(path)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: (_torch_dtype(entry["dtype"]), tuple(entry["shape"])) for name, entry in tensors.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file."""
    return dict(read_header(path)[1].get("__metadata__", {}))


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

    Raises:
        CheckpointError: the format has no such name, or no such dtype; nothing was written.
    """
    if odd := next((name for name in tensors if name == "__metadata__" or not _is_unicode(name)), None):
        raise CheckpointError(
            f"A safetensors file cannot have a tensor called {odd!r:.100}. Write a .ckpt, or rename it in the module."
        )
    if odd := next((name for name, (dtype, _) in tensors.items() if dtype not in DTYPES), None):
        raise CheckpointError(f"A safetensors file cannot have {odd!r:.100} in {tensors[odd][0]}. Write a .ckpt.")
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for content in contents:
            file.write(content)


def _is_unicode(name: str) -> bool:
    """Whether a name has no lone surrogates, which JSON can represent, and the library cannot read."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _torch_dtype(name: str) -> str:
    for dtype, code in DTYPES.items():
        if code == name:
            return dtype
    raise ValueError(f"dtype {name} is unknown")

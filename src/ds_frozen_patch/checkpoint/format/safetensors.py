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
from ...common.files import SYNCED_BYTES, begin_sync, open_regular
from .stored import ITEM_SIZES, StoredTensor, is_shape, is_size, whole_tensor

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""The names of torch's dtypes in the format."""
_TORCHS = {name: dtype for dtype, name in DTYPES.items()}
MAX_HEADER = 100_000_000
"""The maximum size of a header in bytes, as in the library."""


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: it is not a safetensors file, truncated or damaged.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        about = dict(header.pop("__metadata__", {}))
        if not all(isinstance(value, str) for value in about.values()):
            raise ValueError("its metadata are not strings")
        tensors, ends = dict[str, StoredTensor](), dict[str, int]()
        for name, entry in header.items():
            (start, end), shape = entry["data_offsets"], tuple(entry["shape"])
            if not (is_size(start) and is_size(end)) or not is_shape(shape):
                raise ValueError(f"{name} has invalid sizes")
            tensors[name] = whole_tensor(name, _TORCHS[entry["dtype"]], shape, path, 8 + length + start)
            ends[name] = 8 + length + end
        size, last = path.stat().st_size, 8 + length
        for name in sorted(tensors, key=lambda name: (tensors[name].storage.begin, ends[name])):
            storage, begin, last = tensors[name].storage, last, ends[name]
            if not begin <= storage.begin <= last <= size or last - storage.begin != storage.nbytes:
                raise ValueError(f"{name} is outside the file, or has the wrong size")
        return tensors, about
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
        contents: the bytes of each tensor, in the same order.
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
        begun = 0
        for content in contents:
            view = memoryview(content)
            for at in range(0, len(view), SYNCED_BYTES):  # to begin the sync of a large range at once blocks
                file.write(view[at : at + SYNCED_BYTES])
                begun = begin_sync(file, begun)
            del content, view  # frees the memory before the next tensor is waited for


def _is_unicode(name: str) -> bool:
    """Whether a name has no lone surrogates, which JSON can represent, and the library cannot read."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

"""A file of `torch.save` seen from outside: what its pickle says, without torch, and without running any of it.

Such a file is a zip archive: `data.pkl`, and a record of raw bytes for each storage. Here the pickle becomes plain
values, `StoredTensor`s that say where their bytes are, and stand-ins for everything else. Nothing that a pickle names
is imported or called, so that no file can run code; and no tensor's bytes are read.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from .._errors import CheckpointError

ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of a dtype."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
"""The dtype of each of torch's storages."""
# What belongs in a checkpoint, by full name: DeepSpeed's and Lightning's classes, and what plain data is made of.
_EXPECTED = (
    *(f"{package}.*.[A-Z]*" for package in ("deepspeed", "lightning", "pytorch_lightning", "lightning_fabric")),
    *(f"{package}.*.[A-Z]*" for package in ("peft", "transformers", "omegaconf")),
    "deepspeed.utils.tensor_fragment.fragment_address",
    *(f"torch.{dtype}" for dtype in ITEM_SIZES),
    "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_*", "torch.nn.parameter.*",
    "torch.Tensor", "torch.[A-Z]*Storage",
    "numpy.*multiarray.scalar", "numpy.*multiarray._reconstruct", "numpy.dtype", "numpy.ndarray", "numpy.dtypes.*",
    *(f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "int", "list", "object", "range", "str")),
    *(f"builtins.{name}" for name in ("tuple", "type")),
    "collections.*", "pathlib.*Path", "argparse.Namespace", "types.SimpleNamespace", "datetime.*", "decimal.Decimal",
    "fractions.Fraction", "uuid.UUID", "copyreg._reconstructor", "typing.Any",
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """The raw bytes of one or more tensors: the record `key` of a file, of `numel` elements of `dtype`."""

    file: Path
    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """The size of the record, in bytes."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: a view of a storage. `offset` and `stride` are in elements of `dtype`.

    The rest is what a pickle says of it besides, to be said again in another: `maker`, the function of torch that makes
    it, `more`, that function's further arguments, and `wrapper`, what makes a parameter or a subclass of it.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    maker: str = field(default="torch._utils._rebuild_tensor_v2", compare=False)
    more: tuple[Any, ...] = field(default=(False, OrderedDict()), compare=False)
    wrapper: tuple[str, tuple[Any, ...]] | None = field(default=None, compare=False)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """How many elements of the storage there are from its first to its last."""
        return (
            1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) if self.numel else 0
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow on each other in the storage, in its order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True


class Size(tuple[int, ...]):
    """A `torch.Size`."""


class StandIn:
    """In the place of an object of a class, or of what a function gives: never that object, and nothing is run.

    `stands_for` is the full name of the class or function, `arguments` are those that the pickle has for it, and
    `is_called` says that it calls the class, instead of making an object of it.
    """

    stands_for = ""
    arguments: tuple[Any, ...] = ()
    is_called = False
    state: Any = None

    def __new__(cls, *arguments: Any, **_: Any) -> StandIn:
        """What the pickle calls instead of the class or function."""
        made = super().__new__(cls)
        made.arguments, made.items, made.pairs = arguments, [], []
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.items: list[Any]
        self.pairs: list[tuple[Any, Any]]
        self.is_called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        """For a list's items."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """For a list's items."""
        self.items.extend(items)

    def __repr__(self) -> str:
        return f"<{self.stands_for}>"


@cache
def stand_in(name: str) -> type[StandIn]:
    """The class of the stand-ins for what has this full name."""
    return type(name.rpartition(".")[2], (StandIn,), {"stands_for": name})


@dataclass(frozen=True)
class Contents:
    """What a file's pickle holds, and how many bytes it has."""

    state: Any
    pickle_bytes: int


UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OSError, RuntimeError, OverflowError)
"""What `zipfile` raises for a file that is damaged, or none of its kind."""


def read(path: Path, *, trust: bool = False) -> Contents:
    """Read what one file of `torch.save` holds, and no tensor's bytes.

    Args:
        path: the file.
        trust: take stand-ins for classes of any module. Without it, one that is not expected in a checkpoint is an
            error that names it: whoever loads the file by torch's own means would run its code.

    Raises:
        CheckpointError: the file is not there, cut, damaged, of another kind, or names an unexpected class.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in members(archive)}
            (pickled,) = [name for name in sizes if name.count("/") == 1 and name.endswith("/data.pkl")]
            content = archive.read(pickled)
            folder = pickled.removesuffix("data.pkl")
            if f"{folder}byteorder" in sizes and archive.read(f"{folder}byteorder") != b"little":
                raise ValueError("its numbers are big-endian")
            sizes = {name.removeprefix(f"{folder}data/"): size for name, size in sizes.items()}
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} cannot be read, is cut, damaged, or no file of torch.save ({error}). Take a whole copy of it."
        ) from None
    try:
        state = _Unpickler(path, content, trust).load()
        for _, tensor in tensors(state):
            _check(tensor, sizes)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"The pickle in {path} is damaged ({type(error).__name__}: {error}). Take a whole copy of the file."
        ) from None
    return Contents(state, len(content))


def members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """What a file says of its records; without checksums where torch was told to write none (`set_crc32_options`)."""
    found = archive.infolist()
    if not any(info.CRC for info in found):
        for info in found:
            info.CRC = None  # type: ignore[assignment]
    return found


def _check(tensor: StoredTensor, sizes: dict[str, int]) -> None:
    storage, width = tensor.storage, ITEM_SIZES[tensor.dtype]
    if sizes.get(storage.key) != storage.nbytes:
        raise ValueError(f"record {storage.key} has {sizes.get(storage.key)} bytes, not {storage.nbytes}")
    if min(tensor.shape, default=0) < 0 or min(tensor.stride, default=0) < 0 or tensor.offset < 0:
        raise ValueError("a tensor has a negative size")
    if (tensor.offset + tensor.extent) * width > storage.nbytes:
        raise ValueError(f"a tensor goes beyond record {storage.key}")


def tensors(value: Any) -> Iterator[tuple[tuple[Any, ...], StoredTensor]]:
    """All tensors in a state, each with the keys that lead to it."""
    # What is in two places is looked at once, because it can hold itself.
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen: set[int] = set()
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, StoredTensor):
            yield path, item
        elif isinstance(item, dict | list | tuple | set | frozenset | StandIn) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, StandIn):
                item = {"arguments": item.arguments, "state": item.state, "items": item.items, "pairs": item.pairs}
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            waiting.extend(((*path, key), inner) for key, inner in pairs)


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, content: bytes, trust: bool) -> None:
        super().__init__(io.BytesIO(content))
        self.path, self.trust = path, trust

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # Python 2's names, which pickles of torch.save still have
            module, name = "builtins", {"xrange": "range", "long": "int", "unicode": "str"}.get(name, name)
        full = f"{module}.{name}"
        if full in _MAKERS:
            return partial(_MAKERS[full], full)
        if full in _PLAIN:
            return _PLAIN[full]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if not self.trust and not any(fnmatchcase(full, pattern) for pattern in _EXPECTED):
            raise CheckpointError(
                f"{self.path} names {full}, which is not expected in a checkpoint: torch.load could run it. Nothing was"
                " run. If you know where the file is from, go on with --trust (here it is not run then either)."
            )
        return stand_in(full)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise ValueError(f"unknown record {kind}")
        return Storage(self.path, str(key), dtype, int(numel))


def _tensor(maker: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    # The third version of the function says the dtype after two arguments that the second has too.
    dtype = more[2].stands_for.removeprefix("torch.") if maker.endswith("v3") else storage.dtype
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride), maker, more)


def _parameter(maker: str, tensor: StoredTensor, *more: Any) -> StoredTensor:
    return replace(tensor, wrapper=(maker, more))


def _of_type(maker: str, function: Any, cls: Any, arguments: Any, state: Any) -> StoredTensor:
    """A tensor with attributes of its own, as ZeRO-3's partitions are."""
    made: StoredTensor = function(*arguments)
    return replace(made, wrapper=(maker, (cls, state)))


def _bytes(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


# What makes a tensor, and what becomes another plain value, by full name: each is a function above, or a class without
# code of its own.
_MAKERS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_PLAIN: dict[str, Any] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytearray": bytearray,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _bytes,
    "torch.Size": Size,
}

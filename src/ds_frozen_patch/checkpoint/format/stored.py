"""The contents of a file of `torch.save`, without torch: references to stored tensors, and stand-ins."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of a dtype; torch itself is not imported to read a file."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
"""The dtype of each of torch's storages."""


class Fixed(type):
    """A class that a pickle cannot change: its opcode BUILD sets attributes of whatever an unpickler has returned."""

    stands_for: str

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes {cls.__name__}")


class Unchangeable:
    """An object that a pickle cannot change."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"it changes a {type(self).__name__}")


@dataclass(frozen=True)
class Storage(Unchangeable):
    """The raw bytes of one or more tensors: the record `key` of a file, of `numel` elements of `dtype`.

    `file` is None for a storage that is about to be written and is in no file yet; otherwise the record is at `begin`
    in it, and `checksum` is its CRC-32, or None if it has none.
    """

    file: Path | None
    key: str
    dtype: str
    numel: int
    begin: int = 0
    checksum: int | None = None

    @property
    def path(self) -> Path:
        """The file; raises ValueError if there is none yet."""
        if self.file is None:
            raise ValueError(f"storage {self.key!r} is in no file yet")
        return self.file

    @property
    def nbytes(self) -> int:
        """The size of the record, in bytes."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, repr=False)
class StoredTensor(Unchangeable):
    """A tensor of the file: a view of a storage. `offset` and `stride` are in elements of `dtype`.

    The other fields are needed to pickle it again: `maker` is the function of torch that creates it, `more` are that
    function's other arguments, and `wrapper` is what turns it into a parameter or a subclass.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    maker: str = field(default="torch._utils._rebuild_tensor_v2", compare=False)
    more: tuple[Any, ...] = field(default=(False, OrderedDict()), compare=False)
    wrapper: tuple[str, tuple[Any, ...]] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        # A short one: the other arguments can hold other tensors, more than once.
        return f"<{self.dtype} tensor of shape {list(self.shape)}>"

    def __hash__(self) -> int:
        # The author of a file can choose shapes whose hashes collide, but not strings.
        return hash((self.storage, repr((self.offset, self.shape, self.stride))))

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """The number of elements of the storage from its first to its last element."""
        return (
            1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) if self.numel else 0
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are consecutive in the storage."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True


def whole_tensor(
    key: str, dtype: str, shape: tuple[int, ...], file: Path | None = None, begin: int = 0
) -> StoredTensor:
    """A contiguous tensor in a storage of its own; without a file, it is about to be written."""
    strides = tuple(accumulate(reversed([max(size, 1) for size in shape[1:]]), mul, initial=1))[::-1] if shape else ()
    if dtype in STORAGES.values():
        return StoredTensor(Storage(file, key, dtype, prod(shape), begin), dtype, 0, shape, strides)
    storage = Storage(file, key, "uint8", prod(shape) * ITEM_SIZES[dtype], begin)
    more: tuple[Any, ...] = (False, OrderedDict(), stand_in(f"torch.{dtype}"))
    return StoredTensor(storage, dtype, 0, shape, strides, "torch._utils._rebuild_tensor_v3", more)


class Size(tuple[int, ...]):
    """A `torch.Size`."""

    __slots__ = ()


class StandIn(metaclass=Fixed):
    """A placeholder for an object of a class, or for the result of a function; no code of these is run.

    `stands_for` is the full name of the class or function, and `arguments` are those in the pickle. `is_called` tells
    whether the pickle calls the class (`cls(...)`) or only creates an object (`cls.__new__`). `function` is the
    stand-in that the pickle calls, if it is itself the result of a call.
    """

    __slots__ = ("arguments", "function", "is_called", "items", "named", "pairs", "state")
    stands_for = ""
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    function: StandIn | None
    is_called: bool
    items: list[Any] | tuple[()]
    pairs: list[tuple[Any, Any]] | tuple[()]
    state: Any

    def __new__(cls, *arguments: Any, **named: Any) -> StandIn:
        """Called instead of the class or function."""
        item = super().__new__(cls)
        item.arguments, item.named, item.function, item.is_called = arguments, named, None, False
        item.items, item.pairs, item.state = (), (), None
        return item

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_called = True

    def __call__(self, *arguments: Any) -> StandIn:
        """Called instead of an object that can be called, such as a `functools.partial`."""
        result = StandIn(*arguments)
        result.function = self
        return result

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs = self.pairs or []
        self.pairs.append((key, value))

    def append(self, item: Any) -> None:
        """For a list's items."""
        self.extend([item])

    def extend(self, items: Any) -> None:
        """For a list's items."""
        self.items = self.items or []
        self.items.extend(items)

    def __repr__(self) -> str:
        return f"<{self.stands_for}>"


@cache
def stand_in(name: str) -> type[StandIn]:
    """The class of stand-ins for this full name."""
    kind: Any = Fixed(name.rpartition(".")[2], (StandIn,), {"__slots__": (), "stands_for": name})
    return kind  # type: ignore[no-any-return]


def is_shape(value: Any) -> bool:
    """Whether a value is a tuple of possible sizes, strides or offsets, of no more dimensions than torch allows."""
    return isinstance(value, tuple) and len(value) <= 64 and all(map(is_size, value))


def is_size(value: Any) -> bool:
    """Whether a value is a possible number of elements."""
    return type(value) is int and 0 <= value < 1 << 60


def iter_tensors(value: Any) -> Iterator[tuple[tuple[Any, ...], StoredTensor]]:
    """Iterate over all tensors in a state, each with the keys that lead to it."""
    return ((path, item) for path, item in walk(value) if isinstance(item, StoredTensor))


MAX_DEPTH = 1000
"""How deeply values may be nested; torch.save itself writes hardly more."""


def walk(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Iterate over all values in a state, each with the keys that lead to it; raises ValueError if it is too deep."""
    yield (), value
    # A container is entered once, because it can contain itself.
    seen = {id(value)}
    waiting: list[tuple[tuple[Any, ...], Iterator[tuple[Any, Any]]]] = [((), _entries(value))]
    while waiting:
        path, entries = waiting[-1]
        for key, item in entries:
            yield (*path, key), item
            if isinstance(item, _HOLDERS) and id(item) not in seen:
                seen.add(id(item))
                waiting.append(((*path, key), _entries(item)))
                if len(waiting) > MAX_DEPTH:
                    raise ValueError("its values are nested too deeply")
                break
        else:
            waiting.pop()


_CONTAINERS = (dict, list, tuple, set, frozenset)
_HOLDERS = (*_CONTAINERS, StandIn)


def _entries(item: Any) -> Iterator[tuple[Any, Any]]:
    """The values directly inside a container or stand-in, with their keys or numbers."""
    if isinstance(item, StandIn):
        return enumerate(chain(item.arguments, item.items, item.pairs, (item.named, item.state, item.function)))
    if isinstance(item, dict):
        return iter(item.items())
    return enumerate(item) if isinstance(item, _CONTAINERS) else iter(())

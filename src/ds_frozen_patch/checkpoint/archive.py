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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

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
DEPTH = 100
"""How many things may be in each other, in all of what a file holds."""
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
        content, sizes = _content(path)
    except Exception as error:  # whatever a damaged archive leads to
        raise CheckpointError(
            f"{path} cannot be read, is cut, damaged, or no file of torch.save ({error}). Take a whole copy of it."
        ) from None
    try:
        state = _Unpickler(path, content, trust).load()
        check_references(state, 20 * len(content) + 10_000_000)
        found = {tensor for _, tensor in tensors(state)}
        for tensor in found:
            _check(tensor, sizes)
        if sum(tensor.numel * ITEM_SIZES[tensor.dtype] for tensor in found) > 10 * sum(sizes.values()) + (1 << 26):
            raise ValueError("its tensors say that they have far more elements than there are")
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


def _content(path: Path) -> tuple[bytes, dict[str, int]]:
    """The pickle of a file, and the size of each record of a storage; nothing larger than the file is ever made."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        if file.read(4) != b"PK\3\4":  # torch goes by how a file begins, and so would read another one than this
            raise ValueError("there is something else before its archive")
        infos, size = members(archive), path.stat().st_size
        names = [info.filename for info in infos]
        (pickled,) = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        folder = pickled.removesuffix("data.pkl")
        if len(set(names)) < len(names) or not all(name.startswith(folder) for name in names):
            raise ValueError("it has records of one name, or of more than one file")
        if any(info.compress_type or info.flag_bits & 1 or info.header_offset < 0 for info in infos):
            raise ValueError("its records are compressed or encrypted, which torch does not do")
        if sum(info.file_size for info in infos) > size or any(i.header_offset + i.file_size > size for i in infos):
            raise ValueError("its records say that they are larger than the file")
        content = archive.read(pickled)
        if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        return content, {info.filename.removeprefix(f"{folder}data/"): info.file_size for info in infos}


def _check(tensor: StoredTensor, sizes: dict[str, int]) -> None:
    storage, width = tensor.storage, ITEM_SIZES[tensor.dtype]
    if sizes.get(storage.key) != storage.nbytes:
        raise ValueError(f"record {storage.key} has {sizes.get(storage.key)} bytes, not {storage.nbytes}")
    if (tensor.offset + tensor.extent) * width > storage.nbytes:
        raise ValueError(f"a tensor goes beyond record {storage.key}")


def tensors(value: Any) -> Iterator[tuple[tuple[Any, ...], StoredTensor]]:
    """All tensors in a state, each with the keys that lead to it."""
    return ((path, item) for path, item in everything(value) if isinstance(item, StoredTensor))


def everything(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that is in a state, each with the keys that lead to it."""
    # What is in two places is looked into once, because it can hold itself.
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen: set[int] = set()
    while waiting:
        path, item = waiting.pop()
        yield path, item
        if isinstance(item, dict | list | tuple | set | frozenset | StandIn) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, StandIn):
                item = {"arguments": item.arguments, "state": item.state, "items": item.items, "pairs": item.pairs}
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            waiting.extend(((*path, key), inner) for key, inner in pairs)


def check_references(state: Any, room: int) -> None:
    """Raise ValueError for a state that cannot be gone through in so many steps, or is too deep to be.

    What is referred to again and again is in a pickle once, so that a small one can hold what to say takes for ever.
    What holds itself counts once.
    """
    sizes: dict[int, tuple[int, int]] = {}
    done: set[int] = set()
    waiting = [state]
    while waiting:
        item = waiting[-1]
        inner = _inside(item)
        holders = [value for value in inner if isinstance(value, _HOLDERS)]
        if id(item) not in sizes:
            sizes[id(item)] = 1, 1
            waiting.extend(value for value in holders if id(value) not in sizes)
            continue
        waiting.pop()
        if id(item) not in done:
            done.add(id(item))
            size = 1 + len(inner) + sum(len(value) for value in inner if isinstance(value, str | bytes))
            size += sum(sizes[id(value)][0] for value in holders)
            depth = 1 + max((sizes[id(value)][1] for value in holders), default=0)
            if size > room or depth > DEPTH:
                raise ValueError("it holds things in each other that are too deep, or too many")
            sizes[id(item)] = size, depth


_HOLDERS = (dict, list, tuple, set, frozenset, StandIn, StoredTensor)


def _inside(item: Any) -> Sequence[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values(), *getattr(item, "__dict__", {}).values()]
    if isinstance(item, StoredTensor):
        return [*item.more, *(item.wrapper or ())]
    if isinstance(item, StandIn):
        return [*item.arguments, item.state, item.items, item.pairs]
    return list(item) if isinstance(item, list | tuple | set | frozenset) else ()


class _Unpickler(pickle._Unpickler):
    """Python's own in Python: the one in C makes room for whatever a pickle says that it will need.

    What a pickle can call is `StandIn`s and what is below. That copies no more than `room` elements, and changes
    nothing that was not made for it.
    """

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)
    append: Callable[[Any], None]
    stack: list[Any]

    def __init__(self, path: Path, content: bytes, trust: bool) -> None:
        super().__init__(io.BytesIO(content))
        self.path, self.trust = path, trust
        self.room = 10 * len(content) + 1_000_000

    def _call(self, function: Any, arguments: Any) -> Any:
        arguments = tuple(arguments)
        copied = [item for item in arguments if isinstance(item, Collection)]
        self.room -= len(arguments) + sum(map(len, copied))
        if self.room < 0:
            raise ValueError("it copies one thing again and again")
        if function in (set, frozenset, OrderedDict):
            for item in copied:
                _check_keys(item)
        return function(*arguments)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _instantiate(self, klass: Any, arguments: Any) -> None:
        self.append(self._call(klass, arguments))

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        if not (isinstance(cls, type) and issubclass(cls, StandIn)):
            self.append(self._call(cls, arguments))
        else:
            self.append(self._call(partial(cls.__new__, cls), arguments))

    def load_newobj_ex(self) -> None:
        if self.stack.pop():
            raise ValueError("it names arguments")
        self.load_newobj()

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, StandIn):
            made.__setstate__(state)
        elif type(made) is OrderedDict and type(state) is dict and not any(key in dir(OrderedDict) for key in state):
            vars(made).update(state)
        else:
            raise ValueError(f"it changes a {type(made).__name__}")

    def load_setitem(self) -> None:
        _check_keys([self.stack[-2]])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # since the mark
        super().load_setitems()  # type: ignore[misc]

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()  # type: ignore[misc]

    def load_additems(self) -> None:
        _check_keys(self.stack)
        super().load_additems()  # type: ignore[misc]

    def load_frozenset(self) -> None:
        _check_keys(self.stack)
        super().load_frozenset()  # type: ignore[misc]

    def load_bytearray8(self) -> None:
        raise ValueError("it has a bytearray as torch.save does not write it")  # whose room is made before it is read

    def get_extension(self, code: int) -> Any:
        raise ValueError(f"it has an extension's code {code}")

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
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise ValueError(
                f"it names {full!r:.200}, which is no class"
            )  # what is inside of a class, or of a function
        if not self.trust and not any(fnmatchcase(full, pattern) for pattern in _EXPECTED):
            raise CheckpointError(
                f"{self.path} names {full}, which is not expected in a checkpoint: torch.load could run it. Nothing was"
                " run. If you know where the file is from, go on with --trust (here it is not run then either)."
            )
        return stand_in(full)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str) or not is_shape((numel,)):
            raise ValueError("it has an unknown record")
        return Storage(self.path, key, dtype, numel)


for _opcode, _load in (
    (pickle.REDUCE, _Unpickler.load_reduce),
    (pickle.NEWOBJ, _Unpickler.load_newobj),
    (pickle.NEWOBJ_EX, _Unpickler.load_newobj_ex),
    (pickle.BUILD, _Unpickler.load_build),
    (pickle.SETITEM, _Unpickler.load_setitem),
    (pickle.SETITEMS, _Unpickler.load_setitems),
    (pickle.DICT, _Unpickler.load_dict),
    (pickle.ADDITEMS, _Unpickler.load_additems),
    (pickle.FROZENSET, _Unpickler.load_frozenset),
    (pickle.BYTEARRAY8, _Unpickler.load_bytearray8),
):
    _Unpickler.dispatch[_opcode[0]] = _load  # type: ignore[assignment]


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise ValueError for what would take long to be hashed: tuples of tuples, which each hash goes through anew."""
    for key in keys:
        waiting, count = [key], 0
        while waiting:
            item = waiting.pop()
            if isinstance(item, tuple):
                count += 1 + len(item)
                if count > 1000:
                    raise ValueError("a key is too large")
                waiting.extend(item)


def is_shape(value: Any) -> bool:
    """Whether these can be sizes, strides or offsets."""
    return (
        isinstance(value, tuple)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )


def _tensor(maker: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or not all(map(is_shape, ((offset,), shape, stride))):
        raise ValueError("a tensor has no sizes")
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
    """As pickles of protocol 2 say bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are in another encoding")
    return text.encode("latin-1")


def _bytearray(content: str | bytes = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(_bytes(content, encoding) if isinstance(content, str) else bytes(memoryview(content)))


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
    "builtins.bytearray": _bytearray,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _bytes,
    "torch.Size": Size,
}

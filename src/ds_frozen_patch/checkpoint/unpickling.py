"""The pickle of a file of `torch.save`, read without running any of it.

Nothing that it names is imported or called: what belongs to torch becomes a `StoredTensor` or a plain value, all else a
stand-in. It can take up neither memory nor time without end.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from .._errors import CheckpointError
from .quantization import CLASSES
from .stored import ITEM_SIZES, STORAGES, Size, StandIn, Storage, StoredTensor, is_shape, stand_in

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
    *CLASSES,
)  # fmt: skip


def unpickled(path: Path, content: bytes, trust: bool) -> Any:
    """What the pickle of a file holds.

    Raises:
        CheckpointError: it names a class that is not expected in a checkpoint, and `trust` is not set.
        Exception: of any kind, for a damaged one.
    """
    state = _Unpickler(path, content, trust).load()
    _check_references(state, 20 * len(content) + 10_000_000)
    return state


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
            # What is inside of a class, or of a function.
            raise ValueError(f"it names {full!r:.200}, which is no class")
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


def _tensor(maker: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or not all(map(is_shape, ((offset,), shape, stride))):
        raise ValueError("a tensor has no sizes")
    # The third version of the function says the dtype after two arguments that the second has too.
    dtype = more[2].stands_for.removeprefix("torch.") if maker.endswith("v3") else storage.dtype
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride), maker, more)


def _parameter(maker: str, tensor: StoredTensor, *more: Any) -> StoredTensor:
    return replace(tensor, wrapper=(maker, more))


def _of_type(maker: str, function: Any, cls: Any, arguments: Any, state: Any) -> StoredTensor | StandIn:
    """A tensor with attributes of its own, as ZeRO-3's partitions are; or one that consists of other tensors."""
    if function is stand_in("torch._utils._rebuild_wrapper_subclass"):
        return stand_in(maker)(function, cls, arguments, state)
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


def _check_references(state: Any, room: int) -> None:
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

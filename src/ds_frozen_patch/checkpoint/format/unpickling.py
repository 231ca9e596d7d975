"""Read the pickle of a file of `torch.save` without running any of its code.

Nothing that it names is imported or called: tensors become `StoredTensor`s, other objects of torch plain values, and
everything else stand-ins. Memory and time are bounded: all values are charged to one budget, which is proportional to
the size of the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ...common.errors import CheckpointError
from .allowed import EXPECTED, LISTS, MAPPINGS, may_be_called, may_have_state, value_of_member
from .makers import MAKERS, PLAIN
from .references import check_references
from .stored import STORAGES, StandIn, Storage, StorageType, is_size, stand_in

_BYTES_PER_BYTE = 50
_BYTES_FOR_ALL = 1 << 25
_LONGEST_NAME = 200
# The maximum memory that an opcode takes, in bytes, if it is not that of a small object.
_USUAL_COST = 64
_COSTS = {
    **dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.BINPERSID), 400),
    **dict.fromkeys((pickle.EMPTY_SET, pickle.FROZENSET, pickle.GLOBAL, pickle.STACK_GLOBAL), 232),
    **dict.fromkeys((pickle.MARK, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.PUT), 100),
    **dict.fromkeys((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT1, pickle.EMPTY_TUPLE, pickle.DUP), 8),
    **dict.fromkeys((pickle.BINGET, pickle.LONG_BINGET, pickle.GET, pickle.APPEND, pickle.APPENDS, pickle.BUILD), 8),
}  # fmt: skip
_KEYS = 50_000
"""How many unordered numbers may be keys of one dictionary: numbers can be chosen so that look-ups are slow."""
_COST_OF_A_KEY = 50
"""For how many of these a key counts whose hash can be chosen freely."""
_PRIME = (1 << 61) - 1
"""Python's hash of an integer is its remainder modulo this prime."""


def unpickle(path: Path, content: bytes, trust: bool) -> tuple[Any, frozenset[str]]:
    """Unpickle a state.

    Args:
        path: the file, for messages.
        content: its pickle.
        trust: accept the names of unexpected classes.

    Returns:
        The state, and the names in it that are not expected in a checkpoint.

    Raises:
        CheckpointError: it names an unexpected class, or calls one with arguments that no library passes, and `trust`
            is not set.
        Exception: of any kind, for a damaged pickle.
    """
    unpickler = _Unpickler(path, content, trust)
    state = unpickler.load()
    check_references(state, 20 * len(content) + 10_000_000)
    return state, frozenset(unpickler.unexpected)


class _Unpickler(pickle._Unpickler):
    """Based on Python's own unpickler in Python: the one in C allocates any size that a pickle announces.

    A pickle can call only stand-ins and the functions below, and can change only objects that it has created.
    """

    opcodes: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    append: Callable[[Any], None]
    stack: list[Any]

    def __init__(self, path: Path, content: bytes, trust: bool) -> None:
        super().__init__(io.BytesIO(content))
        self.path, self.trust = path, trust
        self.room = _BYTES_PER_BYTE * len(content) + _BYTES_FOR_ALL
        self.odd_keys: dict[int, int] = {}
        self.storages: dict[str, Storage] = {}
        self.unexpected: set[str] = set()
        self.dispatch = _PaidDispatch(self.opcodes, self._pay)  # type: ignore[misc, assignment]

    def _pay(self, cost: int) -> None:
        self.room -= cost
        if self.room < 0:
            raise ValueError("it creates far more than its size allows")

    def _call(self, function: Any, arguments: Any, make: Callable[..., Any] | None = None) -> None:
        """Push the result of a call, without running code that the pickle names."""
        if not isinstance(arguments, tuple):
            raise ValueError("the arguments of a call are not a tuple")
        self._pay(8 * len(arguments))
        if isinstance(function, type) and issubclass(function, StandIn):
            if not self.trust and not may_be_called(function.stands_for, arguments):
                raise self._unexpected(f"calls {function.stands_for} with arguments that", "no library passes")
        elif make is not None or not (function in PLAIN.values() or isinstance(function, partial)):
            raise ValueError(f"it calls a {type(function).__name__}")
        else:
            self._check_arguments(function, arguments)
        self.append((make or function)(*arguments))

    def _check_arguments(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Raise ValueError if the arguments of a function of `PLAIN` take long, or much memory, to copy."""
        for item in arguments:
            if isinstance(item, Sized) and not isinstance(item, type):
                self._pay(4 * len(item) if isinstance(item, str | bytes | bytearray) else 100 * len(item))
        if function in (set, frozenset, OrderedDict) and arguments:
            (items,) = arguments
            if not isinstance(items, list | tuple):
                raise ValueError(f"a {function.__name__} is created from a {type(items).__name__}")
            if function is OrderedDict:
                if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
                    raise ValueError("a dictionary is not created from pairs")
                items = [pair[0] for pair in items]
            self._check_keys({}, items)
        if function is complex and not all(isinstance(part, float) for part in arguments):
            raise ValueError("a complex number is not created from two numbers")
        if function is bytes and arguments:  # protocol 2 uses this for empty bytes only
            raise ValueError("bytes are created with arguments")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self._call(self.stack.pop(), arguments)

    def _instantiate(self, klass: Any, arguments: Any) -> None:
        self._call(klass, tuple(arguments))

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        self._call(cls, arguments, partial(cls.__new__, cls))

    def load_newobj_ex(self) -> None:
        if self.stack.pop():
            raise ValueError("it passes keyword arguments")
        self.load_newobj()

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, StandIn):
            if not self.trust and not may_have_state(target.stands_for, state):
                raise self._unexpected(f"sets a state of {target.stands_for} that", "no library sets")
            target.__setstate__(state)
        elif type(target) is OrderedDict and type(state) is dict and not any(key in _OF_DICTIONARIES for key in state):
            self._pay(100 * len(state))
            vars(target).update(state)
        else:
            raise ValueError(f"it changes a {type(target).__name__}")

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn) and not self.trust and target.stands_for not in LISTS:
            raise self._unexpected(f"appends to {target.stands_for}, which", "no library does")
        if type(target) is not list and not isinstance(target, StandIn):
            raise ValueError(f"it appends to a {type(target).__name__}")
        target.extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set(items)

    def load_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.append({})
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, StandIn):
            if not self.trust and target.stands_for not in MAPPINGS:
                raise self._unexpected(f"sets items of {target.stands_for}, which", "no library does")
        elif type(target) in (dict, OrderedDict):
            self._check_keys(target, items[::2])
        else:
            raise ValueError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def load_additems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"it adds to a {type(target).__name__}")
        self._check_keys(target, items)
        target.update(items)

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._check_keys(frozenset(), items)
        self.append(frozenset(items))

    def _check_keys(self, container: Sized, keys: Iterable[Any]) -> None:
        """Raise ValueError for keys that are slow to look up: too many whose hashes can be chosen."""
        count = self.odd_keys.get(id(container), 0) if container else 0
        for place, key in enumerate(keys, len(container)):
            if isinstance(key, int | float) and abs(key) < _PRIME:
                count += not (isinstance(key, int) and place <= key + 1 <= place + 64)  # such as 0, 1, 2, ...
            elif isinstance(key, tuple):
                _check_tuple(key)
                count += _COST_OF_A_KEY
            elif isinstance(key, int | float | complex):
                count += _COST_OF_A_KEY
            elif not (key is None or isinstance(key, str | bytes | StandIn | type)):
                raise ValueError(f"a {type(key).__name__} is a key")
            if count > _KEYS:
                raise ValueError("too many keys are unordered numbers or tuples")
        self.odd_keys[id(container)] = count

    def load_long4(self) -> None:
        raise ValueError("it has a number of more than 255 bytes")

    def load_bytearray8(self) -> None:
        # It would be allocated before it is read.
        raise ValueError("it has a bytearray as torch.save does not write it")

    def get_extension(self, code: int) -> Any:
        raise ValueError(f"it has an extension code {code}")

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # Python 2's names, which torch.save still writes
            module, name = "builtins", {"xrange": "range", "long": "int", "unicode": "str"}.get(name, name)
        full = f"{module}.{name}"
        if full in MAKERS:
            return partial(MAKERS[full], full)
        if full in PLAIN:
            return PLAIN[full]
        if full == "builtins.getattr":
            return partial(self._get_member)
        if module in ("torch", "torch.storage") and name in STORAGES:
            return StorageType(STORAGES[name])
        if len(full) > _LONGEST_NAME or not all(part.isidentifier() for part in (*module.split("."), name)):
            # Such as an attribute of a class or function.
            raise ValueError(f"it names {full!r:.200}, which is not a class")
        return self._named(full)

    def _named(self, full: str) -> type[StandIn]:
        """A class of stand-ins for a name; raises CheckpointError if it is not expected."""
        if full not in EXPECTED:
            if not self.trust:
                raise self._unexpected(f"names {full}, which", "is not expected in a checkpoint")
            self._pay(2000)  # for the class of the stand-in
            self.unexpected.add(full)
        return stand_in(full)

    def _get_member(self, *arguments: Any) -> StandIn:
        """Python 3.11.0 to 3.11.3 pickle a member of an enum as `getattr(enum, name)`, all others as `enum(value)`."""
        enum, name = arguments if len(arguments) == 2 else (None, None)
        if isinstance(enum, type) and issubclass(enum, StandIn) and isinstance(name, str):
            value = value_of_member(enum.stands_for, name)
            if value is not None:
                return enum(value)
        return self._named("builtins.getattr")(*arguments)

    def _unexpected(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {what} {why}: torch.load could run it. Nothing was run. If you trust the file, pass --trust"
            " (this tool does not run it then either)."
        )

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, StorageType) or not isinstance(key, str) or not is_size(numel):
            raise ValueError("it has an unknown record")
        storage = Storage(self.path, key, str(dtype), numel)
        if self.storages.setdefault(key, storage) != storage:  # torch would take the first of them for both
            raise ValueError(f"storage {key!r:.20} has two dtypes or sizes")
        return storage


for _opcode, _load in (
    (pickle.REDUCE, _Unpickler.load_reduce),
    (pickle.NEWOBJ, _Unpickler.load_newobj),
    (pickle.NEWOBJ_EX, _Unpickler.load_newobj_ex),
    (pickle.BUILD, _Unpickler.load_build),
    (pickle.APPEND, _Unpickler.load_append),
    (pickle.APPENDS, _Unpickler.load_appends),
    (pickle.SETITEM, _Unpickler.load_setitem),
    (pickle.SETITEMS, _Unpickler.load_setitems),
    (pickle.DICT, _Unpickler.load_dict),
    (pickle.ADDITEMS, _Unpickler.load_additems),
    (pickle.FROZENSET, _Unpickler.load_frozenset),
    (pickle.LONG4, _Unpickler.load_long4),
    (pickle.BYTEARRAY8, _Unpickler.load_bytearray8),
):
    _Unpickler.opcodes[_opcode[0]] = _load


class _PaidDispatch:
    """The functions of the opcodes; looking one up charges its cost."""

    def __init__(self, opcodes: Mapping[int, Any], pay: Callable[[int], None]) -> None:
        self._opcodes, self._pay = opcodes, pay

    def __getitem__(self, opcode: int) -> Any:
        self._pay(_COST_OF[opcode])
        return self._opcodes[opcode]


_COST_OF = [_COSTS.get(bytes([opcode]), _USUAL_COST) for opcode in range(256)]
_OF_DICTIONARIES = frozenset(dir(OrderedDict))


def _check_tuple(key: tuple[Any, ...]) -> None:
    """Raise ValueError for a tuple that is too large for a key: hashes of nested tuples are not cached."""
    waiting: list[Any] = [key]
    count = 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            count += 1 + len(item)
            if count > 1000:
                raise ValueError("a key is too large")
            waiting.extend(item)
        elif not (item is None or isinstance(item, str | bytes | int | float | complex | StandIn | type)):
            raise ValueError(f"a {type(item).__name__} is in a key")

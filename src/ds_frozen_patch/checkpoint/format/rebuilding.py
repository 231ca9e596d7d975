"""What an unpickler calls in the place of torch's functions that rebuild tensors, and of Python's plain classes.

Each is a class that a pickle cannot change.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from .stored import Fixed, Size, StandIn, Storage, StoredTensor, is_shape, is_size, stand_in


class _Tensor(metaclass=Fixed):
    """Creates a tensor that is a view of a storage."""

    stands_for = "torch._utils._rebuild_tensor_v2"

    def __new__(cls, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> Any:
        if not isinstance(storage, Storage) or not (is_size(offset) and is_shape(shape) and is_shape(stride)):
            raise ValueError("a tensor has invalid sizes")
        if any(cls._metadata(more)):  # such as a conjugate that torch computes when it loads
            raise ValueError("a tensor has metadata, which these tools do not support")
        return StoredTensor(storage, cls._dtype(storage, more), offset, shape, stride, cls.stands_for, more)

    @staticmethod
    def _dtype(storage: Storage, more: tuple[Any, ...]) -> str:
        return storage.dtype

    @staticmethod
    def _metadata(more: tuple[Any, ...]) -> tuple[Any, ...]:
        return more[2:]  # after `requires_grad` and the hooks


class _OldTensor(_Tensor):
    stands_for = "torch._utils._rebuild_tensor"


class _TensorOfDtype(_Tensor):
    """Creates a tensor of a dtype that torch has no class of storages for."""

    stands_for = "torch._utils._rebuild_tensor_v3"

    @staticmethod
    def _dtype(storage: Storage, more: tuple[Any, ...]) -> str:
        dtype: str = more[2].stands_for.removeprefix("torch.")
        return dtype

    @staticmethod
    def _metadata(more: tuple[Any, ...]) -> tuple[Any, ...]:
        return more[3:]


class _Parameter(metaclass=Fixed):
    """Returns the tensor of a parameter."""

    stands_for = "torch._utils._rebuild_parameter"

    def __new__(cls, tensor: StoredTensor | StandIn, *more: Any) -> Any:
        if isinstance(tensor, StoredTensor):
            return replace(tensor, wrapper=(cls.stands_for, more))
        return stand_in(cls.stands_for)(tensor, *more)


class _ParameterWithState(_Parameter):
    stands_for = "torch._utils._rebuild_parameter_with_state"


class _Subclass(metaclass=Fixed):
    """Returns a tensor with attributes, such as a partition of ZeRO-3; else it consists of other tensors."""

    stands_for = "torch._tensor._rebuild_from_type_v2"

    def __new__(cls, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        if isinstance(function, type) and issubclass(function, _Tensor):
            return replace(function(*arguments), wrapper=(cls.stands_for, (kind, state)))
        return stand_in(cls.stands_for)(function, kind, arguments, state)


class _Bytes(metaclass=Fixed):
    """Bytes as pickles of protocol 2 encode them."""

    stands_for = "_codecs.encode"

    def __new__(cls, content: str | bytes = b"", encoding: str = "latin-1") -> Any:
        if encoding not in ("latin1", "latin-1") or not isinstance(content, str | bytes):
            raise ValueError("bytes are created from something else, or are in another encoding")
        return content.encode("latin-1") if isinstance(content, str) else content


class _ByteArray(_Bytes):
    stands_for = "builtins.bytearray"

    def __new__(cls, *content: Any) -> Any:
        return bytearray(_Bytes(*content))


class _Size(metaclass=Fixed):
    stands_for = "torch.Size"

    def __new__(cls, shape: Any = ()) -> Any:
        if not is_shape(tuple(shape)):
            raise ValueError("a shape has invalid sizes")
        return Size(shape)


class Ordered(OrderedDict[Any, Any], metaclass=Fixed):
    """An OrderedDict in a file. A pickle cannot hide its methods behind attributes."""

    stands_for = "collections.OrderedDict"

    def __setstate__(self, state: dict[str, Any]) -> None:
        if hidden := state.keys() & _OF_DICTIONARIES:
            raise pickle.UnpicklingError(f"it changes {min(hidden)!r:.100} of an OrderedDict")
        vars(self).update(state)


_OF_DICTIONARIES = frozenset(dir(Ordered))
IN_PLACE_OF: dict[str, Any] = {
    "builtins.bytes": _Bytes,
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    **{cls.stands_for: cls for cls in (_Tensor, _OldTensor, _TensorOfDtype, _Parameter, _ParameterWithState)},
    **{cls.stands_for: cls for cls in (_Subclass, _Bytes, _ByteArray, _Size, Ordered)},
}
"""What is called in the place of functions and classes, by their full names. All others have stand-ins."""

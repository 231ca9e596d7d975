"""What an unpickler calls in the place of torch's functions that rebuild tensors, and of OrderedDict."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .stored import Fixed, Size, StandIn, Storage, StoredTensor, is_shape, is_size, stand_in

_TENSOR = "torch._utils._rebuild_tensor"
_TENSORS = (_TENSOR, f"{_TENSOR}_v2", f"{_TENSOR}_v3")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"


def _tensor(function: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    """A view of a storage."""
    if not isinstance(storage, Storage) or not (is_size(offset) and is_shape(shape) and is_shape(stride)):
        raise ValueError("a tensor has invalid sizes")
    dtype, metadata = storage.dtype, more[2:]  # after `requires_grad` and the hooks
    if function.endswith("v3"):  # of a dtype that torch has no class of storages for
        dtype, metadata = more[2].stands_for.removeprefix("torch."), more[3:]
    if any(metadata):  # such as a conjugate that torch computes when it loads
        raise ValueError("a tensor has metadata, which these tools do not support")
    return StoredTensor(storage, dtype, offset, shape, stride, function, more)


def _parameter(function: str, tensor: StoredTensor | StandIn, *more: Any) -> StoredTensor | StandIn:
    if isinstance(tensor, StoredTensor):
        return replace(tensor, wrapper=(function, more))
    return stand_in(function)(tensor, *more)


def _subclass(function: str, rebuild: Any, kind: Any, arguments: Any, state: Any) -> StoredTensor | StandIn:
    """A tensor with attributes, such as a partition of ZeRO-3; else it consists of other tensors."""
    if isinstance(rebuild, Fixed) and rebuild.stands_for in _TENSORS:
        return replace(_tensor(rebuild.stands_for, *arguments), wrapper=(function, (kind, state)))
    return stand_in(function)(rebuild, kind, arguments, state)


def _size(_: str, shape: Any = ()) -> Size:
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

    def __reduce__(self) -> Any:
        return OrderedDict, (), vars(self) or None, None, iter(self.items())


_OF_DICTIONARIES = frozenset(dir(Ordered))


def _in_place_of(name: str, make: Callable[..., Any]) -> Fixed:
    """A class that a pickle calls and cannot change, as it could a function."""
    return Fixed(name.rpartition(".")[2], (), {"stands_for": name, "__new__": lambda _, *args: make(name, *args)})


IN_PLACE_OF: dict[str, Any] = {
    Ordered.stands_for: Ordered,
    **{name: _in_place_of(name, _tensor) for name in _TENSORS},
    **{name: _in_place_of(name, _parameter) for name in _PARAMETERS},
    _SUBCLASS: _in_place_of(_SUBCLASS, _subclass),
    "torch.Size": _in_place_of("torch.Size", _size),
}
"""What is called in the place of functions and classes, by their full names. All others have stand-ins."""

"""What an unpickler calls instead of the functions of torch that create tensors, and for other plain values."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

from .stored import Size, StandIn, Storage, StoredTensor, is_shape, is_size, stand_in

_CHANGE_VALUES = frozenset([
    "H", "T", "data", "device", "dtype", "grad", "grad_dtype", "grad_fn", "imag", "layout", "mH", "mT", "name", "names",
    "real", "requires_grad", "retains_grad", "shape",
])  # fmt: skip
"""Attributes of torch's own on a tensor. Setting one could change its values; a subclass has others."""


def _make_tensor(maker: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or not (is_size(offset) and is_shape(shape) and is_shape(stride)):
        raise ValueError("a tensor has invalid sizes")
    dtype = storage.dtype
    flags, hooks, *rest = more or (False, OrderedDict())
    if maker.endswith("v3"):  # it has the dtype after these two arguments
        if not rest or not (isinstance(rest[0], type) and issubclass(rest[0], StandIn)):
            raise ValueError("a tensor has no dtype")
        dtype = rest.pop(0).stands_for.removeprefix("torch.")
    _check_flags(flags, hooks)
    if any(rest):  # such as a conjugate that torch computes when it loads
        raise ValueError("a tensor has metadata, which these tools do not support")
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride), maker, more)


def _check_flags(requires_grad: Any, hooks: Any) -> None:
    """Raise ValueError for what torch does not write after the sizes of a tensor."""
    if not isinstance(requires_grad, bool) or type(hooks) is not OrderedDict or hooks:
        raise ValueError("a tensor is created with other arguments than those that torch writes")


def _check_attributes(state: Any) -> None:
    """Raise ValueError for attributes that could change the values of a tensor: torch sets whatever is named."""
    for attributes in state if isinstance(state, tuple) else (state,):
        if attributes is not None and type(attributes) not in (dict, OrderedDict):
            raise ValueError("the attributes of a tensor are not in a dictionary")
        for name in attributes or ():
            if not isinstance(name, str) or name in _CHANGE_VALUES or name.startswith(("__", "_backward", "_grad")):
                raise ValueError(f"it sets {name!r:.50} of a tensor, which could change its values")


def _make_parameter(maker: str, tensor: StoredTensor, *more: Any) -> StoredTensor:
    if not isinstance(tensor, StoredTensor) or not 2 <= len(more) <= 3:
        raise ValueError("a parameter is not created from a tensor")
    _check_flags(*more[:2])
    _check_attributes(more[2] if len(more) > 2 else None)
    return replace(tensor, wrapper=(maker, more))


def _make_subclass(maker: str, function: Any, cls: Any, arguments: Any, state: Any) -> StoredTensor | StandIn:
    """A tensor with attributes, such as a partition of ZeRO-3; or one that consists of other tensors."""
    if not isinstance(cls, type) or not issubclass(cls, StandIn) or not isinstance(arguments, tuple):
        raise ValueError("a tensor has no class")
    if function is stand_in("torch._utils._rebuild_wrapper_subclass"):
        return stand_in(maker)(function, cls, arguments, state)
    if not isinstance(function, partial) or function.func is not _make_tensor or len(arguments) > 10:
        raise ValueError("a tensor is not created by a function of torch")
    tensor: StoredTensor = function(*arguments)
    _check_attributes(state)
    return replace(tensor, wrapper=(maker, (cls, state)))


def _make_bytes(text: str, encoding: str) -> bytes:
    """Bytes as pickles of protocol 2 encode them."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are in another encoding")
    return text.encode("latin-1")


def _make_bytearray(content: str | bytes = b"", encoding: str = "latin-1") -> bytearray:
    if not isinstance(content, str | bytes):
        raise ValueError("a bytearray is created from something else")
    return bytearray(_make_bytes(content, encoding) if isinstance(content, str) else content)


def _make_size(shape: Any) -> Size:
    if not isinstance(shape, list | tuple) or not is_shape(tuple(shape)):
        raise ValueError("a shape has invalid sizes")
    return Size(shape)


# What creates tensors and plain values, by full name: functions above, and built-in classes.
MAKERS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor,
    "torch._tensor._rebuild_from_type_v2": _make_subclass,
    "torch._utils._rebuild_parameter": _make_parameter,
    "torch._utils._rebuild_parameter_with_state": _make_parameter,
    "_codecs.encode": lambda _, *arguments: _make_bytes(*arguments),
    "builtins.bytearray": lambda _, *arguments: _make_bytearray(*arguments),
    "torch.Size": lambda _, *arguments: _make_size(*arguments),
}
PLAIN: dict[str, Any] = {
    "builtins.bytes": bytes,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "collections.OrderedDict": OrderedDict,
}

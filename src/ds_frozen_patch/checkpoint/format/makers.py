"""What an unpickler calls instead of the functions of torch that create tensors, and for other plain values."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

from .stored import Size, StandIn, Storage, StoredTensor, is_shape, stand_in


def _make_tensor(maker: str, storage: Storage, offset: int, shape: Any, stride: Any, *more: Any) -> StoredTensor:
    if not isinstance(storage, Storage) or not all(map(is_shape, ((offset,), shape, stride))):
        raise ValueError("a tensor has invalid sizes")
    # The third version of the function has the dtype after the two last arguments of the second.
    dtype = more[2].stands_for.removeprefix("torch.") if maker.endswith("v3") else storage.dtype
    return StoredTensor(storage, dtype, offset, tuple(shape), tuple(stride), maker, more)


def _make_parameter(maker: str, tensor: StoredTensor, *more: Any) -> StoredTensor:
    return replace(tensor, wrapper=(maker, more))


def _make_subclass(maker: str, function: Any, cls: Any, arguments: Any, state: Any) -> StoredTensor | StandIn:
    """A tensor with attributes, such as a partition of ZeRO-3; or one that consists of other tensors."""
    if not isinstance(cls, type) or not issubclass(cls, StandIn) or not isinstance(arguments, tuple):
        raise ValueError("a tensor has no class")
    if function is stand_in("torch._utils._rebuild_wrapper_subclass"):
        return stand_in(maker)(function, cls, arguments, state)
    if not isinstance(function, partial) or function.func is not _make_tensor or len(arguments) > 10:
        raise ValueError("a tensor is not created by a function of torch")
    made: StoredTensor = function(*arguments)
    return replace(made, wrapper=(maker, (cls, state)))


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

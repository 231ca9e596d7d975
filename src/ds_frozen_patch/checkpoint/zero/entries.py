"""What the module's state dict in a file of model states contains: tensors, tensor subclasses, parts and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...parameters import plain
from ...record import Record
from ..format.stored import StoredTensor
from ..quantization import Subclass, base_buffers, find_owners, parse_subclass
from .states import as_names, parameter_groups


@dataclass(frozen=True)
class ModuleEntries:
    """The entries of a module's state dict, by plain name.

    Attributes:
        tensors: all tensors, including the inner tensors of tensor subclasses.
        subclasses: the tensor subclasses.
        owners: the parameter that each part belongs to.
        buffers: the names of buffers.
        packed: those among them that belong to a quantized base.
    """

    tensors: dict[str, StoredTensor]
    subclasses: dict[str, Subclass]
    owners: dict[str, str]
    buffers: set[str]
    packed: set[str]


def with_plain_names(model: Mapping[str, Any], rename: Callable[[str], str] = plain) -> dict[str, Any]:
    """A file's model states with plain names throughout, or with those that a function returns.

    DeepSpeed takes some names from the module and others from its state dict; the two differ for wrapped layers.
    """
    changed: dict[str, Any] = {"buffer_names": [rename(name) for name in as_names(model.get("buffer_names"))]}
    changed["param_shapes"] = [
        {rename(name): shape for name, shape in group.items()} for group in parameter_groups(model)
    ]
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params"):
        if isinstance(model.get(key), dict):
            changed[key] = with_attributes(model[key], {rename(name): item for name, item in model[key].items()})
    if "shared_params" in changed:
        changed["shared_params"] = {name: rename(first) for name, first in changed["shared_params"].items()}
    return {**model, **changed}


def with_attributes(values: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of the same class as another, with what torch attaches to a state dict."""
    result = type(values)(changed)
    if hasattr(values, "__dict__"):
        vars(result).update(vars(values))
    return result


def read_entries(model: Mapping[str, Any], record: Record) -> ModuleEntries:
    """Classify what a file's model states contain.

    Args:
        model: as `with_plain_names` returns it.
        record: the checkpoint's.
    """
    module: dict[str, StoredTensor] = {}
    subclasses = {}
    inner: dict[str, str] = {}
    for name, item in model["module"].items():
        if isinstance(item, StoredTensor):
            module[name] = item
        elif (subclass := parse_subclass(item)) is not None:
            subclasses[name] = subclass
            for rest, tensor in subclass.inner.items():
                module[f"{name}.{rest}"] = tensor
                inner[f"{name}.{rest}"] = name
    fragments = model.get("frozen_param_fragments") or {}
    for name, item in fragments.items():
        if name not in subclasses and (subclass := parse_subclass(item)) is not None:
            subclasses[name] = replace(subclass, is_in_module=False)
    buffers = _find_buffers(model, module)
    names = {name for group in parameter_groups(model) for name in group}
    names |= {*(model.get("frozen_param_shapes") or {})}
    names |= {name for entry in record.parameters for name in entry.names}
    dtypes = {name: tensor.dtype for name, tensor in module.items() if name not in buffers}
    owners = {**find_owners(dtypes, names), **inner}
    return ModuleEntries(module, subclasses, owners, buffers, base_buffers(buffers, owners))


def _find_buffers(model: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> set[str]:
    """The names of all buffers. DeepSpeed lists only the first name of a buffer that has several."""
    listed = as_names(model.get("buffer_names")) & module.keys()
    places = {storage_place(module[name]) for name in listed if module[name].numel}
    return listed | {name for name, tensor in module.items() if storage_place(tensor) in places}


def storage_place(tensor: StoredTensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same memory. The shape is text: its hash cannot be chosen to collide."""
    return tensor.storage, repr((tensor.offset, tensor.shape))

"""What a checkpoint holds of a quantized base, at a load.

Full checkpoints hold all of it. Some layers save their scales and settings and do not load them, some make a new
parameter of what they load, and some tensor subclasses cannot be copied: what the module has already is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import CheckpointMismatchError, named
from ..manifest import Manifest
from ..parameters import PARAMETER, PART, Held, contents, described, inner_tensors, part_name, plain, settings_of
from ..save.saving import warn
from ..settings import current
from .load import Load


def by_name(module: Any) -> dict[str, Held]:
    """What a module holds, by all names."""
    return {name: one for one in contents(module) for name in one.names}


def is_part(held: Held | None) -> bool:
    """Whether this is a part of a frozen parameter."""
    return held is not None and held.kind == PART and held.is_frozen


def without_what_is_there(
    state: Mapping[str, Any], held: Mapping[str, Held], manifest: Manifest | None, load: Load
) -> Mapping[str, Any]:
    """A module's state without the quantized parameters that the module has already, parts included.

    Raises:
        CheckpointMismatchError: there are parts of a parameter that was left out, as older releases saved them, and the
            module has others.
    """
    quantized = {one.group for one in held.values() if is_part(one)}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        one = held.get(plain(name))
        if one is not None and one.is_frozen and one.group in quantized and not hasattr(one.tensor, "ds_tensor"):
            groups.setdefault(one.group, {})[name] = value
    there: set[str] = set()
    for group, values in groups.items():
        if manifest is not None and group in manifest.names:
            check_parts({plain(name): value for name, value in values.items()}, held, load)
            there |= values.keys()
        elif all(_is_same(value, held[plain(name)], held) for name, value in values.items()):
            there |= values.keys()
    return {name: value for name, value in state.items() if name not in there} if there else state


def check_parts(parts: Mapping[str, Any], held: Mapping[str, Held], load: Load) -> None:
    """The parts of quantized parameters in a checkpoint must be what the module has.

    Raises:
        CheckpointMismatchError: the packed weights of one would meet the scales of another.
    """
    wrong = [name for name, value in parts.items() if name not in held or not _is_same(value, held[name], held)]
    if not wrong or current().verify_base == "off":
        return
    message = (
        f"The checkpoint's base is not quantized as the model's is: {named(wrong)} differ, and cannot be loaded."
        " Build and quantize the base as the run that saved did."
    )
    if current().verify_base == "error":
        raise CheckpointMismatchError(message)
    warn(load.strategy, message)


def _is_same(value: Any, own: Held, held: Mapping[str, Held]) -> bool:
    """Whether a value in a checkpoint is what the module has."""
    import torch

    if own.kind == PARAMETER and own.is_subclass:
        inner = inner_tensors(value)
        same = [_is_same(one, held[part_name(own.name, f".{rest}")], held) for rest, one in inner.items()]
        return bool(same) and all(same) and torch.equal(described(settings_of(value)), own.tensor)
    tensor = value if isinstance(value, torch.Tensor) else described(value)
    mine = own.tensor.detach()
    return mine.dtype == tensor.dtype and mine.shape == tensor.shape and torch.equal(mine.cpu(), tensor.cpu())

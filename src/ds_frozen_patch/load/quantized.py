"""A quantized base that a checkpoint contains, at a load.

Full checkpoints contain all of it. Some layers save their scales and settings but do not load them, some replace their
parameter by a new one, and some tensor subclasses cannot be copied. So what the module already has is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import CheckpointMismatchError, named
from ..engine.served import warn
from ..internals import partition_of
from ..parameters import ModuleTensor, described, inner_tensors, part_name, plain, settings_of
from ..settings import current
from .running import Load


def without_own_values(state: Mapping[str, Any], load: Load) -> Mapping[str, Any]:
    """A state dict without the quantized parameters, and their parts, whose values the module already has.

    Raises:
        CheckpointMismatchError: the state dict has parts of a parameter that was left out (`patch(keep=...)` can name
            a part alone), and they differ from the module's.
    """
    held, record = load.held, load.record
    quantized = {held[name].group for name in load.parts}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        now = held.get(plain(name))
        if now is not None and now.is_frozen and now.group in quantized and partition_of(now.tensor) is now.tensor:
            groups.setdefault(now.group, {})[name] = value
    there: set[str] = set()
    for group, values in groups.items():
        if record is not None and group in record.names:
            check_parts({plain(name): value for name, value in values.items()}, held, load)
            there |= values.keys()
        elif all(_is_same(value, held[plain(name)], held) for name, value in values.items()):
            there |= values.keys()
    return {name: value for name, value in state.items() if name not in there} if there else state


def check_parts(parts: Mapping[str, Any], held: Mapping[str, ModuleTensor], load: Load) -> None:
    """The parts of quantized parameters in a checkpoint must equal the module's.

    Raises:
        CheckpointMismatchError: they do not, so packed weights would be combined with wrong scales.
    """
    wrong = [name for name, value in parts.items() if name not in held or not _is_same(value, held[name], held)]
    if not wrong or current().verify_base == "off":
        return
    message = (
        f"The checkpoint's base is quantized differently from the model's: {named(wrong)} differ, and cannot be loaded."
        " Build and quantize the base as in the run that saved it."
    )
    if current().verify_base == "error":
        raise CheckpointMismatchError(message)
    warn(load.owner, message)


def _is_same(value: Any, now: ModuleTensor, held: Mapping[str, ModuleTensor]) -> bool:
    """Whether a value in a checkpoint equals the module's."""
    import torch

    if now.is_subclass:
        inner = inner_tensors(value)
        same = [_is_same(part, held[part_name(now.name, f".{rest}")], held) for rest, part in inner.items()]
        return bool(same) and all(same) and torch.equal(described(settings_of(value)), now.tensor)
    tensor = value if isinstance(value, torch.Tensor) else described(value)
    mine = now.tensor.detach()
    return mine.dtype == tensor.dtype and mine.shape == tensor.shape and torch.equal(mine.cpu(), tensor.cpu())

"""Copies of the base among what a program adds to a checkpoint, such as an average of all weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..common.text import human_bytes
from ..engine.origins import sketch
from ..engine.owner import is_first, warn
from .running import Save

_DEPTH = 10


def warn_of_copies(save: Save, client_state: Mapping[str, Any]) -> None:
    """Log, at the first save, which keys of the client state contain values that the save leaves out."""
    if not is_first(save.owner) or not save.served.is_first_time("copies of the base"):
        return
    tensors = list(_tensors(client_state, ()))
    if not tensors:
        return
    base = {sketch(entry.tensor) for entry in save.left_out or ()} - {None}
    sizes: dict[str, int] = {}
    for path, tensor in tensors:
        if sketch(tensor) in base:
            key = "".join(f"[{name!r}]" for name in path[:-1][:2])
            sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
    for key, size in sizes.items():
        warn(
            save.owner,
            f"Each checkpoint contains {human_bytes(size)} of what it leaves out all the same: the program saves copies"
            f" of frozen weights as client_state{key}. Save only what is trained there.",
        )


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple) and len(path) < _DEPTH:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, (*path, key))

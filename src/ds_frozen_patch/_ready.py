"""`patch(export=...)`: what was trained, ready to be used, beside the checkpoint of each save."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._errors import CheckpointError
from ._gathering import gathered
from ._saving import warn
from ._settings import current
from ._together import put_off, raise_together
from ._unfinished import named_in_the_end
from .checkpoint.exporting import Adapter
from .checkpoint.safetensors_file import write_header
from .manifest import adapters_of, dtype_of, names_by_parameter, parameters_by_name, plain, shape_of

FILE, FOLDER = "trainable.safetensors", "adapter"
"""What is made inside a checkpoint's directory: for "safetensors" the file, for "peft" the folder."""


def write(engine: Any, strategy: Any, checkpoint: Path) -> None:
    """Write what `patch(export=...)` asks for, from the weights in memory; every rank must call it.

    One parameter after another is gathered and written by rank 0, so that memory does not grow with them.

    Raises:
        CheckpointError: it cannot be written. All ranks have done their part then.
    """
    chosen = {
        names[0]: parameter
        for parameter, names in names_by_parameter(engine.module).items()
        if parameter.requires_grad or current().keeps(names)
    }
    if current().export == "safetensors":
        saved = {plain(name) for name in engine.module.state_dict()}
        buffers = {plain(name): b for name, b in engine.module.named_buffers() if plain(name) in saved}
        _write(checkpoint, FILE, chosen, buffers, strategy)
    elif (adapter := _adapter(engine, strategy)) is not None:
        parameters = {names[0]: parameter for parameter, names in names_by_parameter(engine.module).items()}
        buffers = {plain(name): buffer for name, buffer in engine.module.named_buffers()}
        adapters = adapters_of(engine.module)[adapter.module]
        members = adapter.members(chosen, (*(parameters.keys() - chosen.keys()), *buffers), adapters)
        own = {name: parameters[own] for name, own in sorted(members.items()) if own in parameters}
        beside = {name: buffers[own] for name, own in members.items() if own in buffers}
        _write(checkpoint, f"{FOLDER}/adapter_model.safetensors", own, beside, strategy, adapter.write_config)


def _adapter(engine: Any, strategy: Any) -> Adapter | None:
    known = [
        Adapter(module, name, json.loads(config))
        for module, adapters in adapters_of(engine.module).items()
        for name, config in adapters.items()
    ]
    trained = [name for name, parameter in parameters_by_name(engine.module).items() if parameter.requires_grad]
    found = [adapter for adapter in known if any(map(adapter.owns, trained))]
    if len(found) != 1:
        warn(strategy, f'patch(export="peft") makes nothing: the module trains {len(found)} adapters of PEFT, not one.')
        return None
    try:
        found[0].check()
    except CheckpointError as error:
        warn(strategy, f'patch(export="peft") makes nothing. {error}')
        return None
    return found[0]


def _write(
    checkpoint: Path,
    name: str,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    strategy: Any,
    write_beside: Callable[[Path], None] | None = None,
) -> None:
    file = checkpoint / name
    partial = file.with_name(f".{file.name}.partial")
    entries = [(name, _dtype(p), shape_of(p)) for name, p in parameters.items()]
    entries += [(name, dtype_of(buffer), tuple(buffer.shape)) for name, buffer in buffers.items()]
    failed: list[CheckpointError] = []

    def attempt(write: Callable[..., object], *content: Any) -> None:
        # The other ranks wait for rank 0 to gather, even when it can no longer write.
        if strategy.is_global_zero and not failed:
            with put_off(failed, file):
                write(*content)

    attempt(lambda: file.parent.mkdir(exist_ok=True))
    attempt(lambda: _start(partial, entries))
    for name, value in gathered(parameters, strategy.is_global_zero):
        attempt(_append, partial, value, _dtype(parameters[name]))
    for value in buffers.values():
        attempt(_append, partial, value, dtype_of(value))
    attempt(lambda: partial.replace(file))
    if write_beside is not None:
        attempt(write_beside, file.parent)
    if failed:
        partial.unlink(missing_ok=True)
    raise_together(strategy, named_in_the_end(checkpoint), failed)


def _start(file: Path, entries: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with file.open("wb") as out:
        write_header(out, entries, {"format": "pt"})


def _append(file: Path, value: Any, dtype: str) -> None:
    import torch

    content = value.detach().cpu().to(getattr(torch, dtype)).contiguous().flatten().view(torch.uint8).numpy()
    with file.open("ab") as out:
        out.write(content)


def _dtype(parameter: Any) -> str:
    return "float32" if current().fp32_weights and parameter.is_floating_point() else dtype_of(parameter)

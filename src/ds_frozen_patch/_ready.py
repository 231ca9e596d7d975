"""`patch(export=...)`: what was trained, ready to be used, beside the checkpoint of each save."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from ._errors import CheckpointError
from ._gathering import gathered
from ._saving import warn
from ._settings import current
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
        _write(checkpoint / FILE, chosen, buffers, strategy)
    elif (adapter := _adapter(engine, strategy)) is not None:
        parameters = {names[0]: parameter for parameter, names in names_by_parameter(engine.module).items()}
        buffers = {plain(name): buffer for name, buffer in engine.module.named_buffers()}
        adapters = adapters_of(engine.module)[adapter.module]
        members = adapter.members(chosen, (*(parameters.keys() - chosen.keys()), *buffers), adapters)
        own = {name: parameters[own] for name, own in sorted(members.items()) if own in parameters}
        beside = {name: buffers[own] for name, own in members.items() if own in buffers}
        _write(checkpoint / FOLDER / "adapter_model.safetensors", own, beside, strategy)
        if strategy.is_global_zero:
            adapter.write_config(checkpoint / FOLDER)


def _adapter(engine: Any, strategy: Any) -> Adapter | None:
    found = [
        Adapter(module, name, json.loads(config))
        for module, adapters in adapters_of(engine.module).items()
        for name, config in adapters.items()
        if any(p.requires_grad and name in own.split(".") for own, p in parameters_by_name(engine.module).items())
    ]
    if len(found) != 1:
        warn(strategy, f'patch(export="peft") makes nothing: the module trains {len(found)} adapters of PEFT, not one.')
        return None
    try:
        found[0].check()
    except CheckpointError as error:
        warn(strategy, f'patch(export="peft") makes nothing. {error}')
        return None
    return found[0]


def _write(file: Path, parameters: dict[str, Any], buffers: dict[str, Any], strategy: Any) -> None:
    partial = file.with_name(f".{file.name}.partial")
    entries = [(name, _dtype(p), shape_of(p)) for name, p in parameters.items()]
    entries += [(name, dtype_of(buffer), tuple(buffer.shape)) for name, buffer in buffers.items()]
    is_writer, failed, out = strategy.is_global_zero, None, None
    # The other ranks wait for this one to gather, even when it can no longer write.
    with ExitStack() as stack:
        try:
            if is_writer:
                file.parent.mkdir(exist_ok=True)
                out = stack.enter_context(partial.open("wb"))
                write_header(out, entries, {"format": "pt"})
        except OSError as error:
            failed = error
        for name, value in chain(gathered(parameters, is_writer), buffers.items()):
            try:
                if out is not None and failed is None:
                    dtype = _dtype(parameters[name]) if name in parameters else dtype_of(value)
                    out.write(_bytes(value, dtype))
            except OSError as error:
                failed = error
    message = strategy.broadcast(str(failed) if failed else None)
    if message:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{file} cannot be written ({message}). The checkpoint that it is a part of is whole.")
    if is_writer:
        partial.replace(file)


def _dtype(parameter: Any) -> str:
    return "float32" if current().fp32_weights and parameter.is_floating_point() else dtype_of(parameter)


def _bytes(value: Any, dtype: str) -> Any:
    import torch

    return value.detach().cpu().to(getattr(torch, dtype)).contiguous().flatten().view(torch.uint8).numpy()

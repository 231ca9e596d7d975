"""`patch(export=...)`: write the trained weights, ready to use, into the checkpoint of each save."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.adapters import Adapter
from ..checkpoint.format.safetensors import write_file
from ..common.errors import CheckpointError
from ..core.base import frozen, to_leave_out
from ..engine.gathering import gathered
from ..engine.origins import origins
from ..engine.owner import is_first
from ..manifest import adapters_of
from ..parameters import Contents, dtype_of, plain, shape_of
from ..publish.durable import write_beside
from ..settings import current
from .running import Save

FILE, FOLDER = "trainable.safetensors", "adapter"
"""What is created in the directory of a checkpoint: the file for "safetensors", the folder for "peft"."""


def write(save: Save) -> None:
    """Write what `patch(export=...)` requests into the checkpoint, if a rank can have all weights."""
    if save.served.topology.is_divided:
        save.served.warn_once(
            "patch(export=...) has no effect on this engine: with experts of deepspeed.moe or tensor parallelism, no"
            " rank has all weights."
        )
    else:
        _write_all(save, save.place.export)


def _write_all(save: Save, folder: Path) -> None:
    """Write what `patch(export=...)` requests, from the weights in memory; every rank must call it.

    Rank 0 gathers and writes one parameter after another, so memory does not grow with their number. A write error is
    kept in `save.failures`: every rank first takes part in all gathers.

    Args:
        save: the save.
        folder: where the checkpoint is being written.
    """
    engine = save.engine
    all_names = save.contents.names
    origin_of = origins(engine.module) if save.left_out is None else {}
    left_out_now = to_leave_out(engine, save.contents, origin_of) if save.left_out is None else save.left_out
    base = {entry.name for entry in left_out_now}
    chosen = {
        names[0]: parameter for parameter, names in all_names.items() if parameter.requires_grad or names[0] not in base
    }
    if current().export == "safetensors":
        left_out = {name for entry in frozen(save.contents) for name in entry.names}
        persistent = _persistent_buffers(save.contents, remove_duplicate=True)
        buffers = {name: buffer for name, buffer in persistent.items() if name not in left_out}
        _write(save, folder / FILE, chosen, buffers)
    elif (adapter := _trained_adapter(save)) is not None:
        parameters = {name: parameter for parameter, names in all_names.items() for name in names}
        buffers = _persistent_buffers(save.contents, remove_duplicate=False)
        adapters = adapters_of(engine.module)[adapter.module]
        aliases = [name for names in all_names.values() for name in names[1:]]
        others = [names[0] for names in all_names.values() if names[0] not in chosen]
        members = adapter.members(chosen, aliases, (*others, *buffers), adapters)
        adapter_parameters = {n: parameters[member] for n, member in sorted(members.items()) if member in parameters}
        adapter_buffers = {name: buffers[member] for name, member in members.items() if member in buffers}
        file = folder / FOLDER / "adapter_model.safetensors"
        _write(save, file, adapter_parameters, adapter_buffers, adapter.config_json)


def _persistent_buffers(contents: Contents, remove_duplicate: bool) -> dict[str, Any]:
    """The buffers that are in the module's state dict, by name."""
    named = contents.module.named_buffers(remove_duplicate=remove_duplicate)
    return {plain(name): buffer for name, buffer in named if plain(name) in contents.state}


def _trained_adapter(save: Save) -> Adapter | None:
    """The only PEFT adapter that the module trains; None, with a warning, if there is not one that can be exported."""
    all_adapters = [
        Adapter(module, name, json.loads(config))
        for module, adapters in adapters_of(save.engine.module).items()
        for name, config in adapters.items()
    ]
    trained = [name for name, parameter in save.contents.parameters.items() if parameter.requires_grad]
    trained_adapters = [adapter for adapter in all_adapters if any(map(adapter.owns, trained))]
    if len(trained_adapters) != 1:
        save.served.warn_once(
            f'patch(export="peft") writes no adapter: the module trains {len(trained_adapters)} PEFT adapters, not one.'
        )
        return None
    try:
        trained_adapters[0].check_exportable()
    except CheckpointError as error:
        save.served.warn_once(f'patch(export="peft") writes no adapter. {error}')
        return None
    return trained_adapters[0]


def _write(
    save: Save, file: Path, parameters: dict[str, Any], buffers: dict[str, Any], config: str | None = None
) -> None:
    """Write parameters and buffers to a safetensors file, and `config` to the `adapter_config.json` beside it."""
    tensors = {name: (dtype_of(parameter), shape_of(parameter)) for name, parameter in parameters.items()}
    tensors |= {name: (dtype_of(buffer), tuple(buffer.shape)) for name, buffer in buffers.items()}
    values = _gather_values(parameters, buffers, is_first(save.owner))
    if is_first(save.owner) and not save.failures.errors:
        with save.failures.deferred(save.place.final(file)):
            if config is not None and file.parent.is_symlink():  # the checkpoint's own directory may be a link
                raise CheckpointError(f"{file.parent} is a link, and saves do not write through links. Remove it.")
            contents = (_to_bytes(value, tensors[name][0]) for name, value in values)
            with write_beside(file, replace=True, sync=save.place.sync) as hidden:
                write_file(hidden, tensors, contents, {})
            if config is not None:
                config_file = file.with_name("adapter_config.json")
                with write_beside(config_file, replace=True, sync=save.place.sync) as hidden:
                    hidden.write_text(config, encoding="utf-8")
    for _ in values:
        pass  # the other ranks gather all parameters, even if rank 0 can no longer write


def _gather_values(
    parameters: Mapping[str, Any], buffers: Mapping[str, Any], on_this_rank: bool
) -> Iterator[tuple[str, Any]]:
    yield from gathered(parameters, on_this_rank)
    yield from buffers.items()


def _to_bytes(value: Any, dtype: str) -> memoryview:
    import torch

    converted = value.detach().cpu().to(getattr(torch, dtype)).contiguous().flatten()
    return memoryview(converted.view(torch.uint8).numpy())

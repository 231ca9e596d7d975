"""`patch(export=...)`: what was trained, ready to be used, beside the checkpoint of each save."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..checkpoint.format.safetensors import write_header
from ..checkpoint.tools.export import Adapter
from ..common.errors import CheckpointError
from ..engine.attached import Attached
from ..engine.frozen import frozen
from ..engine.gathering import gathered
from ..engine.owner import is_first
from ..manifest import adapters_of
from ..parameters import dtype_of, names_by_parameter, parameters_by_name, plain, shape_of
from ..settings import current
from .save import Save

FILE, FOLDER = "trainable.safetensors", "adapter"
"""What is made inside a checkpoint's directory: for "safetensors" the file, for "peft" the folder."""


def write(save: Save, folder: Path) -> None:
    """Write what `patch(export=...)` asks for, from the weights in memory; every rank must call it.

    One parameter after another is gathered and written by rank 0, so that memory does not grow with them. What
    cannot be written is kept in `save.failed`: all ranks do their part first.
    """
    engine = save.engine
    all_names = names_by_parameter(engine.module)
    chosen = {
        names[0]: parameter
        for parameter, names in all_names.items()
        if parameter.requires_grad or current().keeps(names)
    }
    if current().export == "safetensors":
        left_out = {name for one in frozen(engine.module) for name in one.names}
        saved = _saved_buffers(engine.module, remove_duplicate=True)
        buffers = {name: buffer for name, buffer in saved.items() if name not in left_out}
        _write(save, folder / FILE, chosen, buffers)
    elif (adapter := _adapter(engine, save.attached)) is not None:
        parameters = {name: parameter for parameter, names in all_names.items() for name in names}
        buffers = _saved_buffers(engine.module, remove_duplicate=False)
        adapters = adapters_of(engine.module)[adapter.module]
        aliases = [name for names in all_names.values() for name in names[1:]]
        others = [names[0] for names in all_names.values() if names[0] not in chosen]
        members = adapter.members(chosen, aliases, (*others, *buffers), adapters)
        own = {name: parameters[own] for name, own in sorted(members.items()) if own in parameters}
        beside = {name: buffers[own] for name, own in members.items() if own in buffers}
        _write(save, folder / FOLDER / "adapter_model.safetensors", own, beside, adapter.write_config)


def _saved_buffers(module: Any, remove_duplicate: bool) -> dict[str, Any]:
    """The buffers that are in the module's state dict, by name."""
    saved = {plain(name) for name in module.state_dict()}
    named = module.named_buffers(remove_duplicate=remove_duplicate)
    return {plain(name): buffer for name, buffer in named if plain(name) in saved}


def _adapter(engine: Any, attached: Attached) -> Adapter | None:
    known = [
        Adapter(module, name, json.loads(config))
        for module, adapters in adapters_of(engine.module).items()
        for name, config in adapters.items()
    ]
    trained = [name for name, parameter in parameters_by_name(engine.module).items() if parameter.requires_grad]
    found = [adapter for adapter in known if any(map(adapter.owns, trained))]
    if len(found) != 1:
        attached.warn_once(
            f'patch(export="peft") exports nothing: the module trains {len(found)} PEFT adapters, not one.'
        )
        return None
    try:
        found[0].check()
    except CheckpointError as error:
        attached.warn_once(f'patch(export="peft") exports nothing. {error}')
        return None
    return found[0]


def _write(
    save: Save,
    file: Path,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    write_beside: Callable[[Path], None] | None = None,
) -> None:
    partial = file.with_name(f".{file.name}.partial")
    entries = [(name, _dtype(p), shape_of(p)) for name, p in parameters.items()]
    entries += [(name, dtype_of(buffer), tuple(buffer.shape)) for name, buffer in buffers.items()]
    writes = is_first(save.owner)
    made: list[Path] = []
    opened: list[IO[bytes]] = []

    def attempt(write: Callable[..., object], *content: Any) -> None:
        # The other ranks wait for rank 0 to gather, even when it can no longer write.
        if writes and not save.failed:
            with save.deferring_errors(file):
                write(*content)

    def begin() -> None:
        if write_beside is not None and file.parent.is_symlink():  # of the checkpoint's directory, it may be one
            raise CheckpointError(f"{file.parent} is a link, through which no save writes. Remove it.")
        _make_folder(partial)
        made.append(partial)
        opened.append((partial / file.name).open("xb"))
        write_header(opened[0], entries, {"format": "pt"})

    def append(value: Any, dtype: str) -> None:
        _append(opened[0], value, dtype)

    def end() -> None:
        opened[0].flush()
        if save.sync:
            os.fsync(opened[0].fileno())
        if write_beside is not None:
            write_beside(partial)
        for item in partial.iterdir():
            item.replace(file.with_name(item.name))

    attempt(begin)
    for name, value in gathered(parameters, writes):
        attempt(append, value, _dtype(parameters[name]))
    for value in buffers.values():
        attempt(append, value, dtype_of(value))
    attempt(end)
    for out in opened:
        with suppress(OSError):
            out.close()
    for left in made:
        shutil.rmtree(left, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    """Make a folder to write to, in place of what has its name: it may be of a save that was killed, or a link."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    folder.mkdir()


def _append(out: IO[bytes], value: Any, dtype: str) -> None:
    import torch

    content = value.detach().cpu().to(getattr(torch, dtype)).contiguous().flatten().view(torch.uint8).numpy()
    out.write(content)


def _dtype(parameter: Any) -> str:
    return "float32" if current().fp32_weights and parameter.is_floating_point() else dtype_of(parameter)

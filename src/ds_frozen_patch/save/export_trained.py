"""`patch(export=...)`: the export tool, run on the files of a save just before the checkpoint gets its name.

So an export and its checkpoint appear together, or neither does.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_FILE, Adapter
from ..checkpoint.zero.opening import Checkpoint, open_checkpoint
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.owner import is_first
from ..manifest import Manifest, adapters_of
from ..publish.durable import write_beside
from .running import Save
from .writing import writes_before_it_returns

if TYPE_CHECKING:
    from ..tools.export import ExportPlan

FILE, FOLDER = "trainable.safetensors", "adapter"
"""What is created in the directory of a checkpoint: the file for "safetensors", the folder for "peft"."""
_TENSORS, _CONFIG = f"{FOLDER}/{ADAPTER_FILE}", f"{FOLDER}/{ADAPTER_CONFIG}"


def write(save: Save, export: str) -> None:
    """Export the trained weights on rank 0, once all ranks have written their files; errors are recorded."""
    if not is_first(save.owner):
        return
    with save.failures.deferred(save.place.shown):
        try:
            plan = _plan(save, export)
        except (CheckpointError, CheckpointMismatchError) as error:
            _skip(save, str(error))
        else:
            _write(save, plan)


def _plan(save: Save, export: str) -> ExportPlan:
    """What to export; raises CheckpointError if that is not possible for this checkpoint."""
    from ..tools.export import plan_export

    place, topology = save.place, save.served.topology
    if topology.is_divided:
        raise CheckpointError("With experts of deepspeed.moe or tensor parallelism, no file has all weights.")
    if not writes_before_it_returns(save.engine):
        writer = type(save.engine.checkpoint_engine).__name__
        raise CheckpointError(f"{writer} writes its files later. Run ds-frozen-patch export once they are there.")
    root, tag = place.destination.parent, place.destination.name
    checkpoint = open_checkpoint(root, tag, trainable=(), trust=True, is_being_saved=True)
    manifest = checkpoint.states.manifest
    if manifest is None:  # a full checkpoint does not list the adapters
        manifest = Manifest((), 0, topology.stage, topology.ranks, {}, adapters_of(save.engine.module))
    adapter = _trained_adapter(checkpoint, manifest) if export == "peft" else None
    return plan_export(checkpoint, export, manifest, adapter=adapter)


def _trained_adapter(checkpoint: Checkpoint, manifest: Manifest) -> str:
    """The name of the only PEFT adapter that the run trains; raises CheckpointError if there is not exactly one."""
    adapters = [Adapter(module, name, None) for module, configs in manifest.adapters.items() for name in configs]
    trained = [adapter.name for adapter in adapters if any(map(adapter.owns, checkpoint.weights.trained))]
    if len(trained) != 1:
        raise CheckpointError(f"The module trains {len(trained)} PEFT adapters, not one.")
    return trained[0]


def _write(save: Save, plan: ExportPlan) -> None:
    place = save.place
    file = place.export / (FILE if plan.adapter is None else _TENSORS)
    with save.failures.deferred(place.final(file)):
        if plan.adapter is not None and file.parent.is_symlink():  # the checkpoint's own directory may be a link
            raise CheckpointError(f"{file.parent} is a link, and saves do not write through links. Remove it.")
        with write_beside(file, replace=True, sync=place.sync) as hidden:
            plan.write(hidden)
        if plan.adapter is not None:
            with write_beside(place.export / _CONFIG, replace=True, sync=place.sync) as hidden:
                hidden.write_text(plan.adapter.config_json, encoding="utf-8")


def _skip(save: Save, why: str) -> None:
    """Say once why nothing is exported, and remove what an earlier save has exported to the same place."""
    place = save.place
    why = why.replace(str(place.destination.parent), str(place.shown))
    save.served.log_once("no export", f"patch(export={save.export!r}) has no effect on {place.shown}: {why}")
    folder = place.folder if place.is_alone else place.target
    for name in (FILE,) if save.export == "safetensors" else (_TENSORS, _CONFIG):
        with suppress(OSError):
            if not (folder / name).parent.is_symlink() or name == FILE:
                (folder / name).unlink()

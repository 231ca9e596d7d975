"""`patch(export=...)`: the export tool, run on the files of a save just before the checkpoint gets its name.

So an export and its checkpoint appear together, or neither does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.adapters import Adapter
from ..checkpoint.zero.opening import Checkpoint, open_checkpoint
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.files import EXPORTS
from ..engine.served import is_first
from ..internals import checkpoint_engine, writes_before_it_returns
from ..publish.durable import make_folder, sync_file
from ..publish.journal import linked
from .running import Save

if TYPE_CHECKING:
    from ..tools.export import ExportPlan

_FILE, _TENSORS, _CONFIG = EXPORTS


def write(save: Save, export: str) -> None:
    """Export the trained weights on rank 0, once all ranks have written their files; errors are recorded."""
    if not is_first(save.owner):
        return
    with save.ranks.deferred(save.place.shown):
        place = save.place
        with linked(place.written(), place.target.name) as root:
            try:
                plan = _plan(save, export, root)
            except (CheckpointError, CheckpointMismatchError) as error:
                _skip(save, str(error).replace(str(root), str(place.shown)))
            else:
                _write(save, plan)


def _plan(save: Save, export: str, root: Path) -> ExportPlan:
    """What to export of the files that a folder has; raises CheckpointError if that is not possible."""
    from ..tools.export import plan_export

    topology = save.served.topology
    if topology.is_divided:
        raise CheckpointError("With experts of deepspeed.moe or tensor parallelism, no file has all weights.")
    if not writes_before_it_returns(save.engine):
        writer = type(checkpoint_engine(save.engine)).__name__
        raise CheckpointError(f"{writer} writes its files later. Run ds-frozen-patch export once they are there.")
    checkpoint = open_checkpoint(root, trainable=(), record=save.record)
    return plan_export(checkpoint, export, adapter=_trained_adapter(checkpoint) if export == "peft" else None)


def _trained_adapter(checkpoint: Checkpoint) -> str:
    """The name of the only PEFT adapter that the run trains; raises CheckpointError if there is not exactly one."""
    recorded = checkpoint.states.record.adapters
    adapters = [Adapter(module, name, None) for module, configs in recorded.items() for name in configs]
    trained = [adapter.name for adapter in adapters if any(map(adapter.owns, checkpoint.weights.trained))]
    if len(trained) != 1:
        raise CheckpointError(f"The module trains {len(trained)} PEFT adapters, not one.")
    return trained[0]


def _write(save: Save, plan: ExportPlan) -> None:
    place, name = save.place, _FILE if plan.adapter is None else _TENSORS
    file = place.export(name)
    with save.ranks.deferred(place.final(file)):
        if plan.adapter is not None and file.parent.is_symlink():  # the checkpoint's own directory may be a link
            raise CheckpointError(f"{file.parent} is a link, and saves do not write through links. Remove it.")
        make_folder(file.parent, place.sync)
        plan.write(file)
        written = {name: file}
        if plan.adapter is not None:
            written[_CONFIG] = place.export(_CONFIG)
            written[_CONFIG].write_text(plan.adapter.config_json, encoding="utf-8")
        for item in written.values() if place.sync else ():
            sync_file(item)
        place.exports.update(dict.fromkeys(written, True))


def _skip(save: Save, why: str) -> None:
    """Say once why nothing is exported, and let what an earlier save has exported to the same place be removed."""
    place = save.place
    save.served.log_once("no export", f"patch(export={save.export!r}) has no effect on {place.shown}: {why}")
    for name in (_FILE,) if save.export == "safetensors" else (_TENSORS, _CONFIG):
        if name == _FILE or not place.export(name).parent.is_symlink():
            place.exports[name] = False
            if not place.is_managed:
                place.export(name).unlink(missing_ok=True)

"""The end of a save: its files get their names, on every disk or on none; at once, or while training continues.

In the latter case a thread writes the files too. Training uses the process group meanwhile, so the ranks meet in its
store.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from ..common.errors import CheckpointError
from ..publish import in_flight
from ..ranks import Store, default_store, digest, world_size
from ..record import File, listing
from . import export_trained
from .running import Save
from .writer import Recorder

_FOUR = struct.Struct("<4q")
_WIDTH = 12
"""The integers that describe two files. As a rule a rank writes no more."""


def publish(save: Save) -> None:
    """Give the files of a save their names; every rank must call it, once it has written its own.

    Raises:
        CheckpointError: on every rank, if one has recorded an error.
    """
    everyone = save.ranks.step("write its files", partial(_packed, save), _WIDTH)
    if save.publishes:
        written = _unpacked(everyone)
        with save.ranks.deferred():
            if save.export is not None:
                export_trained.write(save, save.export)
            if not save.ranks.errors:
                save.place.prepare(_record(save, written))
    if save.place.is_on_own_disks:  # what is prepared on all can be finished by a load
        save.ranks.step("prepare its files")
        save.place.is_decided = True
    save.ranks.step("name its files", save.place.give_names if save.publishes else None)
    if save.place.upload is not None:
        save.place.upload.release()


def _record(save: Save, written: Mapping[int, File]) -> str | None:
    """The content of the record, for all files on this rank's disk."""
    if not save.place.is_tag:
        return None
    files = save.place.written()
    lost = save.written.keys() - {*files.values()}
    if lost or (save.is_in_one_place and not written.keys() <= {digest(name) for name in files}):
        raise CheckpointError(f"another program has removed files from {save.place.target} during the save")
    return None if save.record is None else listing(save.record, files, written)


def _packed(save: Save) -> list[int]:
    """The first two files that this rank has written, as integers."""
    if save.place.upload is not None:
        save.place.upload.deliver()
    numbers: list[int] = []
    for path, file in [*save.written.items()][:2]:
        name = save.place.final(path).name
        numbers += [digest(name), file.size, *_FOUR.unpack(bytes.fromhex(file.directory or "0" * 64))]
    return numbers


def _unpacked(everyone: Iterable[Sequence[int]]) -> dict[int, File]:
    """What the ranks have written, by the digests of the names, but for those for which ranks differ.

    They do so on disks of their own.
    """
    written: dict[int, File | None] = {}
    for name, size, *parts in (numbers[begin : begin + 6] for numbers in everyone for begin in (0, 6)):
        file = File(size, _FOUR.pack(*parts).hex() if any(parts) else None)
        if written.setdefault(name, file) != file:
            written[name] = None
    return {name: file for name, file in written.items() if name and file is not None}


# Asynchronous saves


def prepare_to_record(save: Save) -> None:
    """Let a save record its files in place of writing them, if that is possible."""
    if save.place.is_managed and (default_store() is not None or world_size() == 1):
        save.served.recorder = save.recorder = save.served.recorder or Recorder()
        save.recorder.begin()


def start(save: Save) -> None:
    """Write what was recorded, and publish it, while training continues; every rank must call it.

    If not a framework's own training has asked for the save, this waits: whoever has may read it in the next line.
    """
    save.ranks.step("copy what it saves")
    save.place.use_absolute_paths()  # the program may change its current folder
    if (store := default_store()) is not None:
        save.ranks.store = Store(store, f"save/{save.place.id}", is_ending=in_flight.is_ending.is_set)
    in_flight.start(partial(_write_and_publish, save), save.served.log_once)
    if (reader := asker()) is not None:
        in_flight.wait_for(reader)


def _write_and_publish(save: Save) -> CheckpointError | None:
    """Return what every rank is to raise."""
    store, error = save.ranks.store, None
    try:
        with store.beating() if store is not None else nullcontext():
            if save.recorder is not None:
                with save.ranks.deferred(save.place.shown):
                    save.recorder.write(save.place.sync, save.note)
            try:
                publish(save)
            except CheckpointError as failed:
                error = failed
            if store is not None:
                store.leave()
    except Exception as lost:  # of the store, or a rank is gone
        state, _ = save.place.state_of_target()
        return CheckpointError(f"Not every rank has confirmed that {save.place.shown} was saved ({lost}). {state}")
    return error


_FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "trl")
_PASSED = (*_FRAMEWORKS, "contextlib", "ds_frozen_patch", "lightning_utilities", "torch", "wrapt")
"""The packages whose functions do not look at a checkpoint that they have just saved."""
_TRAIN = ("fit", "train")


def asker() -> str | None:
    """The function of somebody else that has asked for the save which runs; None if a framework's own training has.

    Between the save and `Trainer.fit`, or Trainer's `train`, the call stack has functions of frameworks alone, unless a
    callback, an override or a program saves by itself.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if module.partition(".")[0] not in _PASSED:
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"  # which Python 3.10 does not have
        if code.co_name in _TRAIN:
            return None
        frame = frame.f_back
    return None

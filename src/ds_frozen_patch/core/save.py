"""One save of an engine, to be read from top to bottom.

1. The ranks agree on what is saved, and where to, in one collective. If their requests differ, all of them raise.
2. The record describes the base that is left out. What training has changed is no base, and is saved.
3. DeepSpeed writes its files, without the base, under hidden names in the folder that the program has named. Each rank
   syncs its own files. An error is recorded, since the other ranks wait in a collective.
4. The ranks agree that all is written. If one has recorded an error, all raise it, and nothing has changed.
5. One rank of each disk adds the record and gives the files their names, `latest` last. Then the ranks agree again.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import cures
from ..base import Base
from ..common.errors import CheckpointError
from ..common.files import SCRATCH
from ..common.overrides import Attributes, overridden
from ..engine.served import ServedEngine, attached_at_save, is_first
from ..internals import checkpoint_engine, config_of, writes_before_it_returns
from ..parameters import plain
from ..publish import in_flight
from ..publish.publication import Publication, is_local
from ..save import agreement, contents, export_trained, publishing
from ..save.agreement import SaveRanks
from ..save.running import Save, place_of
from ..save.writing import warn_of_late_writes, writing
from ..settings import FLAG
from ..settings import current as settings


def save_checkpoint(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.save_checkpoint`, which every framework calls."""
    served = attached_at_save(engine, kwargs)
    if served is None:
        return wrapped(*args, **kwargs)
    cures.check_optimizer(engine)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    tag = call.arguments.get("tag")
    tag = call.arguments["tag"] = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed does
    exclude = call.arguments[FLAG] = served.owner.excludes(call.arguments.get(FLAG))
    folder, program_state = Path(call.arguments["save_dir"]), call.arguments.get("client_state") or {}
    if not is_local(address := SCRATCH.sub(r"\2", str(folder))):  # perhaps in the scratch folder of a framework
        folder = _folder_for(address, engine)
    shown = folder if served.owner.names_each_save else folder / tag
    with agreement.explaining_errors(shown) as saves:
        is_managed = writes_before_it_returns(engine)
        place = place_of(engine, served, folder / tag, shown, is_managed, folder)
        what = "a checkpoint" if place.upload is None else "a checkpoint in a bucket"
        save = begin(engine, served, place, what, exclude)
        saves.append(save)
        if settings().async_save:
            publishing.prepare_to_record(save)
        try:
            record = save.record = contents.describe(save)
            call.arguments["client_state"] = contents.extended(program_state, save, record)
            save.export = settings().export
            state_dict = partial(_module_state_dict, engine.module_state_dict, save)
            changes: Attributes = [(engine, "module_state_dict", state_dict)]
            if not isinstance(engine.config, Mapping):  # but the path of a file, which DeepSpeed would save
                changes.append((engine, "config", config_of(engine)))
            with overridden(changes):
                saved = _write(wrapped, call, save)
            if exclude:
                contents.log_once(save, record, program_state)
        except BaseException:
            save.discard()
            raise
        if save.recorder is not None:
            publishing.start(save)
        elif place.is_managed:
            publishing.publish(save)
        else:
            save.ranks.step("write its files")
            if save.export is not None:
                save.ranks.step("export", partial(export_trained.write, save, save.export))
    return saved


def _folder_for(address: str, engine: Any) -> Path:
    """The folder on this machine that an engine writes to, given an address.

    Raises:
        CheckpointError: the engine writes after a save has returned, or has its optimizer on NVMe.
    """
    from ..buckets import scratch_of

    if not writes_before_it_returns(engine):
        raise CheckpointError(
            f"{address} cannot be saved. DeepSpeed's {type(checkpoint_engine(engine)).__name__} writes after a save"
            " has returned. Use DeepSpeed's default checkpoint engine to save to a bucket."
        )
    if cures.keeps_optimizer_on_nvme(engine):
        raise CheckpointError(f"{address} cannot be saved: a bucket cannot have optimizer states on NVMe.")
    return scratch_of(address)


def begin(engine: Any, served: ServedEngine, place: Publication, what: str, exclude: bool) -> Save:
    """Let the ranks agree on a save, and prepare where it is written; every rank must call it.

    Args:
        engine, served: what is saved.
        place: where it is written.
        what: the kind of save, as messages name it.
        exclude: whether frozen parameters are left out.

    Raises:
        CheckpointError: on every rank, if the save before was still in flight, and has failed.
        CheckpointMismatchError: on every rank, if the ranks differ in what they save.
    """
    in_flight.wait()
    save = Save(engine, served, place)
    save.ranks = SaveRanks(save.owner.device, place.shown, save.clean_up)
    save.note = save.written.__setitem__ if place.upload is None else partial(place.upload.note, save.written)
    with save.ranks.deferred(place.shown):  # the other ranks wait in the agreement
        if place.upload is not None:
            place.upload.begin()
        save.base = Base(engine, save.contents).compared(served) if exclude else None
    if place.is_managed and is_first(save.owner):
        save.open()
    try:
        agreement.agree_on_request(save, what, exclude)
    except BaseException:
        save.discard()
        raise
    if place.is_managed and save.opens_disk and save.is_on_own_disk():
        save.open()
    if (base := save.base) is not None and (base.changed or not (base.is_known and base.is_agreed)):
        contents.settle(save, base)
    return save


def _write(wrapped: Callable[..., Any], call: inspect.BoundArguments, save: Save) -> Any:
    """Let DeepSpeed write all of its files, but for `latest`."""
    if not writes_before_it_returns(save.engine):
        warn_of_late_writes(save)
        return wrapped(*call.args, **call.kwargs)
    if save.place.is_managed:
        call.apply_defaults()
        save.place.latest = call.arguments["tag"] if call.arguments["save_latest"] else None
        call.arguments["save_latest"] = False  # DeepSpeed writes it in a way whose errors cannot be deferred
        target, folder = save.place.target, save.place.folder
        if Path(call.arguments["save_dir"], call.arguments["tag"]) != target:  # rank 0's, if the ranks differ
            call.arguments.update(save_dir=str(folder), tag=str(target.relative_to(folder)))
    with writing(save):
        return wrapped(*call.args, **call.kwargs)


def _module_state_dict(original: Callable[..., Any], save: Save, *args: Any, **kwargs: Any) -> Any:
    """`DeepSpeedEngine.module_state_dict` in a save: leaves out the base, each of its parameters under all names.

    DeepSpeed's own exclusion walks `named_parameters()`, which gives a tied parameter only once, and
    before 0.12.3 it raises KeyError for a module whose `state_dict` gives a subset.
    """
    record = save.record
    is_here = threading.get_ident() == save.thread  # another thread may copy the weights meanwhile
    if not is_here or record is None or not record.is_trainable_only:
        return original(*args, **kwargs)
    state, left_out = original(*args, **{**kwargs, FLAG: False}), record.names
    for name in [name for name in state if plain(name) in left_out]:
        save.removed.add(plain(name))
        del state[name]
    return state

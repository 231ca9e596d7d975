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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .. import cures
from ..base import Base
from ..common.overrides import overridden
from ..engine.served import ServedEngine, attached_at_save, is_first
from ..internals import writes_before_it_returns
from ..parameters import plain
from ..publish import in_flight
from ..publish.publication import is_local
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
    call.arguments["tag"] = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed does
    exclude = call.arguments[FLAG] = served.owner.excludes(call.arguments.get(FLAG))
    with saving(engine, served, Path(call.arguments["save_dir"]), call.arguments["tag"], exclude) as save:
        record = save.record = contents.describe(save)
        program_state = call.arguments.get("client_state") or {}
        if exclude:
            save.names_left_out = record.names
        call.arguments["client_state"] = contents.extended(program_state, save, record)
        save.export = settings().export
        with cures.saving(engine):
            saved = _write(wrapped, call, save)
        if exclude:
            contents.log_once(save, record, program_state)
        return saved


@contextmanager
def saving(engine: Any, served: ServedEngine, folder: Path, tag: str, exclude: bool) -> Iterator[Save]:
    """Save an engine by what is called meanwhile; every rank must enter it.

    What is written is at its `target` afterwards: on every disk, or on none.
    """
    target = folder / tag
    shown = folder if served.owner.names_each_save else target
    with agreement.explaining_errors(shown) as saves:
        is_managed = is_local(target) and writes_before_it_returns(engine)
        save = begin(engine, served, target, "a checkpoint", exclude, shown=shown, folder=folder, is_managed=is_managed)
        saves.append(save)
        if settings().async_save:
            publishing.prepare_to_record(save)
        try:
            state_dict = partial(_module_state_dict, engine.module_state_dict, save)
            with overridden([(engine, "module_state_dict", state_dict)]):
                yield save
        except BaseException:
            save.discard()
            raise
        if save.recorder is not None:
            publishing.start(save)
        elif save.place.is_managed:
            publishing.publish(save)
        else:
            save.ranks.step("write its files")
            if save.export is not None:
                save.ranks.step("export", partial(export_trained.write, save, save.export))


def begin(
    engine: Any,
    served: ServedEngine,
    path: Path,
    what: str,
    exclude: bool,
    *,
    shown: Path,
    folder: Path | None = None,
    is_managed: bool = True,
) -> Save:
    """Let the ranks agree on a save, and prepare where it is written; every rank must call it.

    Args:
        engine, served: what is saved.
        path: of the folder of the tag, or of a file.
        what: the kind of save, as messages name it.
        exclude: whether frozen parameters are left out.
        shown: what messages name.
        folder: that the program has named, if the path is one of a tag.
        is_managed: whether we give the files their names; else whoever writes them does.

    Raises:
        CheckpointError: on every rank, if the save before was still in flight, and has failed.
        CheckpointMismatchError: on every rank, if the ranks differ in what they save.
    """
    in_flight.wait()
    save = Save(engine, served, place_of(engine, served, path, folder, shown, is_managed))
    save.ranks = SaveRanks(save.owner.device, shown, save.clean_up)
    with save.ranks.deferred(shown):  # the other ranks wait in the agreement
        save.base = Base(engine, save.contents).compared(served) if exclude else None
    if is_managed and is_first(save.owner):
        save.open()
    try:
        agreement.agree_on_request(save, what, exclude)
    except BaseException:
        save.discard()
        raise
    if is_managed and save.opens_disk and save.is_on_own_disk():
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
    left_out = save.names_left_out
    if left_out is None or threading.get_ident() != save.thread:  # another thread may copy the weights meanwhile
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments[FLAG] = False
    state = original(*call.args, **call.kwargs)
    for name in [name for name in state if plain(name) in left_out]:
        save.removed.add(plain(name))
        del state[name]
    return state

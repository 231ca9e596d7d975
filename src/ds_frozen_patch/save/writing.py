"""What DeepSpeed writes in a save: each file of states is synced and noted, and errors are deferred."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..common.overrides import Attributes, overridden
from ..internals import checkpoint_engine, experts, with_script_copier, without_agreement
from ..parameters import plain
from ..publish.durable import sync_file
from ..publish.journal import hidden
from ..record import describe_file
from .running import Save
from .writer import in_place_of_torch, opened

if TYPE_CHECKING:
    import torch


def writing(save: Save) -> AbstractContextManager[None]:
    """While this lasts, DeepSpeed writes for a save, and continues if it cannot write a file or create a folder."""
    writer, is_divided = checkpoint_engine(save.engine), save.served.topology.is_divided
    left_out = _left_out_of_experts(save.engine.module, save.record.names) if is_divided and save.record else {}
    attributes: Attributes = [(writer, "save", partial(_write_states, save, left_out, writer.save))]
    has_folder = save.place.is_managed and save.is_in_one_place  # which rank 0 has made
    if has_folder:
        attributes += without_agreement(save.engine)  # the ranks have agreed, and agree again at the end
    if hasattr(writer, "makedirs"):
        # A late rank could make the folder again after another one has removed it on an error.
        make = (lambda *_, **__: None) if has_folder else save.ranks.deferring(writer.makedirs)
        attributes.append((writer, "makedirs", make))
    deferring = save.ranks.deferring
    attributes += with_script_copier(save.engine, lambda copy: deferring(partial(_copy_script, save, copy)))
    return overridden(attributes)


def _left_out_of_experts(module: torch.nn.Module, left_out: Collection[str]) -> dict[str, str]:
    """For each left-out parameter of this rank's experts: its plain name in the module, by its plain name in a file."""
    names = (
        (plain(f"{in_file}{name}"), plain(f"{here}{name}"))
        for in_file, here, expert in experts(module)
        for name in expert.state_dict(keep_vars=True)
    )
    return {in_file: here for in_file, here in names if here in left_out}


def _copy_script(save: Save, copy: Callable[[str], None], folder: str) -> None:
    """Let DeepSpeed copy its converter to a folder, where half of one must not take the place of the previous one."""
    if not any(Path(folder).glob("zero_to_*")):
        copy(folder)
        for script in Path(folder).glob("zero_to_*") if save.place.sync else ():
            sync_file(script)
        return
    with TemporaryDirectory() as elsewhere:
        copy(elsewhere)
        for script in Path(elsewhere).iterdir():
            target = Path(folder, script.name)
            if target.is_file() and target.read_bytes() == script.read_bytes():
                continue
            new = hidden(target, save.place.id)
            try:
                shutil.copy(script, target if save.place.in_place else new)
            except PermissionError:  # a file that is there may be written all the same
                copy(folder)
            if new.is_file():
                if save.place.sync:
                    sync_file(new)
                new.replace(target)


def _write_states(
    save: Save,
    left_out: Mapping[str, str],
    write: Callable[..., Any],
    state_dict: dict[str, Any],
    path: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write a file of states as DeepSpeed's `write` does, without what is left out; an error is recorded."""
    file = save.place.path(Path(path).name) if Path(path).parent == save.place.target else Path(path)
    at_once = partial(opened, sync=save.place.sync, note=save.note)
    open_file = at_once if save.recorder is None else save.recorder.opened
    with save.ranks.deferred(path), in_place_of_torch(file.parent, open_file):
        if left_out:  # of an expert's file, whose keys are parameters
            removed = {key: left_out[plain(key)] for key in state_dict if plain(key) in left_out}
            save.removed.update(removed.values())
            state_dict = {key: value for key, value in state_dict.items() if key not in removed}
        write(state_dict, str(file), *args, **kwargs)
        if file not in save.written and file.is_file():  # torch, or another, has written it
            if save.place.sync:
                sync_file(file)
            save.note(file, describe_file(file))


def warn_of_late_writes(save: Save) -> None:
    """Say once what can happen to a save whose files DeepSpeed writes later."""
    save.served.log_once(
        "an engine that writes later",
        f"DeepSpeed's {type(checkpoint_engine(save.engine)).__name__} writes after a save has returned. A save to"
        f" {save.place.folder} that is killed or fails leaves an incomplete checkpoint. Use DeepSpeed's default"
        " checkpoint engine to prevent that.",
    )

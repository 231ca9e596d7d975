"""What DeepSpeed writes in a save: each file of states is synced and noted, and errors are deferred."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..common.files import is_rank_file
from ..common.overrides import Attributes, overridden
from ..internals import checkpoint_engine, experts, with_script_copier, without_agreement
from ..parameters import plain
from ..publish.durable import sync_file
from ..publish.journal import hidden
from ..record import File, describe_file
from .running import Save
from .writer import in_place_of_torch, opened

if TYPE_CHECKING:
    import torch


def writing(save: Save) -> AbstractContextManager[None]:
    """While this lasts, DeepSpeed writes for a save, and goes on if it cannot write a file or create a folder."""
    writer = checkpoint_engine(save.engine)
    is_divided = save.served.topology.is_divided
    names = _names_of_experts(save.engine.module) if is_divided and save.names_left_out else {}
    attributes: Attributes = [(writer, "save", _writing_states(save, names, writer.save))]
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


def _names_of_experts(module: torch.nn.Module) -> dict[str, str]:
    """For each parameter of this rank's experts: its plain name in the module, by its plain name in a file."""
    return {
        plain(f"{in_file}{name}"): plain(f"{here}{name}")
        for in_file, here, expert in experts(module)
        for name in expert.state_dict(keep_vars=True)
    }


def _copy_script(save: Save, copy: Callable[[str], None], folder: str) -> None:
    """Let DeepSpeed copy its converter to a folder, where half of one must not take the place of the previous one."""
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


def write_recorded(save: Save) -> None:
    """Write what the recorder of a save has; an error is recorded."""
    assert save.recorder is not None
    with save.ranks.deferred(save.place.shown):
        save.recorder.write(save.place.sync, partial(_note, save))


def _writing_states(save: Save, names_of_experts: Mapping[str, str], write: Callable[..., Any]) -> Callable[..., None]:
    """What writes a file of states in place of DeepSpeed's `write`; errors are recorded."""

    def write_states(state_dict: dict[str, Any], path: str, *args: Any, **kwargs: Any) -> None:
        name = Path(path).name
        file = save.place.path(name) if Path(path).parent == save.place.target else Path(path)
        at_once = partial(opened, sync=save.place.sync, note=partial(_note, save))
        open_file = at_once if save.recorder is None else save.recorder.opened
        with save.ranks.deferred(path), in_place_of_torch(file.parent, open_file):
            if not is_rank_file(name) and (names := save.names_left_out):  # an expert's, whose keys are parameters
                left_out = {key: found for key in state_dict if (found := names_of_experts.get(plain(key))) in names}
                save.removed.update(left_out.values())
                state_dict = {key: value for key, value in state_dict.items() if key not in left_out}
            write(state_dict, str(file), *args, **kwargs)
            if save.place.final(file).name not in save.written and file.is_file():  # torch, or another, has written it
                if save.place.sync:
                    sync_file(file)
                _note(save, file, describe_file(file))

    return write_states


def _note(save: Save, file: Path, description: File) -> None:
    """Note what a file is that this rank has written."""
    save.written[save.place.final(file).name] = description


def warn_of_late_writes(save: Save) -> None:
    """Say once what can happen to a save whose files DeepSpeed writes later."""
    save.served.log_once(
        "an engine that writes later",
        f"DeepSpeed's {type(checkpoint_engine(save.engine)).__name__} writes after a save has returned. A save to"
        f" {save.place.folder} that is killed or fails leaves an incomplete checkpoint. Use DeepSpeed's default"
        " checkpoint engine to prevent that.",
    )

"""The files of a DeepSpeed checkpoint directory.

epoch=5.ckpt/
├── latest                                      the name of the folder that counts: the tag
└── checkpoint/
    ├── mp_rank_00_model_states.pt              ZeRO 0 to 2: one for all ranks
    ├── zero_pp_rank_0_mp_rank_00_model_states.pt    ZeRO-3: one for each rank
    └── zero_pp_rank_0_mp_rank_00_optim_states.pt    from ZeRO 1 on: one for each rank; bf16_zero_... in some
"""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import CheckpointError, named
from ...common.files import MODEL_FILE, OPTIMIZER_FILE, is_state_file, open_regular
from ...publish.in_flight import settle
from ...publish.journal import finish, is_unfinished, journals, linked, names_now
from ...publish.publication import is_local

_UNSUPPORTED = re.compile(r"(?:layer_\d+|expert_\d+|expp_rank_).*_states\.pt")
_PLAIN_TAG = re.compile(r"[\w.-]{1,100}")
_ASK_FOR_TAG = "Pass the name of one as `tag`, or --tag on the command line."


class UnknownLayoutError(CheckpointError):
    """A checkpoint may be intact, but these tools do not support its kind."""


class NothingSavedError(CheckpointError):
    """A directory does not exist, or no checkpoint has been saved to it."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint's files. `model` and `optimizer` are in the order of ranks; stage 0 has no `optimizer` files."""

    root: Path
    tag: str
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files."""
        return (*self.model, *self.optimizer)


def located(path: str | Path, tag: str | None = None) -> Path:
    """A path; for an address, one on this machine, whose files of states are read from the bucket."""
    if is_local(path):
        return Path(path)
    from ...buckets import bring_down, scratch_of

    place = scratch_of(path)
    bring_down(place, tag, lambda *_: ())
    return place


def find_layout(path: str | Path, tag: str | None = None) -> Layout:
    """Find the files of a checkpoint; a save that was killed while it gave them their names is finished.

    Args:
        path: the directory of the checkpoint, which contains `latest`.
        tag: the subdirectory to read; by default the one named in `latest`.

    Raises:
        CheckpointError: there is no checkpoint at the path, or a file of it is missing.
    """
    settle()
    root = Path(path) if is_local(path) else located(path, tag)
    name = latest_tag(root) if tag is None else tag
    if name != Path(name).name or name == ".." or len(name.encode()) > 255 or "\0" in name:
        # What `latest` has is not shown: it may be a link to a file that nobody else may read.
        shown = f"{name[:100]!r} is" if tag is not None else f"What {root / 'latest'} contains is"
        raise CheckpointError(f"{shown} not the name of a subdirectory of {root}. {_ASK_FOR_TAG}")
    folder = finished(root / name)
    try:
        with os.scandir(folder) as entries:
            files = {entry.name: _is_file(entry) for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        tags = sorted(item.name for item in root.iterdir() if item.is_dir()) if root.is_dir() else []
        it_has = f"{named(tags)}. {_ASK_FOR_TAG}" if tags else "none."
        shown = repr(folder.name) if tag is not None or _PLAIN_TAG.fullmatch(folder.name) else "of the name in `latest`"
        raise CheckpointError(f"{root} has no subdirectory {shown}; it has {it_has}") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if is_unfinished(folder):
        raise CheckpointError(
            f"{folder} is not whole: the save that wrote it was interrupted, or still runs. Use another checkpoint; the"
            " next save to this path replaces it."
        )
    states = [name for name in files if name.endswith("_states.pt")]
    if unknown := [name for name in states if _UNSUPPORTED.fullmatch(name)]:
        raise UnknownLayoutError(
            f"{folder} contains {named(unknown, 3)}: it was saved with pipeline parallelism or a mixture of experts,"
            " which these tools do not support."
        )
    if extra := [name for name in states if not is_state_file(name)]:
        logging.getLogger("ds_frozen_patch").warning(
            "%s contains %s, which DeepSpeed has not written. It is left alone.", folder, named(extra, 3)
        )
    model = _sort_by_rank(folder, files, MODEL_FILE)
    optimizer = _sort_by_rank(folder, files, OPTIMIZER_FILE)
    if not model:
        raise CheckpointError(f"{folder} contains no *model_states.pt: it is not a folder of a DeepSpeed checkpoint.")
    if optimizer and len(model) != len(optimizer) and model[0].name != "mp_rank_00_model_states.pt":
        raise CheckpointError(
            f"{folder} contains model states of {len(model)} ranks and optimizer states of {len(optimizer)}."
            " Get a complete copy of the checkpoint."
        )
    return Layout(folder.parent, folder.name, model, optimizer)


_views: dict[Path, Path] = {}
"""The folders of tags whose journals this process may not finish, and for each one of links to its files."""


def finished(folder: Path) -> Path:
    """The folder of a tag, once its journals are done, or one of links to its files for who may not do that."""
    try:
        finish(folder)
    except OSError:
        if not journals(folder):
            return folder
        if folder not in _views:
            until_exit = ExitStack()
            atexit.register(until_exit.close)
            _views[folder] = until_exit.enter_context(linked(names_now(folder), folder.name)) / folder.name
        return _views[folder]
    return folder


def read_tag(note: Path) -> str:
    """Read the tag in a file such as `latest`."""
    with open_regular(note) as file:
        return file.read(1000).decode(errors="replace").strip()


def latest_tag(root: Path) -> str:
    """Read the tag in a checkpoint's file `latest`; raises CheckpointError if there is none."""
    note = root / "latest"
    if root.is_file():
        raise CheckpointError(f"{root} is a file. Pass the directory of a DeepSpeed checkpoint.")
    if not root.is_dir():
        raise NothingSavedError(f"There is no directory {root}. Check the path.")
    if note.is_file():
        return read_tag(note)
    if any(MODEL_FILE.fullmatch(item.name) for item in root.iterdir()):
        raise CheckpointError(
            f"{root} is a subdirectory of a checkpoint. Pass the directory that contains it: {root.parent}"
        )
    if inner := sorted(item.name for item in root.iterdir() if (item / "latest").is_file()):
        raise NothingSavedError(f"{root} is a folder of checkpoints: {named(inner)}. Pass the path of one of them.")
    raise NothingSavedError(
        f"{root} has no file `latest`: it is not a DeepSpeed checkpoint, or pass its subdirectory with --tag."
    )


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file or a link to one; for most entries the directory listing tells."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _sort_by_rank(folder: Path, files: Mapping[str, bool], kind: re.Pattern[str]) -> tuple[Path, ...]:
    found: dict[int, Path] = {}
    for name in sorted(files):
        match, item = kind.fullmatch(name), folder / name
        if match and not files[name]:
            raise CheckpointError(f"{item} is not a file, or is a broken link. Get a complete copy of the checkpoint.")
        if match and int(match[2]):
            raise UnknownLayoutError(f"{item} was saved with tensor parallelism, which these tools do not support.")
        if match and (before := found.setdefault(int(match[1] or 0), item)) != item:
            raise CheckpointError(
                f"{folder} contains {before.name} and {item.name}: one of them is from another save. Take a copy of one"
                " checkpoint."
            )
    if missing := sorted(set(range(len(found))) - found.keys()):
        raise CheckpointError(
            f"{folder} lacks the {kind.pattern.split('_')[-2]} states of rank {missing[0]}. Get a complete copy of it."
        )
    return tuple(found[rank] for rank in sorted(found))

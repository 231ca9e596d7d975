"""The names in a checkpoint's directory: which are DeepSpeed's and ours, and whether what has them is whole."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from ..publish.durable import listed
from ..publish.work_folder import WORK, Writer, is_unfinished, left_behind, remove_own

RECORD = "ds_frozen_patch.json"
"""The name of the record beside the files of a tag (see `record`)."""

WEIGHTS_FILE = "ds_frozen_patch-weights.ckpt"
"""The name of the single file of a weights-only save to a path where a folder is."""

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
"""The files of each rank, or of all; their groups are the ranks of data and of tensor parallelism."""

_STATE_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:model|optim)_states\.pt"
    r"|(?:layer_|expert_|expp_rank_)\d.*_states\.pt"
)


def is_state(name: str) -> bool:
    """Whether a save has written what has this name, in the folder of a tag."""
    return is_state_file(name) or name in WRITER.late


def is_state_file(name: str) -> bool:
    """Whether DeepSpeed has written the file of this name, in the folder of a tag."""
    return _STATE_FILE.fullmatch(name) is not None


def is_rank_file(name: str) -> bool:
    """Whether this is the name of a file of model or optimizer states, and not of an expert's or a layer's file."""
    return any(kind.fullmatch(name) for kind in (MODEL_FILE, OPTIMIZER_FILE))


WRITER = Writer(owns=is_state, late=("offloaded_tensors", RECORD), beside="zero_to_*.py")
"""DeepSpeed, whose converters are beside the folder of a tag."""


def remove_states(tag: Path, but: Path | None = None) -> None:
    """Remove what a save has written into a tag's folder, our marks but one, and the folder if it is empty then."""
    remove_own(tag, is_state, but)


def is_not_whole(folder: Path) -> bool:
    """Whether a folder has nothing but what a save leaves that was killed, or still runs.

    Folders of checkpoints that DeepSpeed has not written are never of that kind, unless they are empty.
    """
    try:
        inside = {item.name: item for item in map(folder.joinpath, listed(folder))}
    except OSError:
        return False
    if "latest" not in inside:
        others = {name for name in inside if not name.startswith((WORK, "zero_to_"))}
        return others <= {"checkpoint"} or any(map(is_unfinished, inside.values()))
    with suppress(OSError):
        tag = folder / (folder / "latest").read_text(errors="replace").strip()
        return is_unfinished(tag) or not (tag.is_dir() or left_behind(tag))
    return False

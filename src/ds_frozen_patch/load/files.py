"""The files of a checkpoint: its record, and whether all are whole and of one save, before DeepSpeed loads them.

No pickle is read. `torch.load` does not verify the checksums that `torch.save` wrote, and a file of another rank or run
loads as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import check_file, open_regular
from ..checkpoint.names import RECORD
from ..checkpoint.zero.labels import get_save_id
from ..checkpoint.zero.layout import Layout
from ..common.errors import CheckpointError, CheckpointMismatchError, named
from ..core.record import FORMAT, File, Record, describe_file, digest_of
from ..manifest import Manifest
from ..settings import current as settings
from .trust import refuse_unsafe


def read_record(folder: Path) -> Record | None:
    """The record in the folder of a tag, or None.

    Raises:
        CheckpointError: it is damaged, or its format is unknown to this release.
    """
    path = folder / RECORD
    try:
        with open_regular(path) as file:
            values = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged ({error}). {_REMEDY}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has an unknown format; this release of ds_frozen_patch reads format {FORMAT}. Update it:"
            " pip install -U ds_frozen_patch"
        )
    try:
        if values.pop("digest", None) != digest_of(values):
            raise ValueError("it does not match its digest")
        return _from_values(values)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, CheckpointMismatchError) as error:
        raise CheckpointError(f"{path} was edited, or is damaged ({error}). {_REMEDY}") from None


def _from_values(values: dict[str, Any]) -> Record:
    del values["format"]
    manifest, files = values.pop("manifest"), values.pop("files")
    record = Record(
        **values,
        files={name: File(**file) for name, file in files.items()},
        manifest=None if manifest is None else Manifest.from_state(manifest),
    )
    numbers = [record.world_size, record.zero_stage, record.step, *(file.size for file in record.files.values())]
    if not isinstance(record.save, str) or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a value has the wrong type")
    return record


_MOST_BYTES = 1 << 26
"""The largest record that is read. Each file and each left-out parameter takes about 150 bytes."""
_REMEDY = "Get a complete copy of the checkpoint. Without this file, its files load unverified."


def check_names(record: Record, folder: Path, names: set[str], *, with_optimizer: bool = True) -> None:
    """Raise CheckpointError if the files in a folder are not those of the save.

    Args:
        folder: of the files.
        names: of what is there.
        with_optimizer: whether the states of the optimizer must be there too.
    """
    needed = {name for name in record.files if with_optimizer or not name.endswith("_optim_states.pt")}
    if missing := needed - names:
        raise CheckpointError(f"{folder} lacks {named(missing)}. Get a complete copy of the checkpoint.")
    if extra := names - record.files.keys():
        raise CheckpointError(
            f"{folder} has {named(extra)}, which its save has not written. Take all files from one checkpoint."
        )


def check_content(record: Record, file: Path) -> None:
    """Raise CheckpointError if a file is not the one that was saved."""
    if describe_file(file) != record.files.get(file.name):
        raise CheckpointError(
            f"{file} is of another save than {RECORD} beside it, was changed, or is being replaced. Take all files"
            " from one checkpoint. (If you have changed it on purpose: remove that record, or"
            " patch(verify_files=False).)"
        )


def check_save(record: Record, file: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file's state names another save, or another world size, than the record."""
    facts = [(get_save_id(state), record.save), (state.get("dp_world_size"), record.world_size)]
    if any(saved not in (None, recorded) for saved, recorded in facts):
        raise CheckpointError(f"{file} is of another save than {RECORD} beside it. Take all files from one checkpoint.")


MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of torch.serialization.MAGIC_NUMBER

Share = Mapping[Path, slice]
"""The files that a rank verifies, and which of their zip archive's records."""


def share(layout: Layout, rank: int, ranks: int) -> Share:
    """One rank's share of all files: whole ones, or a part of the one that all ranks load."""
    whole = {file: slice(None) for index, file in enumerate(layout.files) if index % ranks == rank}
    return {**whole, layout.model[0]: slice(rank, None, ranks)} if len(layout.model) == 1 else whole


def own_share(layout: Layout, rank: int, local_rank: int) -> Share:
    """A rank's own files, where each node has a disk of its own.

    Args:
        layout: of the rank's own files, and in ZeRO 0 to 2 the one that it shares with its node.
        rank: of all ranks.
        local_rank: of the node's.
    """
    return {file: slice(None) for file in layout.files if f"_rank_{rank}_" in file.name or local_rank == 0}


def check_files(files: Share, record: Record | None) -> None:
    """Verify that files are not truncated, and unless `verify_files` is False against the record and their checksums.

    Raises:
        CheckpointError: a file is damaged, or is not the one that was saved.
    """
    with_checksums = settings().verify_files
    for file, records in files.items():
        if _is_zip(file):
            check_file(file, records=records if with_checksums else slice(0))
        if record is not None and with_checksums:
            check_content(record, file)
        refuse_unsafe(file)


def _is_zip(file: Path) -> bool:
    """Whether a file has torch's zip format; `checkpoint_serialization: false` in DeepSpeed writes an older one."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

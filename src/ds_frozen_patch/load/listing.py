"""Where a checkpoint that is to be loaded is, and what is in its folder."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.format.archive import check_file
from ..checkpoint.zero.layout import Layout, NothingSavedError, UnknownLayoutError, find_layout, finished, latest_tag
from ..checkpoint.zero.states import GAPS, masters_key, parameter_groups, zero_config
from ..common.errors import CheckpointError
from ..internals import partition_file, states_file
from ..publish.journal import is_unfinished
from ..record import Record, read_record
from ..settings import current as settings
from .trust import refuse_unsafe

_KINDS = ("model", "optimizer")


@dataclass(frozen=True)
class Listing:
    """The tag and the files of a checkpoint, or the reason why there are none."""

    tag: str | None = None
    model: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    ranks: int = 0
    """The world size of the run that saved; 0 if that is unknown."""
    stage: int = 0
    """Its ZeRO stage."""
    problem: str = ""
    is_empty: bool = False
    """Whether the reason is that nothing has been saved there."""
    trained: tuple[Mapping[str, Sequence[int]], ...] = ()
    """What was trained, as DeepSpeed saves it in `param_shapes`; only for `patch(elastic=True)`."""
    masters: str | None = None
    """The key of the masters in the state of an optimizer that is not ZeRO's, see `masters_key`; likewise."""
    has_gaps: bool = False
    """Whether `parameter_alignment` has put gaps between the parameters in ZeRO 1 and 2; likewise."""
    record: Record | None = None
    """On the rank that has looked; the others read it themselves, since with many ranks it is large."""
    has_journal: bool = False
    """Whether rank 0 may not finish the journal of a killed save: each rank makes a folder of links to the files."""

    def layout(self, root: str | Path) -> Layout:
        """As `checkpoint.zero.layout.find_layout` returns it."""
        folder = Path(root, self.tag or "")
        files = [tuple(folder / name for name in names) for names in (self.model, self.optimizer)]
        return Layout(Path(root), self.tag or "", *files)

    def to_bytes(self) -> bytes:
        """As short as possible, because every rank fetches it from rank 0: of the files, rank 0's and how many."""
        files = {kind: (names[:1], len(names)) for kind in _KINDS for names in [getattr(self, kind)]}
        return zlib.compress(json.dumps(asdict(replace(self, record=None)) | files).encode())

    @classmethod
    def from_bytes(cls, content: bytes) -> Listing:
        """The listing that `to_bytes` was called on."""
        values = json.loads(zlib.decompress(content))
        for kind in _KINDS:
            first, count = values[kind]
            values[kind] = tuple(name.replace("_rank_0_", f"_rank_{i}_", 1) for i in range(count) for name in first)
        return cls(**{**values, "trained": tuple(values["trained"])})


def list_all(source: str, tag: str | None, with_optimizer: bool) -> Listing:
    """A folder that has the files of all ranks; without its optimizer, these may lack."""
    try:
        layout = find_layout(source, tag)
        record = read_record(folder := layout.model[0].parent)
        if record is not None:
            record.check_names(folder, {file.name for file in layout.files}, with_optimizer=with_optimizer)
    except UnknownLayoutError:
        return Listing()
    except CheckpointError as error:
        return Listing(problem=str(error), is_empty=isinstance(error, NothingSavedError))
    except OSError as error:  # the other ranks wait for this one
        return Listing(problem=f"{source} cannot be read: {error}.")
    model, optimizer = ([file.name for file in files] for files in (layout.model, layout.optimizer))
    trained = _read_trained(layout) if with_optimizer and settings().elastic else {}
    more = {"record": record, "has_journal": layout.root != Path(source), **trained}
    if record is not None:
        return Listing(layout.tag, tuple(model), tuple(optimizer), record.world_size, record.zero_stage, **more)
    stage = 3 if "_rank_0_mp_" in model[0] else 2 if optimizer else 0
    return Listing(layout.tag, tuple(model), tuple(optimizer), len(optimizer) or len(model), stage, **more)


def _read_trained(layout: Layout) -> dict[str, Any]:
    """`trained`, `masters` and `has_gaps` of a listing; nothing if a file is damaged, as `agreement.check` reports."""
    from ..checkpoint.format.archive import read_archive

    try:
        state = read_archive(layout.model[0]).state
        trained = tuple({name: tuple(shape) for name, shape in group.items()} for group in parameter_groups(state))
        optimizer, gaps = state.get("optimizer"), None
        if layout.optimizer and zero_config(state).get("parameter_alignment"):
            gaps = read_archive(layout.optimizer[0]).state["optimizer_state_dict"].get(GAPS)
        masters = None if optimizer is None else masters_key(optimizer)
        return {"trained": trained, "masters": masters, "has_gaps": any(map(any, gaps or ()))}
    except (AttributeError, CheckpointError, LookupError, OSError, TypeError):
        return {}


def list_own(engine: Any, source: str, tag: str | None) -> Listing:
    """A rank's own files, where nodes have disks of their own."""
    try:
        name = latest_tag(Path(source)) if tag is None else tag
        folder = finished(Path(source, name))
        has_journal, source = folder.parent != Path(source), str(folder.parent)
        record = read_record(folder)
    except CheckpointError as error:
        return Listing(problem=str(error), is_empty=isinstance(error, NothingSavedError))
    if is_unfinished(folder):
        return Listing(problem=f"{folder} is not whole: the save that wrote it was interrupted, or still runs.")
    model, partition = states_file(engine, source, name), partition_file(engine, source, name)
    optimizer = [] if partition is None else [partition]
    for file in (model, *optimizer):
        if not file.is_file():
            return Listing(problem=f"There is no {file} on this rank's disk. Get a complete copy of the checkpoint.")
    names = (model.name,), tuple(file.name for file in optimizer)
    by = (record.world_size, record.zero_stage) if record is not None else (0, 0)
    return Listing(name, *names, *by, record=record, has_journal=has_journal)


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


def recorded_share(folder: Path, record: Record | None, rank: int, ranks: int, *, with_optimizer: bool) -> Share:
    """A rank's share of the files that a record lists, where their layout is unknown."""
    names = sorted(record.files) if record is not None else []
    needed = [name for name in names if with_optimizer or not name.endswith("_optim_states.pt")]
    return {folder / name: slice(None) for name in needed[rank::ranks]}


def check_files(files: Share, record: Record | None) -> None:
    """Verify that files are not truncated, and unless `verify_files` is False against the record and their checksums.

    Raises:
        CheckpointError: a file is damaged, or is not the one that was saved.
    """
    with_checksums = settings().verify_files
    for file, records in files.items():
        if _is_zip(file):
            check_file(file, records=records if with_checksums else slice(0))
        if record is not None and record.files and with_checksums:
            record.check_content(file)
        refuse_unsafe(file)


def _is_zip(file: Path) -> bool:
    """Whether a file has torch's zip format; `checkpoint_serialization: false` in DeepSpeed writes an older one."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None

"""What the ranks agree on before a load: what is there, that all of it is whole, and that all load the same.

Each rank verifies a share of the files, and one collective follows: an error of one rank, or of one file, is raised on
every rank. Rank 0 lists the folder and shares the list through the process group's store; on disks of their own
(`use_node_local_storage`), each rank looks for its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .. import cures
from ..checkpoint.zero.layout import finished, latest_tag
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.files import MODEL_FILE, RECORD, SCRATCH, is_brought
from ..common.overrides import Attributes
from ..engine.served import warn
from ..internals import partition_file, states_file, with_reader
from ..publish.journal import prepared
from ..publish.publication import finish_as
from ..ranks import Ranks, Store, default_store, differences, digest, gather, world_size
from ..record import UNKNOWN, Record, carried, read_record
from ..settings import current as settings
from .listing import Listing, check_files, list_all, list_own, own_share, recorded_share, share
from .running import Load

T = TypeVar("T")

ATTEMPTS = 10
"""How often a load begins if another process saves to the same path meanwhile; a small save is faster than a load."""
_MUST_BE_EQUAL = ("verify_base", "elastic", "restart_optimizer")
_MIXED = "{} has files of more than one save. Take all files from one checkpoint."


class ReplacedError(CheckpointError):
    """Another process has saved to the path during the load, which can begin again."""


@dataclass
class LoadRanks(Ranks):
    """The steps of one load."""

    load: Load

    def explained(self, error: Exception, path: Any) -> str:
        """What cannot be read, and why."""
        return (
            f"Rank {self.load.owner.rank}: {path or self.load.source} cannot be read: {type(error).__name__}: {error}"
        )

    def report(self) -> tuple[str, bool, bool]:
        """This rank's error, whether that is of a file that it names, and whether the checkpoint was replaced."""
        own = self.errors[0] if self.errors else None
        return str(own or ""), own is None or isinstance(own, CheckpointError), _was_replaced(self.load)

    def failure(self, reports: list[Any]) -> Exception:
        """This rank's own error, if it is not of a file; else those of all."""
        if self.errors and not isinstance(self.errors[0], CheckpointError):
            return self.errors[0]
        texts = [text if of_file else f"Rank {rank}: {text}" for rank, (text, of_file, _) in enumerate(reports) if text]
        begins_again = all(of_file for _, of_file, _ in reports) and any(was_replaced for *_, was_replaced in reports)
        kind = ReplacedError if begins_again else CheckpointError
        return kind("\n".join(dict.fromkeys(texts)))


def _was_replaced(load: Load) -> bool:
    if load.record is None:
        return False
    try:
        now = read_record(finished(Path(load.source, load.tag or latest_tag(Path(load.source)))))
    except CheckpointError:
        return True  # it is being written
    return now is not None and now.save != load.record.save


def from_bucket(load: Load, address: str, tag: str | None, load_from: Callable[[Path], T]) -> T:
    """Load from an address: bring down what this rank needs, load from there, and remove it; every rank must call it.

    Args:
        load: of this rank.
        address: of the checkpoint.
        tag: the folder in it; None for that in `latest`.
        load_from: loads from a folder, or a file.
    """
    from ..buckets import bring_down, release, scratch_of

    ranks, place = LoadRanks(load.owner.device, load), scratch_of(address)
    load.source = str(place)
    try:
        while True:
            ranks.step("bring down the files", partial(bring_down, place, tag, partial(_needed, load)))
            try:
                return load_from(place)
            except ReplacedError:  # on every rank
                if load.attempts == ATTEMPTS:
                    raise
                load.begin_again()
    finally:
        release(place)


def _needed(load: Load, folder: Path, content: bytes | None) -> list[str] | None:
    """The files that this rank's engine reads; None for all, if it is not as it was at the save."""
    engine = load.engine
    record = None if content is None else Record.from_json(content, folder / RECORD)
    here = world_size(), engine.zero_optimization_stage()
    if record is None or (record.world_size, record.zero_stage) != here or record.trained_world_size:
        return None
    files = [states_file(engine, str(folder.parent), folder.name)]
    partition = partition_file(engine, str(folder.parent), folder.name)
    return [file.name for file in (*files, partition) if file is not None]


def list_files(load: Load, listing: Listing | None = None) -> Listing:
    """What is in the folder, as rank 0 sees it; on disks of their own, as this rank does.

    Args:
        load: of this rank.
        listing: what is taken for this rank's, if it has found something else than a folder to load from.
    """
    store = None if load.is_on_own_disks else default_store()
    look = partial(list_all, load.source, load.tag, load.restores_optimizer)
    if load.is_on_own_disks:
        look = partial(list_own, load.engine, load.source, load.tag)
    if listing is not None:
        look = partial(replace, listing)
    if store is not None:
        return Store(store, "listing").first(look, Listing.to_bytes, Listing.from_bytes)
    try:
        return look()
    except Exception as error:  # which `check` raises on every rank
        return Listing(problem=f"{load.source} cannot be read: {type(error).__name__}: {error}")


def check(load: Load) -> None:
    """Read the record, verify this rank's share of the files, and agree; every rank must call it.

    Raises:
        CheckpointError: on every rank, if one has found a file to be missing, damaged, or of another save.
    """
    if agree(load, "a checkpoint", partial(_check_share, load)):
        return
    if load.is_on_own_disks:
        _finish_common_save(load, Path(load.source, load.listing.tag or ""))
        load.listing = list_files(load)
        if agree(load, "a checkpoint", partial(_check_share, load)):
            return
    # On every rank. The files may be those of a save that replaces them now.
    raise ReplacedError(_MIXED.format(load.source))


def _check_share(load: Load) -> None:
    listing = load.listing
    if listing.problem:
        raise CheckpointError(listing.problem)
    if listing.has_journal:
        load.source = str(finished(Path(load.source, listing.tag or "")).parent)
    if listing.tag is None:  # experts, or tensor parallelism
        folder = finished(Path(load.source, load.tag or latest_tag(Path(load.source))))
        load.record = read_record(folder)
        with_optimizer = load.restores_optimizer
        own = recorded_share(folder, load.record, load.owner.rank, world_size(), with_optimizer=with_optimizer)
        check_files(own, load.record)
        return
    load.tag = load.tag or listing.tag  # this rank may not have been able to read `latest`
    layout = listing.layout(load.source)
    load.record = listing.record or read_record(layout.model[0].parent)
    if SCRATCH.match(load.source):
        if not load.restores_optimizer and load.engine.zero_optimization_partition_weights():
            from ..buckets import bring_rest

            bring_rest(layout.files)  # DeepSpeed merges the partitions of all ranks
        check_files({file: slice(None) for file in layout.files if is_brought(file)}, load.record)
    elif load.is_on_own_disks:
        check_files(own_share(layout, load.owner.rank, load.owner.local_rank), load.record)
    else:
        check_files(share(layout, load.owner.rank, world_size()), load.record)


def agree(load: Load, what: str, look: Callable[[], None] | None = None, problem: Exception | None = None) -> bool:
    """Let the ranks agree on a load; every rank must call it, once for each load.

    Args:
        load: of this rank.
        what: this rank has found at the path.
        look: verifies that.
        problem: that this rank has found before, which it raises as it is.

    Returns:
        Whether the ranks have the record of one save.

    Raises:
        CheckpointError: on every rank, if one has a problem.
        CheckpointMismatchError: the ranks load different things, or their settings differ.
    """
    request = {"what is loaded": what, **{name: getattr(settings(), name) for name in _MUST_BE_EQUAL}}
    ranks = LoadRanks(load.owner.device, load)
    if problem is not None:
        ranks.errors.append(problem)
    elif look is not None:
        with ranks.deferred():
            look()
    save = digest(load.record.save) if load.record is not None else 0
    is_unverified = getattr(load.engine, "module", None) is None or settings().verify_base == "off"

    def numbers() -> list[int]:
        return [digest(request), is_unverified or load.base.is_as_recorded(), save]

    everyone = ranks.step("verify the files", numbers, 3)
    requests, base_known, saves = zip(*everyone, strict=True)
    load.base_is_known = all(base_known)
    if len(set(requests)) > 1:
        raise CheckpointMismatchError(
            f"The ranks load different checkpoints ({'; '.join(differences(gather(request)))}). Give every rank the"
            " same path and settings."
        )
    return len(set(saves)) == 1


def _finish_common_save(load: Load, tag: Path) -> None:
    """Finish a save that was killed after some nodes had named its files, and before the others had.

    Raises:
        CheckpointError: there is none for which all nodes have files.
    """

    ranks, saves = LoadRanks(load.owner.device, load), list[tuple[Any, ...]]()

    def look() -> None:
        record = read_record(tag)
        saves.append((record and record.save, record and record.step, tuple(prepared(tag))))

    ranks.step("look for a save that all nodes have", look)
    everyone = gather(saves[0])
    named_somewhere = {save: step for save, step, _ in everyone if save is not None}
    common = [save for save in named_somewhere if all(save in (first, *waiting) for first, _, waiting in everyone)]
    if not common:
        steps = "; ".join(
            f"rank {rank}: of step {step}" if save else f"rank {rank}: of an unknown save"
            for rank, (save, step, _) in enumerate(everyone[:10])
        )
        raise CheckpointError(
            f"The nodes have different saves of {load.source} ({steps}). Load a checkpoint that all nodes have."
        )
    save = max(common, key=lambda candidate: named_somewhere[candidate] or 0)
    ranks.step("finish the save", lambda: finish_as(tag, save))
    warn(
        load.owner,
        f"A save of {load.source} was killed before all nodes had named its files. It is finished, and all nodes load"
        f" the checkpoint of step {named_somewhere[save]}.",
    )


def sharing_reads(load: Load) -> Attributes:
    """Lets the engine raise on all ranks what one of them cannot read, or has read of another save."""

    def read(by_deepspeed: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        # With experts or tensor parallelism, ranks may read different numbers of files, but for model states.
        if load.listing.tag is None and not MODEL_FILE.fullmatch(Path(path).name):
            return cures.read(by_deepspeed, path, *args, **kwargs)
        state, ranks = None, LoadRanks(load.owner.device, load)
        with ranks.deferred(path):
            state = load.answers(str(path))
            state = cures.read(by_deepspeed, path, *args, **kwargs) if state is None else state
            _check_read(load, Path(path), state)
        everyone = ranks.step("read a file", lambda: [load.read], 1)
        if len({save for (save,) in everyone} - {0}) > 1:
            raise CheckpointError(_MIXED.format(load.source))
        return state

    return with_reader(load.engine, read)


def _check_read(load: Load, file: Path, state: Any) -> None:
    """Note the save that a file of model states is of; raises CheckpointError if the record contradicts a file."""
    record = load.record
    if isinstance(state, Mapping) and "module" in state:
        here = carried(state, file)
        load.read = digest(here.save)
        if record is not None:
            record.check_state(file, state)
        elif here.kind != UNKNOWN:
            load.record = here
    elif record is not None and file.name in record.files and settings().verify_files:
        record.check_content(file)  # it has no id, and may have been replaced since it was verified

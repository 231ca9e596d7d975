"""What the ranks agree on before a load: what is there, that all of it is whole, and that all load the same.

Each rank verifies a share of the files, and one collective follows: an error of one rank, or of one file, is raised on
every rank. Rank 0 lists the folder and shares the list through the process group's store; on disks of their own
(`use_node_local_storage`), each rank looks for its own files.
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.zero.layout import finished, latest_tag
from ..common.collectives import default_store, digest, gather, gather_numbers, world_size
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.owner import is_first, warn
from ..publish.journal import prepared
from ..publish.publication import finish_as
from ..settings import current as settings
from .files import check_files, own_share, read_record, share
from .listing import Listing, list_all, list_own
from .running import Load


def list_files(load: Load) -> Listing:
    """What is in the folder, as rank 0 sees it; on disks of their own, as this rank does."""
    listing = _list_files(load)
    if listing.has_journal:
        load.source = str(finished(Path(load.source, listing.tag or "")).parent)
    return listing


def _list_files(load: Load) -> Listing:
    if load.is_on_own_disks:
        return list_own(load.engine, load.source, load.tag)
    store = default_store()
    if is_first(load.owner):
        return share_listing(load, list_all(load.source, load.tag, load.restores_optimizer))
    if store is None:
        return list_all(load.source, load.tag, load.restores_optimizer)
    return Listing.from_bytes(store.get(_key(load)))


def share_listing(load: Load, listing: Listing) -> Listing:
    """On rank 0, send its listing to the other ranks, which wait for it."""
    store = default_store()
    if store is not None and is_first(load.owner):
        store.set(_key(load), listing.to_bytes())
    return listing


def _key(load: Load) -> str:
    load.listings += 1
    return f"ds_frozen_patch/load{load.number}.{load.listings}"


def check(load: Load, listing: Listing) -> None:
    """Read the record, verify this rank's share of the files, and agree; every rank must call it.

    Raises:
        CheckpointError: on every rank, if one has found a file to be missing, damaged, or of another save.
    """
    if _check_and_agree(load, listing):
        return
    if load.is_on_own_disks:
        _finish_common_save(load)
        if _check_and_agree(load, list_files(load)):
            return
    # On every rank. The files may be those of a save that replaces them now.
    raise ReplacedError(f"{load.source} has files of more than one save. Take all files from one checkpoint.")


def _check_and_agree(load: Load, listing: Listing) -> bool:
    """Whether the ranks have the record of one save, whose files are whole."""
    problem: Exception | None = CheckpointError(listing.problem) if listing.problem else None
    if problem is None and listing.tag is not None:
        try:
            _check_share(load, listing)
        except (CheckpointError, CheckpointMismatchError) as error:
            problem = error
        except Exception as error:  # which the other ranks would wait for
            problem = CheckpointError(f"{load.source} cannot be read: {type(error).__name__}: {error}")
    return agree(load, "a checkpoint", problem)


def _check_share(load: Load, listing: Listing) -> None:
    layout = listing.layout(load.source)
    load.record = listing.record or read_record(layout.model[0].parent)
    if load.is_on_own_disks:
        check_files(own_share(layout, load.owner.rank, load.owner.local_rank), load.record)
        return
    check_files(share(layout, load.owner.rank, world_size()), load.record)


def agree(load: Load, what: str, problem: Exception | None = None) -> bool:
    """Let the ranks agree on a load; every rank must call it, once for each load.

    Args:
        what: this rank has found at the path.
        problem: what this rank would raise.

    Returns:
        Whether the ranks have the record of one save.

    Raises:
        CheckpointError: another rank has a problem.
        CheckpointMismatchError: the ranks load different things, or their settings differ.
    """
    now = settings()
    request = f"{what}, verify_base={now.verify_base!r}, elastic={now.elastic!r}, {now.restart_optimizer=}"
    save = digest(load.record.save) if load.record is not None else 0
    is_unverified = getattr(load.engine, "module", None) is None or now.verify_base == "off"
    numbers = [problem is not None, digest(request), is_unverified or load.base.is_as_recorded(), save]
    everyone = gather_numbers(numbers, load.owner.device)
    load.base_is_known = all(rank_numbers[2] for rank_numbers in everyone)
    if any(rank_numbers[0] for rank_numbers in everyone):
        raise_on_all_ranks(load, problem)
    if len({rank_numbers[1] for rank_numbers in everyone}) > 1:
        first_rank = {text: rank for rank, text in reversed(list(enumerate(gather(request))))}
        differing = "; ".join(f"rank {rank}: {text}" for text, rank in first_rank.items())
        raise CheckpointMismatchError(
            f"The ranks load different checkpoints ({differing}). Give every rank the same path and settings."
        )
    return len({rank_numbers[3] for rank_numbers in everyone}) == 1


def raise_on_all_ranks(load: Load, problem: Exception | None) -> None:
    """Raise this rank's own problem, or those of the others; every rank must call it."""
    of_a_file = problem is None or isinstance(problem, CheckpointError)
    problems = gather((str(problem or ""), of_a_file, _was_replaced(load)))
    if problem is not None and not of_a_file:
        raise problem
    texts = [text if plain else f"Rank {rank}: {text}" for rank, (text, plain, _) in enumerate(problems) if text]
    kind = ReplacedError if any(was_replaced for *_, was_replaced in problems) else CheckpointError
    raise kind("\n".join(dict.fromkeys(texts))) from problem


class ReplacedError(CheckpointError):
    """Another process has saved to the path during the load, which can begin again."""


def _was_replaced(load: Load) -> bool:
    if load.record is None:
        return False
    try:
        now = read_record(finished(Path(load.source, load.tag or latest_tag(Path(load.source)))))
    except CheckpointError:
        return True  # it is being written
    return now is not None and now.save != load.record.save


def _finish_common_save(load: Load) -> None:
    """Finish a save that was killed after some nodes had named its files, and before the others had.

    Raises:
        CheckpointError: there is none for which all nodes have files.
    """
    tag = Path(load.source, latest_tag(Path(load.source)) if load.tag is None else load.tag)
    record = read_record(tag)
    everyone = gather((record and record.save, record and record.step, tuple(prepared(tag))))
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
    finish_as(tag, save)
    warn(
        load.owner,
        f"A save of {load.source} was killed before all nodes had named its files. It is finished, and all nodes load"
        f" the checkpoint of step {named_somewhere[save]}.",
    )

"""The agreements of the ranks on a save: on what is saved, before anything is written, and at the end of a step."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.collectives import digest, gather, gather_numbers
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.origins import Changes
from ..record import File
from ..settings import FLAG
from ..settings import current as settings
from .running import Save

_MUST_BE_EQUAL = ("keep", "leave_out", "export", "fsync", "whole_model", "async_save")
"""The settings that change what the ranks do together in a save."""
_FOUR = struct.Struct("<4q")


def agree_on_request(save: Save, what: str, exclude: bool, changes: Changes) -> None:
    """Let the ranks agree on a save, in one collective; every rank must call it. Rank 0 chooses where it is written.

    Args:
        save: of this rank.
        what: the kind of save.
        exclude: whether frozen parameters are left out.
        changes: what this rank has seen of what is left out.

    Raises:
        CheckpointMismatchError: the ranks are to save different things.
    """
    place, now = save.place, settings()
    request = {"what is saved": what, FLAG: exclude, **{name: getattr(now, name) for name in _MUST_BE_EQUAL}}
    base_is_known = all(content is None or content.fingerprint for content in save.built.values())
    numbers = [digest(sorted(request.items())), digest(str(place.target)), int(place.id, 16), base_is_known]
    numbers += [bool(changes.changed), bool(changes.rounded), place.in_place, save.owner.local_rank]
    everyone = gather_numbers(numbers, save.owner.device)
    requests, targets, ids, base_known, base_changed, base_rounded, in_place, local_ranks = zip(*everyone, strict=True)
    if len(set(requests)) > 1:
        raise CheckpointMismatchError(f"{place.shown} was not saved. {_difference(gather(request))}")
    rank, local_rank = save.owner.rank, save.owner.local_rank
    if len(set(targets)) > 1 and not place.is_on_own_disks:
        place.target, place.folder, place.shown = map(Path, gather(tuple(map(str, place.paths)))[0])
        targets = targets[:1] * len(targets)
    save.is_in_one_place = len(set(targets)) == local_ranks.count(0) == 1
    # A program can give the ranks of a node folders of their own.
    save.opens_disk = rank > 0 and (local_rank == 0 or targets[rank] not in targets[rank - local_rank : rank])
    place.id, place.in_place = f"{ids[0]:012x}", bool(in_place[0])
    save.base_is_known, save.base_has_changed = all(base_known), any(base_changed)
    save.base_is_rounded = any(base_rounded)


def agree_on_end(save: Save, _: str = "") -> dict[int, File]:
    """Raise on every rank if one has recorded an error; every rank must call it. It is a barrier.

    Returns:
        What the ranks have written, by the digests of the file names. It lacks names for which ranks differ, as on
        disks of their own.

    Raises:
        CheckpointError: a rank has recorded an error.
    """
    everyone = gather_numbers([bool(save.failures.errors), *_pack(save.written)], save.owner.device)
    if any(has_failed for has_failed, *_ in everyone):
        save.discard()
        raise save.failures.error(*(save.place.state_of_target() if save.publishes else (None,)))
    written: dict[int, File | None] = {}
    for name, file in (item for _, *packed in everyone for item in _unpack(packed)):
        if written.setdefault(name, file) != file:
            written[name] = None
    return {name: file for name, file in written.items() if file is not None}


def _pack(files: Mapping[str, File]) -> list[int]:
    """The first two files as twelve integers of 64 bits, which ranks can gather. As a rule a rank writes no more."""
    numbers: list[int] = []
    for name, file in [*files.items()][:2]:
        numbers += [digest(name), file.size, *_FOUR.unpack(bytes.fromhex(file.directory or "0" * 64))]
    return numbers + [0] * (12 - len(numbers))


def _unpack(numbers: Sequence[int]) -> Iterator[tuple[int, File]]:
    """The files in what `_pack` returned, with the digests of their names."""
    for name, size, *parts in filter(any, (numbers[:6], numbers[6:])):
        yield name, File(size, _FOUR.pack(*parts).hex() if any(parts) else None)


def _difference(requests: list[dict[str, Any]]) -> str:
    """Which ranks got which request, where they differ."""
    lines = []
    for key in sorted({key for request in requests for key in request}):
        ranks: dict[str, list[str]] = {}
        for rank, request in enumerate(requests):
            ranks.setdefault(repr(request.get(key)), []).append(str(rank))
        if len(ranks) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} on rank {_shortened(who)}" for value, who in ranks.items()))
    return (
        f"The ranks requested different saves ({'; '.join(lines)}). Call patch(), full_checkpoint() and"
        " save_checkpoint() with the same arguments on every rank."
    )


def _shortened(ranks: list[str]) -> str:
    return ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


@contextmanager
def explaining_errors(path: Any) -> Iterator[list[Save]]:
    """Add to an error of torch's, such as after the death of another rank, what was not saved and what is there.

    Append the save to the yielded list as soon as the ranks have agreed on it.
    """
    saves: list[Save] = []
    try:
        yield saves
    except (CheckpointError, CheckpointMismatchError):
        raise
    except RuntimeError as error:
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            raise
        state, is_saved = saves[0].place.state_of_target() if saves else ("Nothing has changed there.", False)
        outcome = "was saved, but not every rank has confirmed it" if is_saved else "was not saved"
        raise CheckpointError(
            f"{path} {outcome} ({error}). If this says that another rank is gone, restart the run from its last"
            f" checkpoint. {state}"
        ) from error

"""The agreement of the ranks on a save, and what its errors say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..common.collectives import digest, gather, gather_numbers
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..fingerprint import process_memory
from ..publish.publication import UNCHANGED
from ..publish.ways import Way
from .save import Save


def agree(save: Save, request: Mapping[str, Any], base_has_changed: bool) -> None:
    """Let the ranks agree on a save, in one collective; every rank must call it. What rank 0 says of it counts.

    Args:
        save: of this rank.
        request: what this rank is to save, which must be the same on every rank.
        base_has_changed: whether this rank has seen training change some of what is left out.

    Raises:
        CheckpointMismatchError: the requests differ.
    """
    place = save.place
    base_is_known = all(process_memory().holds(one.tensor) for one in save.left_out or ())
    own = [digest(sorted(request.items())), digest(str(place.target)), int(place.id, 16), base_is_known]
    numbers = gather_numbers([*own, base_has_changed, place.way, save.owner.local_rank], save.owner.device)
    if len({one[0] for one in numbers}) > 1:
        raise CheckpointMismatchError(f"{place.shown} was not saved. {_difference(gather(dict(request)))}")
    targets, nodes = {one[1] for one in numbers}, [one[6] for one in numbers].count(0)
    if len(targets) > 1:
        place.target, place.folder, place.shown = map(Path, gather(tuple(map(str, place.paths)))[0])
    save.is_in_one_place = len(targets) == nodes == 1
    place.id, place.way = f"{numbers[0][2]:012x}", Way(numbers[0][5])
    save.base_is_known = all(one[3] for one in numbers)
    save.base_has_changed = any(one[4] for one in numbers)


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
        state, is_saved = saves[0].place.state_of_target() if saves else (UNCHANGED, False)
        outcome = "was saved, but not every rank has confirmed it" if is_saved else "was not saved"
        raise CheckpointError(
            f"{path} {outcome} ({error}). If this says that another rank is gone, restart the run from its last"
            f" checkpoint. {state}"
        ) from error

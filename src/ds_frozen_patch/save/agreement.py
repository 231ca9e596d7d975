"""What the ranks agree on in a save: before anything is written on what is saved, and at each step on what has failed.

DeepSpeed's collectives lie between two steps. A rank that raised at once would leave the others waiting in one, so its
errors are recorded, and all ranks raise them at the end of the step.
"""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.files import SCRATCH
from ..common.text import human_bytes
from ..cures import USE_WEIGHTS_ONLY
from ..ranks import Ranks, differences, digest, gather
from ..settings import FLAG
from ..settings import current as settings

if TYPE_CHECKING:
    from .running import Save

_MUST_BE_EQUAL = ("keep", "leave_out", "export", "fsync", "whole_model", "async_save")
"""The settings that change what the ranks do together in a save."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NEARLY_FULL = 16 * 2**20
"""torch reports a full disk by a line of its own source code, when less than this is free."""


@dataclass
class SaveRanks(Ranks):
    """The steps of one save.

    Attributes:
        target: what is saved, as messages name it.
        clean_up: called after a failure; returns what is there now, as a sentence or None if another rank says it, and
            whether that is the new checkpoint.
    """

    target: Path
    clean_up: Callable[[], tuple[str | None, bool]]

    def deferring(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes, with its errors recorded."""
        return self.deferred()(write)

    def explained(self, error: Exception, path: Any) -> str:
        """What cannot be written, and why; it closes the file, which takes up space while an error's frames have it."""
        path = Path(path or self.target)
        text = f"{path} cannot be written ({_cause(error, path)}){_free_space(error, path)}"
        context: BaseException | None = error
        while context is not None:
            traceback.clear_frames(context.__traceback__)
            context = context.__context__
        return text

    def report(self) -> tuple[str | None, str | None, bool]:
        """This rank's first error, what is at the target on its disk, and whether that is the new checkpoint."""
        state, is_saved = self.clean_up()
        return str(self.errors[0]).removesuffix(".") if self.errors else None, state, is_saved

    def failure(self, reports: list[Any]) -> CheckpointError:
        """The first errors, and what is on each disk now."""
        errors = [f"Rank {rank}: {text}." for rank, (text, *_) in enumerate(reports) if text]
        more = f" And {len(errors) - 2} more ranks." if len(errors) > 2 else ""
        states = " ".join(dict.fromkeys(state for _, state, _ in reports if state))
        is_saved = all(is_there for _, state, is_there in reports if state)
        outcome = "was saved, but an error has followed" if is_saved else "was not saved"
        return CheckpointError(
            f"{self.target} {outcome}. {' '.join(errors[:2])}{more} {states} The run can continue, and save again once"
            " the cause is removed."
        )


def agree_on_request(save: Save, what: str, exclude: bool) -> None:
    """Let the ranks agree on a save, in one collective; every rank must call it. Rank 0 chooses where it is written.

    Args:
        save: of this rank.
        what: the kind of save.
        exclude: whether frozen parameters are left out.

    Raises:
        CheckpointError: a rank has recorded an error.
        CheckpointMismatchError: the ranks are to save different things.
    """
    place, base, now = save.place, save.base, settings()
    request = {"what is saved": what, FLAG: exclude, **{name: getattr(now, name) for name in _MUST_BE_EQUAL}}
    numbers = [digest(sorted(request.items())), digest(SCRATCH.sub(r"\2", str(place.target))), int(place.id, 16)]
    numbers += [base is None or base.is_known, digest(sorted(base.changed)) if base else 0]
    numbers += [place.in_place, save.owner.local_rank]
    everyone = save.ranks.step("agree on the save", lambda: numbers, len(numbers))
    requests, targets, ids, base_known, base_changed, in_place, local_ranks = zip(*everyone, strict=True)
    if len(set(requests)) > 1:
        raise CheckpointMismatchError(
            f"{place.shown} was not saved. The ranks requested different saves"
            f" ({'; '.join(differences(gather(request)))}). Call patch(), full_checkpoint() and save_checkpoint() with"
            " the same arguments on every rank."
        )
    rank, local_rank = save.owner.rank, save.owner.local_rank
    if len(set(targets)) > 1 and not place.is_on_own_disks:
        place.follow(gather(tuple(map(str, place.paths)))[0])
        targets, save.ranks.target = targets[:1] * len(targets), place.shown
    save.is_in_one_place = place.upload is not None or len(set(targets)) == local_ranks.count(0) == 1
    # A program can give the ranks of a node folders of their own.
    is_first = local_rank == 0 or targets[rank] not in targets[rank - local_rank : rank]
    save.opens_disk = rank > 0 and is_first and place.upload is None
    place.id, place.in_place = f"{ids[0]:012x}", bool(in_place[0])
    if base is not None:
        base.is_known, base.is_agreed = all(base_known), len(set(base_changed)) == 1


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
    except (NotImplementedError, AssertionError) as error:  # DeepSpeed before 0.13 cannot save what is on NVMe
        if "NVMe" not in str(error):
            raise
        raise CheckpointError(f"{error}. {USE_WEIGHTS_ONLY}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError and not type(error).__name__.startswith("Dist"):
            raise
        state, is_saved = saves[0].place.state_of_target() if saves else ("Nothing has changed there.", False)
        outcome = "was saved, but not every rank has confirmed it" if is_saved else "was not saved"
        raise CheckpointError(
            f"{path} {outcome} ({error}). If this says that another rank is gone, restart the run from its last"
            f" checkpoint. {state}"
        ) from error


def _cause(error: Exception, path: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        at = f": {error.filename}" if error.filename is not None and str(error.filename) != str(path) else ""
        return f"{error.strerror}{at}"
    return f"{type(error).__name__}: {error}"


def _free_space(error: Exception, path: Path) -> str:
    """The free space, where a lack of it is the cause."""
    try:
        folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path(os.sep))
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    is_full = error.errno in _NO_SPACE if isinstance(error, OSError) else free < _NEARLY_FULL
    if not is_full:
        return ""
    return f", with {human_bytes(free)} free on its disk. A save over a checkpoint needs room for both until it is done"

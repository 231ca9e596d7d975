"""Every rank must be patched, with the same settings. This is checked at set-up, since later it would be a hang.

A rank writes its settings into the process group's store before its engine is created. DeepSpeed synchronizes all ranks
while it creates the engine, so a rank that has written nothing by the time rank 0 is through is not patched. Rank 0
reads what all ranks have written and writes a verdict, which the others read: no collective, and few requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from .. import process
from ..common.errors import PatchError
from ..common.probing import version_of
from ..ranks import Store, default_store, differences, listed
from ..settings import current

WAIT_SECONDS = 5.0
"""How much later than rank 0 another rank may write."""
LONG_WAIT_SECONDS = 60.0
"""The same where DeepSpeed has not synchronized the ranks before."""


def announce() -> Store | None:
    """Write this rank's settings; called before its engine is created.

    Returns:
        Where the ranks meet; None if there is no process group yet, or its ranks have agreed.
    """
    store = default_store()
    if store is None or store in process.state.agreed:
        return None
    # A program may use one store for several process groups, one after another.
    meeting = Store(store, "handshake", attempts=0)
    meeting.put({"version": version_of("ds_frozen_patch"), **asdict(current())})
    return meeting


def check(wait_seconds: float | None = None, call: str = "patch()") -> None:
    """Compare the settings of all ranks; called after the engine is created.

    Args:
        wait_seconds: how much later than this one another rank may write; WAIT_SECONDS by default.
        call: what another rank has not called if it has written nothing.

    Raises:
        PatchError: on every patched rank, if one is not patched or has other settings.
    """
    meeting = announce()
    if meeting is None:
        return
    seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
    if meeting.rank:  # rank 0 shares the result as soon as it gets here
        _refuse_unpatched(meeting, [0], seconds, call)
    meeting.judge(lambda: _compare(meeting, seconds, call))
    meeting.finish()
    process.state.agreed.add(default_store())


def _compare(meeting: Store, seconds: float, call: str) -> None:
    _refuse_unpatched(meeting, range(meeting.ranks), seconds, call)
    if lines := differences([*meeting.values()]):
        raise PatchError(
            "patch() was not called with the same settings on every rank:\n- "
            + "\n- ".join(lines)
            + "\nUse the same arguments, environment variables and release of ds_frozen_patch on every rank."
        )


def _refuse_unpatched(meeting: Store, ranks: Sequence[int], seconds: float, call: str) -> None:
    if missing := meeting.missing(ranks, seconds):
        raise PatchError(
            f"ds_frozen_patch.{call} was called on this rank, but not on rank {listed(missing, 10)}: their saves would"
            " wait for each other forever. Call it on every rank, or start the program on every node by"
            " `ds-frozen-patch run`, or with DS_FROZEN_PATCH=1 and PYTHONPATH set there too (DeepSpeed's launcher"
            " sends what is in ~/.deepspeed_env)."
        )

"""Every rank must be patched, with the same settings. This is checked at set-up, since later it would be a hang.

A rank writes its settings into the process group's store before its engine is created. DeepSpeed synchronizes all ranks
while it creates the engine, so a rank that has written nothing by the time rank 0 is through is not patched. Rank 0
reads what all ranks have written and writes a verdict, which the others read: no collective, and few requests.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ..common.errors import PatchError
from ..common.versions import version_of
from ..ranks import default_store, rank, world_size
from ..settings import current

WAIT_SECONDS = 5.0
"""How much later than rank 0 another rank may write."""
LONG_WAIT_SECONDS = 60.0
"""The same where DeepSpeed has not synchronized the ranks before."""


@dataclass
class _Agreed:
    """The last store through which the ranks have agreed, and how many there were in this process."""

    store: Any = None
    attempts: int = 0


_agreed = _Agreed()


def _key(of: object) -> str:
    """A key of this attempt: a program may use one store for several process groups, one after another."""
    return f"ds_frozen_patch/{_agreed.attempts}/{of}"


def announce() -> None:
    """Write this rank's settings; called before its engine is created, if there is a process group yet."""
    store = default_store()
    if store is None or store == _agreed.store:
        return
    settings = {"version": version_of("ds_frozen_patch"), **asdict(current())}
    store.set(_key(rank()), json.dumps(settings))


def check(wait_seconds: float | None = None, call: str = "patch()") -> None:
    """Compare the settings of all ranks; called after the engine is created.

    Args:
        wait_seconds: how much later than this one another rank may write; WAIT_SECONDS by default.
        call: what another rank has not called if it has written nothing.

    Raises:
        PatchError: on every patched rank, if one is not patched or has other settings.
    """
    announce()
    store = default_store()
    if store is None or store == _agreed.store:
        return
    seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
    if rank() == 0:
        verdict = _verdict(store, seconds, call)
        store.set(_key("verdict"), verdict or "agreed")
    elif _missing(store, [0], seconds):
        verdict = _not_patched(call, [0])
    else:  # rank 0 writes it as soon as it gets here
        written = store.get(_key("verdict")).decode()
        verdict = "" if written == "agreed" else written
    if verdict:
        raise PatchError(verdict)
    _agreed.store, _agreed.attempts = store, _agreed.attempts + 1


def _verdict(store: Any, seconds: float, call: str) -> str:
    """What is wrong; empty if nothing is."""
    if missing := _missing(store, list(range(world_size())), seconds):
        return _not_patched(call, missing)
    settings = [json.loads(store.get(_key(number))) for number in range(world_size())]
    first = settings[0]
    lines = []
    for number, values in enumerate(settings):
        differing = [
            f"{key}={value!r}, not {first.get(key)!r}" for key, value in values.items() if value != first.get(key)
        ]
        if differing:
            lines.append(f"- rank {number}: " + ", ".join(differing))
    if not lines:
        return ""
    more = [f"- and {len(lines) - 10} more ranks"] if len(lines) > 10 else []
    return "\n".join(
        [
            "patch() was not called with the same settings on every rank; these differ from rank 0:",
            *lines[:10],
            *more,
            "Use the same arguments, environment variables and release of ds_frozen_patch on every rank.",
        ]
    )


def _missing(store: Any, ranks: list[int], seconds: float) -> list[int]:
    """The ranks that have written nothing after so many seconds; raises torch's error if the store is gone."""
    deadline = time.monotonic() + seconds
    missing = []
    for number in ranks:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            store.wait([_key(number)], timedelta(seconds=left))
        except RuntimeError as error:
            if type(error).__name__ == "DistNetworkError":
                raise  # rank 0, which serves the store, is gone
            missing.append(number)  # a timeout
    return missing


def _not_patched(call: str, ranks: list[int]) -> str:
    who = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return (
        f"ds_frozen_patch.{call} was called on this rank, but not on rank {who}: their saves would wait for each other"
        " forever. Call it on every rank, or start the program on every node by `ds-frozen-patch run`, or with"
        " DS_FROZEN_PATCH=1 and PYTHONPATH set there too (DeepSpeed's launcher passes on what is in ~/.deepspeed_env)."
    )

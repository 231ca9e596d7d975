"""Every rank must be patched, and told the same: found out at set-up, before the first step, instead of by a hang.

A rank writes what it was told into the process group's store before its engine is made. Making the engine, DeepSpeed
lets all ranks meet; so whoever has written nothing when the first rank comes out of that is not patched. The first
rank reads what all have written, and writes its verdict, which the others read: no collective, and few requests.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from importlib import metadata
from typing import Any

from ..common.collectives import default_store, world_size
from ..common.errors import PatchError
from ..settings import current

_KEY = "ds_frozen_patch/rank"
_VERDICT = "ds_frozen_patch/verdict"
_WAIT_SECONDS = 5.0
_agreed: list[Any] = []
"""The store over which the ranks of this process have agreed, to do so once."""


def announce(strategy: Any) -> None:
    """Write what this rank was told; before its engine is made."""
    store = default_store()
    if store is None or store in _agreed:
        return
    told = {"version": metadata.version("ds_frozen_patch"), **asdict(current())}
    store.set(f"{_KEY}{strategy.global_rank}", json.dumps(told))


def check(strategy: Any) -> None:
    """Raise PatchError on every patched rank if one is not patched, or was told something else; after it is made."""
    store = default_store()
    if store is None or store in _agreed:
        return
    if strategy.global_rank == 0:
        verdict = _verdict(store)
        store.set(_VERDICT, verdict or "agreed")
    elif _missing(store, [0]):
        verdict = _not_patched([0])
    else:  # the first rank writes it as soon as it is this far
        said = store.get(_VERDICT).decode()
        verdict = "" if said == "agreed" else said
    if verdict:
        raise PatchError(verdict)
    _agreed[:] = [store]


def _verdict(store: Any) -> str:
    """What is wrong, or nothing."""
    if missing := _missing(store, list(range(world_size()))):
        return _not_patched(missing)
    told = [json.loads(store.get(f"{_KEY}{rank}")) for rank in range(world_size())]
    odd = {rank: {k: v for k, v in one.items() if v != told[0].get(k)} for rank, one in enumerate(told)}
    lines = [
        f"- rank {rank}: " + ", ".join(f"{key}={value!r}, not {told[0].get(key)!r}" for key, value in differs.items())
        for rank, differs in odd.items()
        if differs
    ]
    if not lines:
        return ""
    more = [f"- and {len(lines) - 10} more ranks"] if len(lines) > 10 else []
    return "\n".join(
        [
            "patch() was not told the same on every rank; the others differ from rank 0:",
            *lines[:10],
            *more,
            "Call patch() with the same arguments, environment variables and release of ds_frozen_patch on every rank.",
        ]
    )


def _missing(store: Any, ranks: list[int]) -> list[int]:
    """Those that have written nothing, some seconds after they should have."""
    deadline = time.monotonic() + _WAIT_SECONDS
    missing = []
    for rank in ranks:
        try:
            left = max(deadline - time.monotonic(), 0.01)
            store.wait([f"{_KEY}{rank}"], timedelta(seconds=left))
        except RuntimeError:  # it timed out
            missing.append(rank)
    return missing


def _not_patched(ranks: list[int]) -> str:
    who = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return (
        f"ds_frozen_patch.patch() was not called on rank {who}, but on this one: their saves would wait for each other"
        " without end. Call it on every rank, or start the program on every machine by `ds-frozen-patch run`, or with"
        " DS_FROZEN_PATCH=1 and PYTHONPATH set there too (DeepSpeed's launcher passes on what is in ~/.deepspeed_env)."
    )

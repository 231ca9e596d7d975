"""Which steps a small save has that the flag's has not, and how long each takes: a part of `nox -s bench`."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import wrapt
from bench import engine
from bench.engine import NATIVE, OURS_UNSYNCED
from bench.saves import SMALL, ranks
from tables import markdown

ROUNDS = 30
STAGES = (2, 3)
STEPS = {
    "find what is frozen, in all of the module": ("ds_frozen_patch.engine.frozen", "to_leave_out"),
    "agree on the save, in a collective": ("ds_frozen_patch.save.saving", "agree"),
    "make the work folder": ("ds_frozen_patch.save.save", "Save.begin"),
    "make the manifest": ("ds_frozen_patch.save.engine", "make_manifest"),
    "wait for all ranks, give the name, and tell of errors, in a collective": (
        "ds_frozen_patch.save.save",
        "Save.publish",
    ),
}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of each step on rank 0, and of whole saves by us and by the flag in turn, by ZeRO stage."""
    found = []
    with ranks(folder) as pool:
        for stage in STAGES:
            print(f"  ZeRO-{stage}", file=sys.stderr, flush=True)
            pool(engine.start, shape=replace(SMALL, tied=False), stage=stage, precision="bf16-true")
            taken: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                for way in (NATIVE, OURS_UNSYNCED):
                    costs = pool(save, way=way, path=str(folder / "saved"))[0]
                    shutil.rmtree(folder / "saved")
                    for step, cost in costs.items() if number else ():
                        taken[step].append(cost)
            pool(engine.end)
            found.append({"stage": stage, "seconds": dict(taken)})
    return found


def save(way: str, path: str) -> dict[str, float]:
    """Save in a rank; returns the seconds of each step that the way has, and of the whole save."""
    taken: dict[str, float] = {}
    work = engine.save
    for step, place in STEPS.items():
        work = _timed(step, *place, taken)(work)
    return taken | {way: work(way, path).seconds}


def _timed(step: str, module: str, name: str, taken: dict[str, float]) -> Callable[[Any], Any]:
    """Return a decorator: while the decorated function runs, calls of another one are timed."""

    @wrapt.transient_function_wrapper(module, name)
    def timing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return wrapped(*args, **kwargs)
        finally:
            taken[step] = time.perf_counter() - begun

    decorator: Callable[[Any], Any] = timing
    return decorator


def render(found: list[dict[str, Any]]) -> str:
    """Return a line for each step."""
    lines = [
        [step, *(f"{1000 * statistics.median(case['seconds'][step]):.1f} ms" for case in found)]
        for step in (*STEPS, OURS_UNSYNCED, NATIVE)
    ]
    header = ["", *(f"ZeRO-{case['stage']}" for case in found)]
    return (
        "The small model in bf16 with untied embeddings, saved by two ranks that only save, one save after the other:"
        " medians on rank 0. What a step waits for the other rank is part of it. The rest of a save is DeepSpeed's and"
        f" Lightning's own.\n\n{markdown(header, lines)}"
    )

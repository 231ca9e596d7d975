"""Which steps a save has that the flag's has not, and how long each takes: a part of `nox -s bench`."""

from __future__ import annotations

import os
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
from bench.saves import LARGE, SMALL, ranks
from tables import markdown

ROUNDS = 30
CASES = [(title, shape, stage) for title, shape in (("small", SMALL), ("large", LARGE)) for stage in (2, 3)]
STEPS = {
    "find what is frozen, in all of the module": ("ds_frozen_patch.core.base", "to_leave_out"),
    "compare a sample of the frozen values with the one at the start": (
        "ds_frozen_patch.core.base",
        "changed_since_start",
    ),
    "agree on the save, in a collective": ("ds_frozen_patch.save.agreement", "agree_on_request"),
    "make the work folder": ("ds_frozen_patch.save.running", "Save.open"),
    "make the manifest": ("ds_frozen_patch.save.leaving_out", "describe"),
    "wait for all ranks, give the name, and tell of errors, in a collective": (
        "ds_frozen_patch.core.save",
        "publish",
    ),
}
FLOOR = "floor of the first step: torch's own walks for state dict, parameters, buffers, modules"


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of each step, and of whole saves with and without us in turn, on rank 0 of each case."""
    found = []
    with ranks(folder) as pool:
        for title, shape, stage in CASES:
            print(f"  {title}, ZeRO-{stage}", file=sys.stderr, flush=True)
            pool(engine.start, shape=replace(shape, tied=False), stage=stage, precision="bf16-true")
            taken: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                for way in (NATIVE, OURS_UNSYNCED):
                    os.sync()  # so that neither waits for what the other has written
                    costs = pool(save, way=way, path=str(folder / "saved"))[0]
                    shutil.rmtree(folder / "saved")
                    costs[FLOOR] = pool(engine.walk)[0]
                    for step, cost in costs.items() if number else ():
                        taken[step].append(cost)
            pool(engine.end)
            found.append({"title": f"{title}, ZeRO-{stage}", "seconds": dict(taken)})
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
        for step in (*STEPS, FLOOR, OURS_UNSYNCED, NATIVE)
    ]
    return (
        "The same models in bf16 with untied embeddings. Two ranks save again and again, and do nothing else. Figures"
        " are medians on rank 0; a step includes its wait for the other rank. The rest of a save is DeepSpeed's and"
        f" Lightning's own.\n\n{markdown(['', *(case['title'] for case in found)], lines)}"
    )

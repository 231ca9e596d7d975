"""Which steps a save has that the flag's has not, and how long each takes: a part of `nox -s bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import wrapt
from bench import finetune
from bench.finetune import NATIVE, OURS_UNSYNCED, WALK
from bench.saves import LARGE, SMALL, measured, ranks
from tables import markdown

ROUNDS = 30
CASES = [(title, shape, stage) for title, shape in (("small", SMALL), ("large", LARGE)) for stage in (2, 3)]
STEPS = {
    "find what is frozen, in all of the module": ("base", "Base.__init__"),
    "compare a sample of the frozen values with the one at the start": ("base", "Base.compared"),
    "agree on the save, in a collective": ("save.agreement", "agree_on_request"),
    "make the work folder": ("save.running", "Save.open"),
    "make the record": ("save.contents", "describe"),
    "wait for all ranks, give the name, and tell of errors, in a collective": ("save.publishing", "publish"),
}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of each step, and of whole saves with and without us, on rank 0 of each case."""
    found = []
    with ranks(folder) as pool:
        for title, shape, stage in CASES:
            group = ((NATIVE, OURS_UNSYNCED, WALK), rounds)
            _, ways = measured(pool, replace(shape, tied=False), stage, "bf16-true", group, save=save)
            taken = {step: ways[OURS_UNSYNCED][step] for step in STEPS}
            taken |= {way: cost["seconds"] for way, cost in ways.items()}
            found.append({"title": f"{title}, ZeRO-{stage}", "seconds": taken})
    return found


def save(way: str, path: str) -> dict[str, Any]:
    """Save in a rank; returns also the seconds of each step that the way has."""
    taken: dict[str, float] = {}
    work = finetune.save
    for step, (module, name) in STEPS.items():
        work = _timed(step, f"ds_frozen_patch.{module}", name, taken)(work)
    return {**work(way, path), **taken}


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
        [step, *(f"{1000 * median(case['seconds'][step]):.1f} ms" for case in found)]
        for step in (*STEPS, WALK, OURS_UNSYNCED, NATIVE)
    ]
    return (
        "The same models in bf16 with untied embeddings. Two ranks save again and again, and do nothing else. Figures"
        " are medians on rank 0; a step includes its wait for the other rank. The rest of a save is DeepSpeed's and"
        f" Lightning's own.\n\n{markdown(['', *(case['title'] for case in found)], lines)}"
    )

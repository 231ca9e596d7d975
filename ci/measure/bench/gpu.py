"""What saves, their first fingerprints and their stalls cost on a GPU: `nox -f ci/noxfile.py -s bench -- gpu`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench import finetune as run
from bench.saves import measured, ranks
from bench.timing import cost_of, judged, ratios, seconds, size
from tables import markdown

ROUNDS = 5
SHAPE = run.Shape(hidden=2048, intermediate=8192, layers=24, vocabulary=32000, lora=64, tied=False)
SAVES = (run.OURS_UNSYNCED, run.NATIVE, run.UNSYNCED, run.OURS, run.NATIVE_SYNCED, run.FLOOR, run.OURS_ASYNC, run.COPY)
PASSES = (run.PASS, run.READ)  # of a base that is whole on each rank
PAIRS = {
    "time, the flag, neither synced (aim 0.5)": (run.OURS_UNSYNCED, run.NATIVE, 0.5),
    "time, the flag, both synced": (run.OURS, run.NATIVE_SYNCED, math.inf),
    "time, floor with fsync": (run.OURS, run.FLOOR, math.inf),
    "stall of an asynchronous save, a copy to the CPU": (run.OURS_ASYNC, run.COPY, math.inf),
}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what saves cost on one GPU, by ZeRO stage; full saves once, as they take long."""
    found = []
    with ranks(folder, 1, "gpu") as pool:
        for stage in (2, 3):
            ways = (*SAVES, run.STEP, *(PASSES if stage == 2 else ()))
            model, costs, full = measured(pool, SHAPE, stage, "bf16-true", (ways, rounds), ((run.FULL,), 1))
            found.append({**model, "ways": costs | full})
    return found


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of costs, and one of what they come to."""
    about = (
        f"One {found[0]['device']}, {found[0]['frozen_bytes'] / 2e9:.2g} billion frozen bf16 parameters,"
        f" {found[0]['trainable'] / 1e6:.2g} M trained ones, saved at the end of a `fit`, where they are on the GPU.\n"
    )
    cases = [case["ways"] for case in found]
    names = (*SAVES, run.FULL, *PASSES)
    lines = [[way, *(cost_of(ways[way]) if way in ways else "" for ways in cases)] for way in names]
    first = [ways[run.OURS_UNSYNCED]["first"] for ways in cases]
    beside = [[step for of_save in ways[run.OURS_ASYNC]["beside"] for step in of_save] for ways in cases]
    aims = [
        *(
            [title, *(judged(ratios(ways, one, other), aim) for ways in cases)]
            for title, (one, other, aim) in PAIRS.items()
        ),
        ["steps while it writes", *(seconds(each) if each else "none was long enough" for each in beside)],
        ["steps with nothing beside them", *(seconds(ways[run.STEP]) for ways in cases)],
        ["first save, with the fingerprints", *(f"{cost['seconds']:.2f} s" for cost in first)],
        ["memory of the GPU that it takes", *(size(cost["gpu"]) for cost in first)],
        ["memory of the GPU that a later one takes", *(size(max(ways[run.OURS]["gpu"])) for ways in cases)],
    ]
    header = [f"ZeRO-{case['stage']}" for case in found]
    return f"{about}\n{markdown(['', *header], lines)}\n{markdown(['ours against', *header], aims)}"

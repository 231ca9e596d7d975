"""Time and memory of a resume, and of a test from a checkpoint, until the first batch: a part of `ci/bench.py`."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import bench_run
from bench_figures import ratios, rows, size, spread
from bench_run import FULL, MENDED, NOTHING, OURS, RANKS, Shape
from ranks import RankError, Ranks

ROUNDS = 2
SHAPE = Shape(hidden=1024, intermediate=4096, layers=16, vocabulary=32000, lora=64, tied=False)
VERBS = {"fit": "resume `fit`", "test": "`test`"}
TRIED = {
    (2, "fit"): (NOTHING, OURS, FULL),
    (2, "test"): (NOTHING, OURS, FULL),
    (3, "fit"): (NOTHING, OURS, FULL),
    (3, "test"): (NOTHING, OURS, FULL, MENDED),
}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """What each way costs, or why it fails, by ZeRO stage and verb."""
    found: list[dict[str, Any]] = []
    for stage in (2, 3):
        paths = save(folder / f"zero{stage}", stage)
        for verb in VERBS:
            ways: dict[str, dict[str, Any]] = {way: {"seconds": [], "memory": []} for way in TRIED[stage, verb]}
            for number in range(rounds):
                for way, cost in ways.items():
                    if "failed" in cost or (way == NOTHING and number):
                        continue
                    print(f"  {verb}, ZeRO-{stage}, {way}", file=sys.stderr, flush=True)
                    pool = Ranks(RANKS, folder / "ranks.txt")
                    try:
                        given = {"verb": verb, "way": way, "shape": SHAPE, "stage": stage, "path": paths[way]}
                        starts = pool(bench_run.begin, **given)
                        cost["seconds"].append(max(start.seconds for start in starts))
                        cost["memory"].append(max(start.memory for start in starts))
                    except RankError as error:
                        if way != FULL or stage != 3:
                            raise
                        cost["failed"] = next(": ".join(raised) for raised in error.raised if raised)
                    finally:
                        pool.stop()
            found.append({"stage": stage, "verb": verb, "ways": ways})
    return found


def save(folder: Path, stage: int) -> dict[str, str | None]:
    """The checkpoint that each way begins from."""
    made: dict[str, str | None] = {OURS: f"{folder}/trainable-only.ckpt", FULL: f"{folder}/full.ckpt"}
    pool = Ranks(RANKS, folder.with_suffix(".txt"))
    try:
        pool(bench_run.start, shape=SHAPE, stage=stage, precision="bf16-true")
        for way, path in made.items():
            pool(bench_run.save, way=way, path=path)
    finally:
        pool.stop()
    return made | {MENDED: made[FULL], NOTHING: None}


def render(found: list[dict[str, Any]]) -> str:
    """A line for each way."""
    lines, failures = [], []
    for case in found:
        ways = case["ways"]
        for way, cost in ways.items():
            begun = [f"{VERBS[case['verb']]}, ZeRO-{case['stage']}", way]
            if "failed" in cost:
                lines.append([*begun, "fails", "", ""])
                failures.append(cost["failed"])
                continue
            rival = MENDED if MENDED in ways else FULL
            against = ""
            if way == OURS:
                times, peaks = ({name: one[what] for name, one in ways.items()} for what in ("seconds", "memory"))
                peak = statistics.median(ratios(peaks, OURS, rival))
                against = f"{spread(ratios(times, OURS, rival))} of the time, {peak:.2f} of the peak"
            lines.append([*begun, f"{spread(cost['seconds'])}", size(statistics.median(cost["memory"])), against])
    header = ["", "", "seconds", "peak of a rank", "ours against a full checkpoint"]
    said = "".join(f" In ZeRO-3 plain Lightning cannot test from any checkpoint: `{why}`." for why in failures)
    if failures:
        said += (
            " With that method put in, which has nothing to do, DeepSpeed loads a full one: it builds the whole model"
            " in fp32 on every rank."
        )
    return (
        "From the call to its first batch, in processes that have done nothing else, with 0.7 GB of frozen weights and"
        f" 8.4 M trained parameters.{said}\n\n{rows(header, lines)}"
    )

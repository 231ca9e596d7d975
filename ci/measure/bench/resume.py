"""Time and memory of a resume, and of a test from a checkpoint, until the first batch: a part of `nox -s bench`."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import engine
from bench.engine import FULL, MENDED, NOTHING, OURS, Shape
from bench.saves import ranks
from bench.words import ratios, size, spread
from ranks import RankError
from tables import markdown

ROUNDS = 8
SHAPE = Shape(hidden=1024, intermediate=4096, layers=16, vocabulary=32000, lora=64, tied=False)
VERBS = {"fit": "resume `fit`", "test": "`test`"}
TRIED = {
    (2, "fit"): (NOTHING, OURS, FULL),
    (2, "test"): (NOTHING, OURS, FULL),
    (3, "fit"): (NOTHING, OURS, FULL),
    (3, "test"): (NOTHING, OURS, FULL, MENDED),
}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the model, and what each way costs, or why it fails, by ZeRO stage and verb."""
    cases: list[dict[str, Any]] = []
    for stage in (2, 3):
        model, paths = save(folder / f"zero{stage}", stage)
        for verb in VERBS:
            ways: dict[str, dict[str, Any]] = {way: {"seconds": [], "memory": []} for way in TRIED[stage, verb]}
            for number in range(rounds):
                for way in random.Random(number).sample(TRIED[stage, verb], len(ways)):
                    cost = ways[way]
                    if "failed" in cost:
                        continue
                    print(f"  {verb}, ZeRO-{stage}, {way}", file=sys.stderr, flush=True)
                    given = {"verb": verb, "way": way, "shape": SHAPE, "stage": stage, "path": paths[way]}
                    try:
                        with ranks(folder) as pool:
                            starts = pool(engine.begin, **given)
                    except RankError as error:
                        if way != FULL or stage != 3:
                            raise
                        cost["failed"] = next(": ".join(raised) for raised in error.raised if raised)
                        continue
                    cost["seconds"].append(max(start.seconds for start in starts))
                    cost["memory"].append(max(start.memory for start in starts))
            cases.append({"stage": stage, "verb": verb, "ways": ways})
    return {**model, "cases": cases}


def save(folder: Path, stage: int) -> tuple[dict[str, int], dict[str, str | None]]:
    """Return the model, and the checkpoint that each way begins from."""
    made: dict[str, str | None] = {OURS: f"{folder}/trainable-only.ckpt", FULL: f"{folder}/full.ckpt"}
    with ranks(folder.parent) as pool:
        model: dict[str, int] = pool(engine.start, shape=SHAPE, stage=stage, precision="bf16-true")[0]
        for way, path in made.items():
            pool(engine.save, way=way, path=path)
    return model, made | {MENDED: made[FULL], NOTHING: None}


def render(found: dict[str, Any]) -> str:
    """Return a line for each way."""
    lines, failures = [], []
    for case in found["cases"]:
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
            " If a method of that name is added, which does nothing, DeepSpeed loads a full one, and builds the whole"
            " model in fp32 on every rank."
        )
    about = (
        f"{size(found['frozen_bytes'])} of frozen bf16 weights and {found['trainable'] / 1e6:.2g} M trained parameters"
    )
    return (
        f"The time from the call to its first batch, in new processes, with {about}.{said}\n\n{markdown(header, lines)}"
    )

"""Time and memory of a resume, and of a test from a checkpoint, until the first batch: a part of `nox -s bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench import finetune
from bench.finetune import FULL, MENDED, NOTHING, OURS, Shape
from bench.saves import ranks
from bench.timing import Costs, alternate, ratios, size, spread
from kit.processes import RankError
from tables import markdown

ROUNDS = 8
SHAPE = Shape(hidden=1024, intermediate=4096, layers=16, vocabulary=32000, lora=64, tied=False)
VERBS = {"fit": "resume `fit`", "test": "`test`"}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the model, and what each way costs, or why it fails, by ZeRO stage and verb."""
    cases: list[dict[str, Any]] = []
    for stage in (2, 3):
        made = {OURS: f"{folder}/{stage}/trainable-only.ckpt", FULL: f"{folder}/{stage}/full.ckpt"}
        with ranks(folder) as pool:
            model = pool(finetune.start, shape=SHAPE, stage=stage, precision="bf16-true", ways=())[0]
            for way, path in made.items():
                pool(finetune.save, way=way, path=path)
        for verb in VERBS:
            paths: dict[str, str | None] = {NOTHING: None, **made}
            if (stage, verb) == (3, "test"):
                paths[MENDED] = made[FULL]

            def begin(way: str, given: Any = (stage, verb, paths)) -> Costs:
                stage, verb, paths = given
                print(f"  {verb}, ZeRO-{stage}, {way}", file=sys.stderr, flush=True)
                try:
                    with ranks(folder) as pool:
                        starts = pool(finetune.begin, verb=verb, way=way, shape=SHAPE, stage=stage, path=paths[way])
                except RankError as error:
                    if way != FULL or stage != 3:
                        raise
                    return {"failed": next(": ".join(raised) for raised in error.raised if raised)}
                return {what: max(start[what] for start in starts) for what in ("seconds", "memory")}

            cases.append({"stage": stage, "verb": verb, "ways": alternate(tuple(paths), rounds, begin)})
    return {**model, "cases": cases}


def render(found: dict[str, Any]) -> str:
    """Return a line for each way."""
    lines, failures = [], []
    for case in found["cases"]:
        ways = case["ways"]
        rival = MENDED if MENDED in ways else FULL
        for way, cost in ways.items():
            begun = [f"{VERBS[case['verb']]}, ZeRO-{case['stage']}", way]
            if "failed" in cost:
                lines.append([*begun, "fails", "", ""])
                failures.append(cost["failed"][0])
                continue
            against = ""
            if way == OURS:
                peak = median(ratios(ways, OURS, rival, "memory"))
                against = f"{spread(ratios(ways, OURS, rival))} of the time, {peak:.2f} of the peak"
            lines.append([*begun, spread(cost["seconds"]), size(median(cost["memory"])), against])
    said = "".join(f" In ZeRO-3 plain Lightning cannot test from any checkpoint: `{why}`." for why in failures)
    if failures:
        said += (
            " If a method of that name is added, which does nothing, DeepSpeed loads a full one, and builds the whole"
            " model in fp32 on every rank."
        )
    about = (
        f"{size(found['frozen_bytes'])} of frozen bf16 weights and {found['trainable'] / 1e6:.2g} M trained parameters"
    )
    header = ["", "", "seconds", "peak of a rank", "ours against a full checkpoint"]
    return (
        f"The time from the call to its first batch, in new processes, with {about}.{said}\n\n{markdown(header, lines)}"
    )

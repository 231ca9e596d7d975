"""Bytes on disk, time to save and memory that a save takes, of all systems: a part of `nox -s bench`."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from bench import engine
from bench.engine import (
    DEEPSPEED,
    FLOOR,
    FULL,
    FULL_SYNCED,
    HUGGING_FACE,
    NATIVE,
    NATIVE_SYNCED,
    OPTIMIZER_BYTES,
    OURS,
    OURS_UNSYNCED,
    RANKS,
    UNSYNCED,
    Shape,
)
from bench.words import judged, ratios, seconds, size, spread
from ranks import Ranks
from tables import markdown

from ds_frozen_patch import inspect

ROUNDS = 15
STAGES = (1, 2, 3)
SMALL = Shape(hidden=512, intermediate=1408, layers=4, vocabulary=16000, lora=32, tied=True)
LARGE = Shape(hidden=1536, intermediate=4096, layers=20, vocabulary=32000, lora=128, tied=True)
WAYS = (OURS_UNSYNCED, NATIVE, FULL, DEEPSPEED, UNSYNCED, OURS, NATIVE_SYNCED, FLOOR)
PAIR = (OURS_UNSYNCED, NATIVE)
# By the title of a table: the model, its precision, and the systems.
CASES = {
    "small": (SMALL, "bf16-true", WAYS),
    "small, fp32": (SMALL, "32-true", (*WAYS, HUGGING_FACE)),
    "large": (LARGE, "bf16-true", WAYS),
}
# The aims: at most so much of the floor's bytes, of the native flag's time if the model is large, or so many seconds
# more if it is small; of the floor's time, and of the trained bytes.
BYTES, TIME, MORE, FLOOR_TIME, MEMORY = 1.02, 1.05, 0.005, 1.5, 0.05
ALLOWED = 256 << 10  # bytes beside those of the floor


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what each system's saves cost, by model and ZeRO stage."""
    found = []
    with ranks(folder) as pool:
        for title, (shape, precision, ways) in CASES.items():
            for tied, stage in product((True, False), STAGES):
                case = {"title": title, "precision": precision, "tied": tied, "stage": stage}
                given = replace(shape, tied=tied)
                model, costs, pairs = measured(pool, given, stage, precision, (ways, rounds), (PAIR, 2 * rounds))
                found.append(case | model | {"ways": costs, "pairs": pairs})
    return found


@contextmanager
def ranks(folder: Path, count: int = RANKS) -> Iterator[Ranks]:
    """Have a pool of ranks that write into this folder."""
    pool = Ranks(count, folder / "ranks.txt")
    try:
        yield pool
    finally:
        pool.stop()


def measured(
    pool: Ranks, shape: Shape, stage: int, precision: str, *turns: tuple[tuple[str, ...], int]
) -> list[dict[str, Any]]:
    """Train a model; returns its sizes, and what saves cost in the ways of each turn for so many rounds."""
    print(f"  {shape}, {precision}, ZeRO-{stage}", file=sys.stderr, flush=True)
    ways = [way for ways, _ in turns for way in ways]
    model = pool(engine.start, shape=shape, stage=stage, precision=precision, ways=ways)[0]
    costs = [saves(pool, pool.log.with_name("saved"), ways, rounds) for ways, rounds in turns]
    pool(engine.end)
    return [model, *costs]


def saves(pool: Ranks, place: Path, ways: tuple[str, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """Return what saves cost in these ways; the first round is kept apart."""
    found: dict[str, dict[str, Any]] = {way: {"seconds": [], "memory": []} for way in ways}
    for number, way, costs, written in turns(pool, place, ways, rounds):
        cost = {"seconds": costs[0].seconds, "memory": max(rank.memory for rank in costs)}
        if number:
            for name, value in cost.items():
                found[way][name].append(value)
        else:
            found[way] |= {"first": cost, "bytes": written}
    return found


def turns(
    pool: Ranks, place: Path, ways: tuple[str, ...], rounds: int
) -> Iterator[tuple[int, str, list[engine.Cost], int]]:
    """Save in these ways, round after round from 0 on, each later one in another order.

    Yields the round, the way, what its save has cost each rank, and its bytes.
    """
    for number in range(rounds + 1):
        for way in shuffled(ways, number):
            os.sync()  # so that nobody waits for what others have written
            costs = pool(engine.save, way=way, path=str(place))
            check(way, place)
            written = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            shutil.rmtree(place, ignore_errors=True)  # fingerprints and copies write nothing
            yield number, way, costs, written


def shuffled(ways: tuple[str, ...], number: int) -> list[str]:
    """Return the ways in the order of a round: as they are given in round 0, and in another order in each later one."""
    return random.Random(number).sample(ways, len(ways)) if number else list(ways)


def check(way: str, place: Path) -> None:
    """Raise unless a manifest is there where it was saved under `patch()`, and nowhere else."""
    ours = way in engine.SETTINGS
    saves = ours or way in (NATIVE, NATIVE_SYNCED, FULL, FULL_SYNCED, DEEPSPEED)
    if saves and (inspect(place).manifest is None) == ours:
        raise AssertionError(f"{way} has{' no' if ours else ' a'} manifest")


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of costs for each model, and one of the aims."""
    parts = [
        "A Llama with LoRA on its attention, with tied or untied embeddings, after a step of AdamW, saved by both"
        " ranks. The first columns write into the page cache, the last ones to the disk. For the floor, each rank"
        " writes its share of the trained weights, their fp32 masters and the two moments. Hugging Face's Trainer does"
        " not train in bf16 on CPU ranks with DeepSpeed, so it is in the table of fp32.\n"
    ]
    for title, (_, precision, ways) in CASES.items():
        cases = [case for case in found if case["title"] == title]
        parts.append(f"{about(cases, precision)}:\n\n{markdown(['', *ways], [costs(case) for case in cases])}")
    header = [
        "ours against",
        f"bytes, floor (aim {BYTES})",
        f"time, the flag, neither synced (aim {TIME} if large, +{1000 * MORE:.0f} ms if small)",
        "time, the flag, both synced",
        f"time, floor with fsync (aim {FLOOR_TIME} if large)",
        f"memory above the flag's, of the trained bytes (aim {MEMORY:.0%})",
        "first save",
    ]
    slower = [figures(case)["slower"] for case in found if writes_the_same(case)]
    parts.append(
        "The first save of a process also computes the fingerprints. Only the last column has its extra time and"
        " memory. Ratios are medians over the rounds, with the minimum and maximum; those against the flag are of twice"
        " as many rounds, of these two alone. In ZeRO 1 and 2, the flag saves tied embeddings too, so it writes more"
        " bytes. Beyond what the flag does, `patch()` finds what is frozen, makes the manifest, and waits for all ranks"
        f" before it publishes the checkpoint. Where the bytes are the same, that takes {1000 * min(slower):.0f} to"
        f" {1000 * max(slower):.0f} ms in the median, which is noticeable only in short saves.\n\n"
        f"{markdown(header, [aims(case) for case in found])}"
    )
    return "\n".join(parts)


def about(cases: list[dict[str, Any]], precision: str) -> str:
    """Return the model of a table."""
    frozen = " or ".join(size(count) for count in sorted({case["frozen_bytes"] for case in cases}))
    (trainable,) = {case["trainable"] for case in cases}
    kind = "bf16" if precision == "bf16-true" else "fp32"
    return f"{frozen} of frozen {kind} weights, {trainable / 1e6:.2g} M trained parameters"


def costs(case: dict[str, Any]) -> list[str]:
    """Return a line of a table: bytes and seconds of each system."""
    return [name(case), *(f"{size(way['bytes'])}, {seconds(way['seconds'])}" for way in case["ways"].values())]


def name(case: dict[str, Any]) -> str:
    """Return a line's name."""
    return f"ZeRO-{case['stage']}, {'tied' if case['tied'] else 'untied'}"


def aims(case: dict[str, Any]) -> list[str]:
    """Return a line of the last table."""
    found = figures(case)
    more = f"{1000 * found['slower']:+.0f} ms"
    if not writes_the_same(case):
        flag = f"{spread(found['time'])}, more bytes, {more}"
    elif case["title"] == "large":
        flag = f"{judged(found['time'], TIME)}, {more}"
    else:
        flag = f"{spread(found['time'])}, {more if found['slower'] <= MORE else f'**{more} missed**'}"
    floor = judged(found["floor time"], FLOOR_TIME) if case["title"] == "large" else spread(found["floor time"])
    return [
        f"{case['title']}, {name(case)}",
        judged([found["bytes"]], BYTES, ".3f"),
        flag,
        spread(found["synced time"]),
        floor,
        judged(found["memory"], MEMORY, ".1%"),
        f"+{found['first seconds']:.2f} s, +{size(found['first memory'])}",
    ]


def writes_the_same(case: dict[str, Any]) -> bool:
    """Whether the flag writes as much as we do."""
    ours, native = (case["ways"][way]["bytes"] for way in PAIR)
    return bool(native < 1.1 * ours)


def figures(case: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that there are aims for, and those of the first save."""
    times, pairs = ({way: cost["seconds"] for way, cost in case[what].items()} for what in ("ways", "pairs"))
    ours, native = case["ways"][OURS_UNSYNCED], case["ways"][NATIVE]
    each = OPTIMIZER_BYTES + engine.weight_bytes(case["stage"], case["precision"])
    floor = each * case["trainable"] + case["buffer_bytes"]
    return {
        "bytes": ours["bytes"] / (floor + ALLOWED),
        "time": ratios(pairs, *PAIR),
        "synced time": ratios(times, OURS, NATIVE_SYNCED),
        "slower": statistics.median(a - b for a, b in zip(*(pairs[way] for way in PAIR), strict=True)),
        "floor time": ratios(times, OURS, FLOOR),
        "memory": [(own - other) / floor for own, other in zip(ours["memory"], native["memory"], strict=True)],
        "first seconds": ours["first"]["seconds"] - statistics.median(ours["seconds"]),
        "first memory": ours["first"]["memory"] - statistics.median(ours["memory"]),
    }

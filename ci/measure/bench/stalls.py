"""For how long a save stops training, on a fast disk and a slow one, and what it costs the steps beside it.

A part of `nox -s bench`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import caching_disk
from bench import engine
from bench.engine import COPY, FSDP, FSDP_ASYNC, FULL, HUGGING_FACE, NATIVE, OURS, OURS_ASYNC, RANKS, Shape
from bench.saves import ranks, turns
from bench.words import judged, ratios, seconds, size, spread
from ranks import Ranks
from tables import markdown

ROUNDS = 5
SHAPE = Shape(hidden=1024, intermediate=2816, layers=6, vocabulary=8000, lora=160, tied=False)
SPEED = 50e6
STAGES = (2, 3)
FAST, SLOW = "this disk", f"a disk of {SPEED / 1e6:.0f} MB/s"
PEERS = (HUGGING_FACE, FSDP_ASYNC, FSDP)
WAYS = {FAST: (COPY, OURS_ASYNC, OURS, NATIVE, FULL, *PEERS), SLOW: (COPY, OURS_ASYNC, OURS, FULL, *PEERS)}
# The aims: at most so many times a copy, and so many seconds more; and how much slower a step may be.
TIMES, MORE, STEP = 1.2, 0.01, 1.03


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what each system's saves cost, by disk and ZeRO stage, and seconds of steps with nothing beside them."""
    found = []
    with ranks(folder) as pool, disks(folder) as places:
        for stage in STAGES:
            model = pool(engine.start, shape=SHAPE, stage=stage, precision="32-true", ways=PEERS)[0]
            for disk, place in places.items():
                print(f"  ZeRO-{stage}, {disk}", file=sys.stderr, flush=True)
                alone = slowest(pool(engine.steps, count=3 * rounds))
                few = rounds if disk == FAST else max(rounds // 3, 1)
                ways = saved(pool, place, WAYS[disk], few)
                found.append(
                    {"stage": stage, "disk": disk, "trainable": model["trainable"], "alone": alone, "ways": ways}
                )
            pool(engine.end)
    return found


@contextmanager
def disks(folder: Path) -> Iterator[dict[str, Path]]:
    """Have this disk, and a slow one."""
    backing, slow = folder / "backing", folder / "slow"
    backing.mkdir()
    with caching_disk.mounted(backing, slow, speed=SPEED):
        yield {FAST: folder, SLOW: slow}


def saved(pool: Ranks, place: Path, ways: tuple[str, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """Return what saves cost in these ways, after one round more."""
    found: dict[str, dict[str, Any]] = {way: {"seconds": [], "beside": [], "until": [], "memory": 0} for way in ways}
    for number, way, costs, _ in turns(pool, place / "saved", ways, rounds):
        found[way]["memory"] = max(found[way]["memory"], *(rank.memory for rank in costs))
        if number:
            found[way]["seconds"].append(max(rank.seconds for rank in costs))
            found[way]["until"].append(max(rank.until for rank in costs))
            found[way]["beside"] += slowest([rank.beside for rank in costs])
    return found


def slowest(of_ranks: list[tuple[float, ...]]) -> list[float]:
    """Return the seconds of each step on the rank that took longest."""
    return [max(each) for each in zip(*of_ranks, strict=True)]


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of stalls, and one of steps and aims."""
    ways = WAYS[FAST]
    lines, aims = [], []
    for case in found:
        name = f"ZeRO-{case['stage']}, {case['disk']}"
        costs = case["ways"]
        lines.append([name, *(seconds(costs[way]["seconds"]) if way in costs else "" for way in ways)])
        ours, copy = costs[OURS_ASYNC], costs[COPY]
        limit = TIMES * statistics.median(copy["seconds"]) + MORE
        stall = statistics.median(ours["seconds"])
        step = [one / statistics.median(case["alone"]) for one in ours["beside"]]
        times = {way: cost["seconds"] for way, cost in costs.items()}
        aims.append(
            [
                name,
                f"{1000 * stall:.0f} of {1000 * limit:.0f} ms" + ("" if stall <= limit else " **missed**"),
                spread(ratios(times, OURS_ASYNC, OURS), ".3f"),
                seconds(ours["until"]),
                f"{len(step)} steps: {judged(step, STEP)}" if step else "none was long enough",
                size(ours["memory"]),
            ]
        )
    header = [
        OURS_ASYNC,
        f"stall (aim: {TIMES} of a copy, and {1000 * MORE:.0f} ms)",
        "share of a synchronous save's stall",
        "until all is written",
        f"time of a step during the writing, against one alone (aim {STEP})",
        "memory at most",
    ]
    return (
        f"How long a save stops training, on {RANKS} ranks with one core each, with"
        f" {found[0]['trainable'] / 1e6:.2g} M trained parameters in fp32. The slow disk is a FUSE file system that"
        f" writes {SPEED / 1e6:.0f} MB/s.\n\n{markdown(['', *ways], lines)}\n{markdown(header, aims)}"
    )

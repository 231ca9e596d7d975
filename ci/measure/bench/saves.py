"""Bytes on disk, time to save and memory that a save takes, of all systems: a part of `nox -s bench`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench import finetune as run
from bench.timing import Costs, alternate, cost_of, judged, missed, ratios, size, spread
from kit.processes import Ranks
from tables import markdown

from ds_frozen_patch import inspect

ROUNDS = 15
STAGES = (1, 2, 3)
SMALL = run.Shape(hidden=512, intermediate=1408, layers=4, vocabulary=16000, lora=32, tied=True)
LARGE = run.Shape(hidden=1536, intermediate=4096, layers=20, vocabulary=32000, lora=128, tied=True)
WAYS = (run.OURS_UNSYNCED, run.NATIVE, run.FULL, run.DEEPSPEED, run.UNSYNCED, run.OURS, run.NATIVE_SYNCED, run.FLOOR)
PAIR = (run.OURS_UNSYNCED, run.NATIVE)
# By the title of a table: the model, its precision, and the systems.
CASES = {
    "small": (SMALL, "bf16-true", WAYS),
    "small, fp32": (SMALL, "32-true", (*WAYS, run.HUGGING_FACE)),
    "large": (LARGE, "bf16-true", WAYS),
}
# The aims: at most so much of the floor's bytes, of the native flag's time if the model is large (with neither synced,
# and with both), or so many seconds more if it is small; of the floor's time; and no memory: less than 0.1% of the
# trained bytes, since measurements vary.
BYTES, TIME, SYNCED_TIME, MORE, FLOOR_TIME, MEMORY = 1.02, 0.7, 0.8, 0.002, 1.25, 0.001
ALLOWED = 256 << 10  # bytes beside those of the floor
ABOUT = """\
A Llama with LoRA on its attention, with tied or untied embeddings, after a step of AdamW, saved by both ranks. The \
first columns write into the page cache, the last ones to the disk. For the floor, each rank writes its share of the \
trained weights, their fp32 masters and the two moments. Hugging Face's Trainer does not train in bf16 on CPU ranks \
with DeepSpeed, so it is in the table of fp32.
"""


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what each system's saves cost, by model and ZeRO stage."""
    found = []
    with ranks(folder) as pool:
        for title, (shape, precision, ways) in CASES.items():
            for tied, stage in product((True, False), STAGES):
                given = replace(shape, tied=tied)
                model, costs, pairs = measured(pool, given, stage, precision, (ways, rounds), (PAIR, 2 * rounds))
                found.append(
                    {"title": title, "precision": precision, "tied": tied, **model, "ways": costs, "pairs": pairs}
                )
    return found


@contextmanager
def ranks(folder: Path, count: int = run.RANKS, accelerator: str = "cpu") -> Iterator[Ranks]:
    """Have a pool of ranks that write into this folder."""
    pool = Ranks(count, folder / f"ranks{count}.txt", accelerator)
    try:
        yield pool
    finally:
        pool.stop()


def measured(
    pool: Ranks,
    shape: run.Shape,
    stage: int,
    precision: str,
    *groups: tuple[Sequence[str], int],
    places: Sequence[Path] = (),
    save: Callable[..., dict[str, Any]] = run.save,
) -> list[dict[str, Any]]:
    """Train a model; returns its sizes, and for each group of ways what so many rounds cost, in a place of its own."""
    print(f"  {shape}, {precision}, ZeRO-{stage}", file=sys.stderr, flush=True)
    every = [way for ways, _ in groups for way in ways]
    model = pool(run.start, shape=shape, stage=stage, precision=precision, ways=every)[0]
    folders = places or [pool.log.parent] * len(groups)
    costs = [
        alternate(ways, rounds, partial(_cost, pool, save, folder / "saved"))
        for (ways, rounds), folder in zip(groups, folders, strict=True)
    ]
    pool(run.end)
    return [{"stage": stage, **model}, *costs]


def _cost(pool: Ranks, save: Callable[..., dict[str, Any]], place: Path, way: str) -> Costs:
    """Save in a way, and remove it; returns what that cost rank 0, the most memory of a rank, and the bytes."""
    costs = pool(save, way=way, path=str(place))
    is_ours = way in run.SETTINGS
    if is_ours or way in (run.NATIVE, run.NATIVE_SYNCED, run.FULL, run.FULL_SYNCED, run.DEEPSPEED):
        record = inspect(place).record
        assert (record is not None and record.is_trainable_only) == is_ours, f"{way}: with a record, or without one"
    written = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    shutil.rmtree(place, ignore_errors=True)  # fingerprints and copies write nothing
    return {**costs[0], "memory": max(cost["memory"] for cost in costs), "bytes": written}


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of costs for each model, and one of the aims."""
    parts = [ABOUT]
    for title, (_, precision, ways) in CASES.items():
        cases = [case for case in found if case["title"] == title]
        frozen = " or ".join(size(count) for count in sorted({case["frozen_bytes"] for case in cases}))
        kind = "bf16" if precision == "bf16-true" else "fp32"
        rows = [[name(case), *map(cost_of, case["ways"].values())] for case in cases]
        about = f"{frozen} of frozen {kind} weights, {cases[0]['trainable'] / 1e6:.2g} M trained parameters"
        parts.append(f"{about}:\n\n{markdown(['', *ways], rows)}")
    header = [
        "ours against",
        f"bytes, floor (aim {BYTES})",
        f"time, the flag, neither synced (aim {TIME} if large, +{1000 * MORE:.0f} ms if small)",
        f"time, the flag, both synced (aim {SYNCED_TIME} if large)",
        f"time, floor with fsync (aim {FLOOR_TIME} if large)",
        f"memory above the flag's, of the trained bytes (aim {MEMORY:.1%})",
        "first save",
    ]
    slower = [seconds_more(case) for case in found if writes_the_same(case)]
    parts.append(
        "The first save of a process also computes the fingerprints. Only the last column has its extra time and"
        " memory. Ratios are medians over the rounds, with the minimum and maximum; those against the flag are of twice"
        " as many rounds, of these two alone. In ZeRO 1 and 2, the flag saves tied embeddings too, so it writes more"
        " bytes. Beyond what the flag does, `patch()` finds what is frozen, makes the record, and waits for all ranks"
        f" before it publishes the checkpoint. Where the bytes are the same, that takes {1000 * min(slower):.0f} to"
        f" {1000 * max(slower):.0f} ms in the median, which is noticeable only in short saves.\n\n"
        f"{markdown(header, [aims(case) for case in found])}"
    )
    return "\n".join(parts)


def name(case: dict[str, Any]) -> str:
    """Return a line's name."""
    return f"ZeRO-{case['stage']}, {'tied' if case['tied'] else 'untied'}"


def writes_the_same(case: dict[str, Any]) -> bool:
    """Whether the flag writes as much as we do."""
    ours, native = (case["ways"][way]["bytes"][-1] for way in PAIR)
    return bool(native < 1.1 * ours)


def seconds_more(case: dict[str, Any]) -> float:
    """Return the seconds that we take more than the flag."""
    ours, native = (case["pairs"][way]["seconds"] for way in PAIR)
    return float(median(a - b for a, b in zip(ours, native, strict=True)))


def aims(case: dict[str, Any]) -> list[str]:
    """Return a line of the last table."""
    ways, is_large = case["ways"], case["title"] == "large"
    ours, native = ways[run.OURS_UNSYNCED], ways[run.NATIVE]
    slower = seconds_more(case)
    more = f"{1000 * slower:+.0f} ms"
    times = ratios(case["pairs"], *PAIR)
    if not writes_the_same(case):
        flag = f"{spread(times)}, more bytes, {more}"
    elif is_large:
        flag = f"{judged(times, TIME)}, {more}"
    else:
        flag = f"{spread(times)}, {missed(more, slower > MORE)}"
    synced, against_floor = (ratios(ways, run.OURS, other) for other in (run.NATIVE_SYNCED, run.FLOOR))
    floor = run.trained_bytes(case["stage"], case["precision"], case["trainable"]) + case["buffer_bytes"]
    first = {what: ours["first"][what] - median(ours[what]) for what in ("seconds", "memory")}
    return [
        f"{case['title']}, {name(case)}",
        judged([ours["bytes"][-1] / (floor + ALLOWED)], BYTES, ".3f"),
        flag,
        judged(synced, SYNCED_TIME) if is_large else spread(synced),
        judged(against_floor, FLOOR_TIME) if is_large else spread(against_floor),
        judged([(a - b) / floor for a, b in zip(ours["memory"], native["memory"], strict=True)], MEMORY, ".1%"),
        f"+{first['seconds']:.2f} s, +{size(first['memory'])}",
    ]

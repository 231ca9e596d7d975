"""For how long a save stops training, on a fast disk and a slow one, and what it costs the steps beside it.

A part of `nox -s bench`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.finetune import COPY, FSDP, FSDP_ASYNC, FULL, HUGGING_FACE, NATIVE, OURS, OURS_ASYNC, RANKS, STEP, Shape
from bench.saves import measured, ranks
from bench.timing import judged, ratios, seconds, size, spread
from kit import nodes
from tables import markdown

ROUNDS = 5
SHAPE = Shape(hidden=1024, intermediate=2816, layers=6, vocabulary=8000, lora=160, tied=False)
SPEED = 50e6
FAST, SLOW = "this disk", f"a disk of {SPEED / 1e6:.0f} MB/s"
WAYS = (COPY, OURS_ASYNC, OURS, NATIVE, FULL, HUGGING_FACE, FSDP_ASYNC, FSDP)
# The aims: at most so many times a copy plus so many seconds; so much of torch's stall; and of a step's time alone.
TIMES, MORE, OF_DCP, SLOWER_STEP = 1.2, 0.01, 0.5, 1.03


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what each system's saves cost, by disk and ZeRO stage, and training steps with nothing beside them."""
    found = []
    backing, slow = folder / "backing", folder / "slow"
    backing.mkdir()
    groups = (((STEP, *WAYS), rounds), ((STEP, *(way for way in WAYS if way != NATIVE)), max(rounds // 3, 1)))
    with ranks(folder) as pool, nodes.mounted(backing, slow, speed=SPEED):
        for stage in (2, 3):
            model, *costs = measured(pool, SHAPE, stage, "32-true", *groups, places=(folder, slow))
            found += [{**model, "disk": disk, "ways": ways} for disk, ways in zip((FAST, SLOW), costs, strict=True)]
    return found


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of stalls, and one of steps and aims."""
    lines, aims = [], []
    for case in found:
        name, ways = f"ZeRO-{case['stage']}, {case['disk']}", case["ways"]
        lines.append([name, *(seconds(ways[way]) if way in ways else "" for way in WAYS)])
        ours = ways[OURS_ASYNC]
        limit, stall = TIMES * median(ways[COPY]["seconds"]) + MORE, median(ours["seconds"])
        alone = median(ways[STEP]["seconds"])
        steps = [step / alone for of_save in ours["beside"] for step in of_save]
        aims.append(
            [
                name,
                f"{1000 * stall:.0f} of {1000 * limit:.0f} ms" + (" **missed**" if stall > limit else ""),
                judged(ratios(ways, OURS_ASYNC, FSDP_ASYNC), OF_DCP),
                spread(ratios(ways, OURS_ASYNC, OURS), ".3f"),
                seconds(ours["until"]),
                f"{len(steps)} steps: {judged(steps, SLOWER_STEP)}" if steps else "none was long enough",
                size(max(ours["memory"])),
            ]
        )
    header = [
        OURS_ASYNC,
        f"stall (aim: {TIMES} times a copy, plus {1000 * MORE:.0f} ms)",
        f"share of the stall of `dcp.async_save` (aim {OF_DCP})",
        "share of a synchronous save's stall",
        "until all is written",
        f"time of a step during the writing, against one alone (aim {SLOWER_STEP})",
        "memory at most",
    ]
    return (
        f"How long a save stops training, on {RANKS} ranks with one core each, with"
        f" {found[0]['trainable'] / 1e6:.2g} M trained parameters in fp32. The slow disk is a FUSE file system that"
        f" writes {SPEED / 1e6:.0f} MB/s.\n\n{markdown(['', *WAYS], lines)}\n{markdown(header, aims)}"
    )

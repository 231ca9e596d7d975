"""What fsync costs in a save, with it and without, of ours and of the native flag: a part of `nox -s bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.finetune import NATIVE, NATIVE_SYNCED, OURS, OURS_UNSYNCED, RANKS, Shape
from bench.saves import measured, ranks
from bench.timing import seconds, size, table_of_ratios
from tables import markdown

ROUNDS = 15
SHAPE = Shape(hidden=512, intermediate=1408, layers=4, vocabulary=16000, lora=224, tied=False)  # about 50 MB a save
WAYS = (OURS, OURS_UNSYNCED, NATIVE_SYNCED, NATIVE)
# Of what, against what; the last shows what the others are made of.
PAIRS = {
    "sync costs": (OURS, OURS_UNSYNCED),
    "ours against the flag, both synced": (OURS, NATIVE_SYNCED),
    "ours against the flag, neither synced": (OURS_UNSYNCED, NATIVE),
    "sync costs the flag": (NATIVE_SYNCED, NATIVE),
}


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return what each way costs, by ZeRO stage, on the disk that the folder is on."""
    with ranks(folder) as pool:
        found = [measured(pool, SHAPE, stage, "bf16-true", (WAYS, rounds)) for stage in (2, 3)]
    return [{**model, "ways": ways} for model, ways in found]


def render(found: list[dict[str, Any]]) -> str:
    """Return a table of times, and one of ratios."""
    cases = {f"ZeRO-{case['stage']}, {size(case['ways'][OURS]['bytes'][-1])}": case["ways"] for case in found}
    costs = [[name, *(seconds(ways[way]) for way in WAYS)] for name, ways in cases.items()]
    return (
        f"{RANKS} ranks save to new paths on a disk, by each way in turn. After a save with the flag, each rank syncs"
        " its share of the files and folders. Times are medians; ratios are medians over the"
        f" rounds, with the minimum and maximum.\n\n{markdown(['', *WAYS], costs)}\n{table_of_ratios(cases, PAIRS)}"
    )

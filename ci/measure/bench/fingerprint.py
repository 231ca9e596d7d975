"""What fingerprints cost, against a full save and against DeepSpeed's own flag: a part of `nox -s bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.finetune import FULL, FULL_SYNCED, MULTIPLY, NATIVE, OURS_UNSYNCED, PASS, READ, Shape
from bench.saves import measured, ranks
from bench.timing import judged, ratios, spread
from tables import markdown

ROUNDS = 7
READS = 0.6
"""The aim: so much of the speed of a plain read."""
SHAPE = Shape(hidden=2048, intermediate=8192, layers=4, vocabulary=32000, lora=64, tied=False)
WAYS = {
    FULL: "full save, plain Lightning",
    FULL_SYNCED: "the same, and then fsync",
    NATIVE: "trainable-only save by DeepSpeed's flag",
    OURS_UNSYNCED: "the same, a later one under `patch(fsync=False)`",
    PASS: f"{PASS}, two threads",
    READ: f"{READ}, two threads",
    MULTIPLY: f"{MULTIPLY}, two threads",
}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return what each save and a pass over the base cost, on one rank."""
    with ranks(folder, 1) as pool:
        model, costs = measured(pool, SHAPE, 2, "bf16-true", (tuple(WAYS), rounds))
    return {**model, "ways": costs}


def render(found: dict[str, Any]) -> str:
    """Return the tables."""
    ways = found["ways"]
    lines = [[title, spread(ways[way]["seconds"], ".3f")] for way, title in WAYS.items()]
    read, added = 1 / READS, max(ways[PASS]["memory"]) / 2**20
    aims = [
        [
            "fingerprints / full save that reaches the disk",
            judged(ratios(ways, PASS, FULL_SYNCED), 0.5, ".3f"),
            "at most 0.5",
        ],
        ["fingerprints / plain read", judged(ratios(ways, PASS, READ), read), f"at most {read:.2f}"],
        [f"{MULTIPLY} / plain read", spread(ratios(ways, MULTIPLY, READ)), ""],
        [
            "a later save under `patch(fsync=False)` / DeepSpeed's flag",
            judged(ratios(ways, OURS_UNSYNCED, NATIVE), 1.05, ".3f"),
            "at most 1.05",
        ],
        ["MiB of memory that the pass over the base adds", judged([added], 64, ".1f"), "at most 64"],
    ]
    about = f"{found['frozen_bytes'] / 2e6:.0f} M frozen bf16 parameters, one rank, cpu"
    return f"{about}:\n\n{markdown(['', 'seconds'], lines)}\n{markdown(['', 'measured', 'aim'], aims)}"

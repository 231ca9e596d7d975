"""What fingerprints cost, against a full save and against DeepSpeed's own flag: a part of `nox -s bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.engine import FULL, FULL_SYNCED, MULTIPLY, NATIVE, OURS_UNSYNCED, PASS, READ, Shape
from bench.saves import measured, ranks
from bench.words import judged, ratios, spread
from tables import markdown

ROUNDS = 7
READS = 0.6
"""The aim: so much of the speed of a plain read."""
SHAPE = Shape(hidden=2048, intermediate=8192, layers=4, vocabulary=32000, lora=64, tied=False)
WAYS = {
    FULL: "full save, plain Lightning",
    FULL_SYNCED: "the same, and then fsync",
    NATIVE: "trainable-only save by DeepSpeed's flag",
    OURS_UNSYNCED: "the same, a later one under `patch(sync=False)`",
    PASS: f"{PASS}, two threads",
    READ: f"{READ}, two threads",
    MULTIPLY: f"{MULTIPLY}, two threads",
}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return seconds of each save and of a pass over the base, on one rank, and the memory that the pass adds."""
    with ranks(folder, 1) as pool:
        model, costs = measured(pool, SHAPE, 2, "bf16-true", (tuple(WAYS), rounds))
    seconds = {title: costs[way]["seconds"] for way, title in WAYS.items()}
    parameters = model["frozen_bytes"] // 2
    return {"seconds": seconds, "added": max(costs[PASS]["memory"]), "parameters": parameters}


def render(found: dict[str, Any]) -> str:
    """Return the tables."""
    seconds = found["seconds"]
    lines = [[name, spread(values, ".3f")] for name, values in seconds.items()]
    full = ratios(seconds, WAYS[PASS], WAYS[FULL_SYNCED])
    read = ratios(seconds, WAYS[PASS], WAYS[READ])
    limit = ratios(seconds, WAYS[MULTIPLY], WAYS[READ])
    later = ratios(seconds, WAYS[OURS_UNSYNCED], WAYS[NATIVE])
    aims = [
        ["fingerprints / full save that reaches the disk", judged(full, 0.5, ".3f"), "at most 0.5"],
        ["fingerprints / plain read", judged(read, 1 / READS, ".2f"), f"at most {1 / READS:.2f}"],
        [f"{MULTIPLY} / plain read", spread(limit), ""],
        ["a later save under `patch(sync=False)` / DeepSpeed's flag", judged(later, 1.05, ".3f"), "at most 1.05"],
        ["MiB of memory that the pass over the base adds", judged([found["added"] / 2**20], 64, ".1f"), "at most 64"],
    ]
    about = f"{found['parameters'] / 1e6:.0f} M frozen bf16 parameters, one rank, cpu"
    return f"{about}:\n\n{markdown(['', 'seconds'], lines)}\n{markdown(['', 'measured', 'aim'], aims)}"

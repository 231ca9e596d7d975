"""What saves, resumes, the import and the tools cost, beside the alternatives: `nox -f ci/noxfile.py -s bench`.

Writes `bench.json` and the tables beside it, `tables.md`, or renews the parts that are named:
`-s bench -- import inspect`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from bench import (
    checkpoint,
    elastic,
    fingerprint,
    gpu,
    growth,
    imports,
    inspect,
    resume,
    saves,
    stalls,
    steps,
    sync,
    tools,
)
from kit import nodes
from machine import described, machine
from tables import BENCHMARKS, ROOT

RESULTS = Path(__file__).with_name("bench.json")

# Each has a title, and `measure(folder, rounds)`, which returns JSON, `render(found)`, and `ROUNDS`.
PARTS: dict[str, tuple[str, ModuleType | tools.Tool]] = {
    "checkpoint": ("Size of a checkpoint", checkpoint),
    "saves": ("Saves", saves),
    "steps": ("What a save does beyond the flag's", steps),
    "sync": ("Sync", sync),
    "stalls": ("Stalls: saves that training does not wait for", stalls),
    "gpu": ("On a GPU", gpu),
    "growth": ("As the model grows", growth),
    "resume": ("Resume, and test from a checkpoint", resume),
    "elastic": ("Load at another world size", elastic),
    "import": ("Import", imports),
    "fingerprint": ("Fingerprints", fingerprint),
    "inspect": ("`inspect`", inspect),
    **{name: (f"`{name}`", tool) for name, tool in tools.TOOLS.items()},
}


def main() -> None:
    """Measure, and write both."""
    parser = argparse.ArgumentParser(prog="nox -f ci/noxfile.py -s bench --", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all but gpu")
    parser.add_argument("--rounds", type=int, help="instead of each part's own number")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on a disk with 12 GB free (default: %(default)s)")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    given.parts = given.parts or [name for name in PARTS if name != "gpu"]
    if "stalls" in given.parts and (why := nodes.why_no_cached_disk()):
        parser.error(f"stalls needs a slow disk, and {why}; install it, or name the other parts")
    if "gpu" in given.parts and not torch.cuda.is_available():
        print("gpu: skipped, since torch finds no GPU", file=sys.stderr)
        given.parts.remove("gpu")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles anew what it imports
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what is on disk is removed then too
    results = json.loads(RESULTS.read_text())
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.folder) as folder:
        for name in given.parts:
            results[name] = measured(name, Path(folder), given.rounds)
            results = {name: results[name] for name in PARTS if name in results}
            RESULTS.write_text(dumped(results), encoding="utf-8")
    BENCHMARKS.write(render(json.loads(RESULTS.read_text())))  # rounded, as they are kept


def measured(name: str, folder: Path, rounds: int | None) -> dict[str, Any]:
    """Return a part's figures, and when and where they were taken."""
    print(name, file=sys.stderr, flush=True)
    _, part = PARTS[name]
    rounds = rounds or part.ROUNDS
    begun = time.monotonic()
    found = part.measure(folder, rounds)
    took = round(time.monotonic() - begun)
    print(f"  {took} s", file=sys.stderr, flush=True)
    date = time.strftime("%Y-%m-%d")
    return {"date": date, "seconds": took, "rounds": rounds, "machine": machine(folder), "found": found}


def dumped(results: dict[str, Any]) -> str:
    """Return JSON, with each list of numbers in one line, and as many digits as mean something."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    text = json.dumps(rounded, indent=1)
    return re.sub(r"\[[-\d.e,\s]+\]", lambda found: " ".join(found.group().split()), text) + "\n"


def render(results: dict[str, Any]) -> str:
    """Return the section: where each part was measured, and what it found."""
    places: dict[str, list[str]] = {}
    for name, result in results.items():
        places.setdefault(f"on {result['date']} on {described(result['machine'])}", []).append(PARTS[name][0])
    said = [f"Measured {place}: {', '.join(names)}." for place, names in places.items()]
    parts = [f"## {PARTS[name][0]}\n\n{PARTS[name][1].render(result['found'])}" for name, result in results.items()]
    return "\n\n".join([*said, *parts])


if __name__ == "__main__":
    main()

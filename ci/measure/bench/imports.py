"""What `import ds_frozen_patch` and `patch()` cost at a program's start: a part of `nox -s bench`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.words import judged, ratios
from tables import markdown

ROUNDS = 15
OURS, PLAIN, PATCHED = "import", "lightning.pytorch", "patch() and lightning.pytorch"
PROGRAMS = {
    OURS: "import ds_frozen_patch",
    PLAIN: "import lightning.pytorch",
    PATCHED: "import ds_frozen_patch; ds_frozen_patch.patch(); import lightning.pytorch",
}
HEAVY = ("torch", "lightning", "deepspeed")
PROGRAM = """
import json, sys, time
begun = time.process_time()
{}
seconds = time.process_time() - begun
print(json.dumps({{"seconds": seconds, "imported": [name for name in {} if name in sys.modules]}}))
"""
OWN, TOGETHER = 0.030, 1.01
"""The aims: at most so many seconds for the import, and so much of the time of Lightning's."""


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the processor seconds of each program, by turns in new processes.

    The first round fills caches and is not kept.
    """
    found: dict[str, Any] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        print(f"  round {number} of {rounds}", file=sys.stderr, flush=True)
        for name, program in PROGRAMS.items():
            said = json.loads(run(PROGRAM.format(program, HEAVY), folder))
            if number:
                found[name].append(said["seconds"])
            if name == OURS:
                found["imported"] = said["imported"]
    return found


def run(program: str, folder: Path) -> str:
    """Return the last line that a program prints; the folder is where it runs."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def render(found: dict[str, Any]) -> str:
    """Return a line for each aim."""
    heavy = f"it imports {' and '.join(found['imported'])}" if found["imported"] else "it imports no torch"
    plain = statistics.median(found[PLAIN])
    lines = [
        [
            f"`import ds_frozen_patch`, ms of the processor ({heavy})",
            judged([1000 * value for value in found[OURS]], 1000 * OWN, ".1f"),
            f"{1000 * OWN:.0f}",
        ],
        [
            f"`patch()` and `import lightning.pytorch`, against the {plain:.1f} s of the latter",
            judged(ratios(found, PATCHED, PLAIN), TOGETHER, ".3f"),
            f"{TOGETHER}",
        ],
    ]
    return markdown(["", "measured", "aim: at most"], lines)

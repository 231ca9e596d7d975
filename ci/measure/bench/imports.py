"""What `import ds_frozen_patch` and `patch()` cost at a program's start: a part of `nox -s bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.timing import Costs, alternate, judged, ratios
from tables import markdown

ROUNDS = 15
OURS, PLAIN, PATCHED = "import", "lightning.pytorch", "patch() and lightning.pytorch"
PROGRAMS = {
    OURS: "import ds_frozen_patch",
    PLAIN: "import lightning.pytorch",
    PATCHED: "import ds_frozen_patch; ds_frozen_patch.patch(); import lightning.pytorch",
}
PROGRAM = """
import json, sys, time
begun = time.process_time()
{}
seconds = time.process_time() - begun
heavy = [name for name in ("torch", "lightning", "deepspeed") if name in sys.modules]
print(json.dumps({{"seconds": seconds, "imported": heavy}}))
"""
OWN, TOGETHER = 0.030, 1.01
"""The aims: at most so many seconds for the import, and so much of the time of Lightning's."""


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the processor seconds of each program, each time in a new process; the first ones fill caches."""

    def run(name: str) -> Costs:
        command = [sys.executable, "-c", PROGRAM.format(PROGRAMS[name])]
        said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        cost: Costs = json.loads(said.splitlines()[-1])
        return cost

    return alternate(tuple(PROGRAMS), rounds, run)


def render(found: dict[str, Any]) -> str:
    """Return a line for each aim."""
    imported = found[OURS]["imported"][0]
    heavy = f"it imports {' and '.join(imported)}" if imported else "it imports no torch"
    own = judged([1000 * value for value in found[OURS]["seconds"]], 1000 * OWN, ".1f")
    together = judged(ratios(found, PATCHED, PLAIN), TOGETHER, ".3f")
    lines = [
        [f"`import ds_frozen_patch`, ms of the processor ({heavy})", own, f"{1000 * OWN:.0f}"],
        [
            "`patch()` and `import lightning.pytorch`, against the"
            f" {median(found[PLAIN]['seconds']):.1f} s of the latter",
            together,
            f"{TOGETHER}",
        ],
    ]
    return markdown(["", "measured", "aim: at most"], lines)

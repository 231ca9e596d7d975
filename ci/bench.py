"""What it costs, measured side by side with what else there is: `nox -f ci/noxfile.py -s bench`.

Writes `ci/bench.json` and the README's section, or renews the parts that are named: `-s bench -- import inspect`. The
part `elastic`, which draws loss curves and times nothing, runs only where it is named.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import bench_consolidate  # noqa: E402
import bench_elastic  # noqa: E402
import bench_fingerprint  # noqa: E402
import bench_growth  # noqa: E402
import bench_import  # noqa: E402
import bench_inspect  # noqa: E402
import bench_prune  # noqa: E402
import bench_reshard  # noqa: E402
import bench_resume  # noqa: E402
import bench_saves  # noqa: E402
import bench_sync  # noqa: E402
from machine import described, machine  # noqa: E402
from table import put_into_readme  # noqa: E402

RESULTS = ROOT / "ci" / "bench.json"
BEGIN, END = "<!-- bench: nox -f ci/noxfile.py -s bench -->\n", "<!-- end of bench -->\n"

# Each has `measure(folder, rounds)`, which gives what JSON can hold, `render(found)`, and `ROUNDS`.
PARTS: dict[str, tuple[str, ModuleType]] = {
    "saves": ("Saves", bench_saves),
    "sync": ("Sync", bench_sync),
    "growth": ("As the model grows", bench_growth),
    "resume": ("Resume, and test from a checkpoint", bench_resume),
    "import": ("Import", bench_import),
    "fingerprint": ("Fingerprints", bench_fingerprint),
    "inspect": ("`inspect`", bench_inspect),
    "prune": ("`prune`", bench_prune),
    "consolidate": ("`consolidate`", bench_consolidate),
    "reshard": ("`reshard`", bench_reshard),
}


def main() -> None:
    """Measure, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or elastic")
    parser.add_argument("--rounds", type=int, help="instead of each part's own number")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on a disk with 12 GB free (default: %(default)s)")
    given = parser.parse_args()
    if unknown := set(given.parts) - {*PARTS, "elastic"}:
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(PARTS)} and elastic")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles anew what it imports
    if "elastic" in given.parts:
        bench_elastic.main()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what is on disk is removed then too
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.folder) as folder:
        for name in given.parts or PARTS:
            if name in PARTS:
                results[name] = measured(name, Path(folder), given.rounds)
                results = {name: results[name] for name in PARTS if name in results}
                RESULTS.write_text(dumped(results), encoding="utf-8")
    if results:
        put_into_readme(BEGIN, render(results), END)


def measured(name: str, folder: Path, rounds: int | None) -> dict[str, Any]:
    """A part's figures, and when and where they were taken."""
    print(name, file=sys.stderr, flush=True)
    _, part = PARTS[name]
    begun = time.monotonic()
    found = part.measure(folder, rounds or part.ROUNDS)
    took = round(time.monotonic() - begun)
    print(f"  {took} s", file=sys.stderr, flush=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": took,
        "rounds": rounds or part.ROUNDS,
        "machine": machine(folder),
        "found": found,
    }


def dumped(results: dict[str, Any]) -> str:
    """JSON, with each list of numbers in one line, and as many digits as mean something."""
    rounded = json.loads(json.dumps(results), parse_float=lambda text: float(f"{float(text):.5g}"))
    text = json.dumps(rounded, indent=1)
    return re.sub(r"\[[-\d.e,\s]+\]", lambda found: " ".join(found.group().split()), text) + "\n"


def render(results: dict[str, Any]) -> str:
    """The README's section: of each part what it found, and where it was measured."""
    places: dict[str, list[str]] = {}
    for name, result in results.items():
        places.setdefault(f"on {result['date']} on {described(result['machine'])}", []).append(PARTS[name][0])
    said = [f"Measured {place}: {', '.join(names)}." for place, names in places.items()]
    parts = [f"### {PARTS[name][0]}\n\n{PARTS[name][1].render(result['found'])}" for name, result in results.items()]
    return "\n\n".join([*said, *parts])


if __name__ == "__main__":
    main()

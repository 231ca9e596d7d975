"""How runs go on from one another, in all pairs of ZeRO stages, world sizes and precisions: the session `pairs`.

Each run of `tests/kit/stages.py` trains, saves both ways and trains on; then runs of each other kind go on from it. The
tables on `pairs.md`, of the newest and the oldest cell, have the largest difference of any master and any moment after
the load, and of the next losses to those of the run that saved.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.saves import ranks
from kit import stages
from kit.cell import BF16, CELL
from machine import PACKAGES, releases
from tables import PAIRS, ROOT, markdown

RESULTS = ROOT / ".nox" / "results"
CELLS = ("newest", "oldest")
NUMBERS = (1, 2, 3, 4, 8)
STAGES = (0, 1, 2, 3)
KINDS = ("small", "full")


@dataclass(frozen=True)
class Run:
    """A kind of run."""

    stage: int
    number: int
    precision: str = "fp32"

    @property
    def label(self) -> str:
        """As in the table, without the number of ranks."""
        return f"stage {self.stage}, {self.precision}"


def pairs(runs: list[Run], folder: Path) -> dict[tuple[Run, Run], tuple[float, float]]:
    """Return the largest differences of each pair: of what the optimizer holds, and of the next losses, relative."""
    runs = sorted(runs, key=lambda run: run.number)
    saved: dict[Run, tuple[Path, stages.State, list[float]]] = {}
    found = {}
    for number, group in itertools.groupby(runs, key=lambda run: run.number):
        with ranks(folder, number) as pool:
            for run in group:
                out = folder / f"{run.stage}-{number}-{run.precision}"
                given = {"out": str(out), "stage": run.stage, "precision": run.precision}
                saved[run] = (out, *pool(stages.train_and_save, **given)[0])
    for number, group in itertools.groupby(runs, key=lambda run: run.number):
        with ranks(folder, number) as pool:
            for now in group:
                begun = time.monotonic()
                for before, (out, state, losses) in saved.items():
                    paths = [str(out / kind) for kind in KINDS]
                    answers = pool(stages.resume_from, paths=paths, stage=now.stage, precision=now.precision)[0]
                    found[before, now] = (
                        max(stages.difference(held, state) for held, _, _ in answers),
                        max(stages.apart(continued, losses) for _, continued, _ in answers),
                    )
                print(f"{now}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def table(found: dict[tuple[Run, Run], tuple[float, float]]) -> str:
    """Return the table: of each two labels, the largest differences over the numbers of ranks."""
    labels = list(dict.fromkeys(now.label for _, now in found))
    rows = []
    for label in labels:
        cells = []
        for other in labels:
            of_both = [item for (a, b), item in found.items() if (a.label, b.label) == (label, other)]
            state, losses = (max(column) for column in zip(*of_both, strict=True))
            cells.append(f"{state:g}; {losses:.1e}")
        rows.append([label, *cells])
    return markdown(["from, to", *labels], rows)


def main() -> None:
    """Measure all pairs on this cell, and write the block of the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fp32 = pairs([Run(stage, number) for stage in STAGES for number in NUMBERS], folder)
        kinds = itertools.product(("fp32", "bf16"), STAGES)
        both = [Run(stage, number, precision) for precision, stage in kinds for number in (2, 3)]
        mixed = pairs(both, folder) if BF16 else {}
    installed = ", ".join(map(" ".join, releases(PACKAGES[1:]).items()))
    text = [
        f"Measured on {time.strftime('%Y-%m-%d')} with {installed}. Each cell: the largest difference of any master"
        f" or moment after the load, and the largest relative difference of the next {stages.NEXT} losses, of"
        " trainable-only and full checkpoints.",
        f"In fp32, from {', '.join(map(str, NUMBERS))} ranks to each of these ({len(fp32)} pairs):",
        table(fp32),
    ]
    if mixed:
        title = f"Between precisions, from 2 and 3 ranks to 2 and 3 ({len(mixed)} pairs). bf16 rounds to 3.9e-03:"
        text += [title, table(mixed)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    files = {cell: RESULTS / f"pairs-{cell}.md" for cell in CELLS}
    files[CELL.name].write_text("\n\n".join(map(str.strip, text)), encoding="utf-8")
    PAIRS.write("\n\n".join(file.read_text(encoding="utf-8") for file in files.values() if file.exists()))


if __name__ == "__main__":
    main()

"""The table of the page `compatibility.md`, made from the last full run of the matrix: `nox -f ci/noxfile.py -s table`.

Every cell's tests leave an outcome in `.nox/results/`; together they become `last-run.json`, and the table. With
names of cells, only theirs are taken from there, and the others stay as they are in `last-run.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from matrix import cells
from tables import COMPATIBILITY, ROOT, Notes, markdown, ranges

LAST_RUN = Path(__file__).with_name("last-run.json")
HEADER = ("cell", "Lightning", "DeepSpeed", "torch", "Python", "wrapt", "state", "promises", "tests", "s")
HEADER_OF_OWNERS = ("cell", *cells.OWNERS, "DeepSpeed", "Trainer", "Accelerate", "DeepSpeed alone")
OF_OWNERS = """\
Promise 19 by the owner of the engine: how many tests passed, and in brackets what these releases cannot do, with or
without `patch()`. The tests show that checkpoints leave the base out and resume strictly and bit for bit, that another
base is an error, that another number of ranks can resume, that a killed save leaves the previous checkpoint as it was,
and that an error of one rank is raised on every rank."""
OWNERS = ("trainer", "accelerate", "deepspeed")
PROMISES = {
    1: "save", 2: "resume", 3: "test", 4: "strictness", 5: "base", 6: "no lock-in", 7: "the argument",
    8: "weights only", 9: "one fp32 file", 10: "another world size", 11: "patch and unpatch", 12: "refusal",
    13: "upgrades", 14: "tools", 15: "no harm", 16: "quantized bases", 17: "power cuts", 18: "several nodes",
    19: "Trainer, Accelerate and DeepSpeed alone", 20: "asynchronous saves", 21: "checkpoints in a bucket",
    22: "files of others in the same folder",
    23: "nothing that was trained is left out", 24: "nothing that was saved is refused", 25: "every kind of engine",
    26: "programs that look at once after an asynchronous save", 27: "folders that serve",
    28: "another stage, precision, batch, or set of trained parameters",
    29: "what no program can build again",
}  # fmt: skip
OF_PROMISES = """\
Each promise, and the cells in which its tests passed. Every test runs in `everyday`, all that may depend on releases in
`newest`, and of these the faster ones in the other cells."""


def collect(results: Path, last_run: dict[str, Any], chosen: Collection[str] = ()) -> dict[str, Any]:
    """Return the outcomes of all cells, those of other cells than the chosen ones as they were in the last run.

    Exits with what is missing, failed or out of date.
    """
    outcomes, problems = {}, [f"there is no cell {name}" for name in chosen if name not in cells.entries()]
    for name, entry in cells.entries().items():
        file = results / f"{name}.json"
        if chosen and name not in chosen:
            outcome = last_run.get(name)
        else:
            outcome = json.loads(file.read_text()) if file.exists() else None
        if outcome is None:
            problems.append(f"{name} has not run")
        elif {**outcome["entry"], "why": entry["why"]} != entry:
            problems.append(f"{name} has changed in ci/matrix.json since it ran")
        elif outcome["failed"]:
            problems.append(f"{name} failed")
        else:
            outcomes[name] = {**outcome, "entry": entry}
    if problems:
        sys.exit(f"There is no run to make a table of: {'; '.join(problems)}. Run: nox -f ci/noxfile.py -s matrix")
    return outcomes


def render(outcomes: dict[str, Any]) -> str:
    """Return the table in Markdown, with a note for each thing that a cell cannot run."""
    notes = Notes()
    rows = []
    for name, outcome in outcomes.items():
        entry, promises = outcome["entry"], outcome["promises"]
        needs = cells.cell(entry).needs
        marks = notes.marked(*outcome["skipped"], *(f"{name}: {need.why}" for name, need in needs.items()))
        lightning = ", ".join(entry[key] for key in ("lightning", "beside") if key in entry)
        states = sorted({state for state in outcome["found"].values() if state != "not installed"} - {"wrapped"})
        expected = ", ".join(sorted(set(entry["expect"].values())))
        if "patches" in entry:
            expected += f", by patches/{entry['patches']}"
        rows.append(
            (
                f"{name}{marks}",
                lightning,
                entry["deepspeed"],
                entry["torch"],
                entry["python"],
                entry["wrapt"],
                ", ".join(states) if "refused" in states else expected,
                ranges(int(number) for number in promises),
                str(sum(counts.get("passed", 0) for counts in promises.values())),
                str(outcome["seconds"]),
            )
        )
    of_owners = [(name, outcome) for name, outcome in outcomes.items() if outcome.get("owners")]
    dates = [outcome["date"] for outcome in outcomes.values()]
    run = f"last full run was on {max(dates)}"
    if max(dates) != min(dates):
        run = f"cells were last run between {min(dates)} and {max(dates)}"
    commits = ", ".join(sorted({outcome["code"] for outcome in outcomes.values()}))
    of_all = f"The {run}, at commit {commits}:\n\n{markdown(HEADER, rows, notes)}\n{promises_table(outcomes)}"
    return f"{of_all}\n{owners_table(of_owners)}" if of_owners else of_all


def promises_table(outcomes: dict[str, Any]) -> str:
    """Return the table of promises: the cells in which each was tested, with `patch()` and with a patch series."""
    rows = []
    for number, promise in PROMISES.items():
        passed = {name: found["promises"].get(str(number), {}).get("passed", 0) for name, found in outcomes.items()}
        by_kind = [
            _cells({name: passed[name] for name in passed if ("patches" in outcomes[name]["entry"]) == is_patched})
            for is_patched in (False, True)
        ]
        if not any(by_kind):
            by_kind[0] = "newer than the last run"
        rows.append((f"{number} {promise}", *by_kind, str(sum(passed.values()) or "")))
    return f"{OF_PROMISES}\n\n{markdown(('promise', 'with `patch()`', 'with a patch series', 'tests'), rows)}"


def _cells(passed: dict[str, int]) -> str:
    """Return in words in which of these cells tests passed."""
    without = [name for name, count in passed.items() if not count]
    if len(without) <= len(passed) / 2:
        return f"all but {', '.join(without)}" if without else "all"
    return ", ".join(name for name, count in passed.items() if count)


def owners_table(outcomes: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return the table of those that own engines beside Lightning: how many of their tests passed, and what cannot."""
    notes = Notes()
    rows = []
    for name, outcome in outcomes:
        of_owners = [outcome["owners"][owner] for owner in OWNERS]
        counts = [f"{found['passed']}{notes.marked(*found['cannot'])}" for found in of_owners]
        releases = [outcome["releases"][package] for package in cells.OWNERS]
        rows.append((name, *releases, outcome["entry"]["deepspeed"], *counts))
    return f"{OF_OWNERS}\n\n{markdown(HEADER_OF_OWNERS, rows, notes)}"


def main() -> None:
    """Write `last-run.json` and the table."""
    outcomes = collect(ROOT / ".nox" / "results", json.loads(LAST_RUN.read_text()), sys.argv[1:])
    LAST_RUN.write_text(json.dumps(outcomes, indent=1) + "\n")
    COMPATIBILITY.write(render(outcomes))


if __name__ == "__main__":
    main()

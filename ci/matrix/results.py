"""What tests found, in `results.json`, and its tables: `python -m matrix.results SESSION JUNIT...`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from machine import described, machine
from matrix import cells
from tables import RESULTS as BLOCKS
from tables import Notes, cases, code, markdown, ranges

RESULTS = Path(__file__).with_name("results.json")


def settings(before: dict[str, Any], *files: Path) -> dict[str, Any]:
    """Return the ZeRO stages in which each of DeepSpeed's settings works, by release and what there is to note."""
    names = [file.stem.removeprefix("settings-") for file in files]
    found: dict[str, list[dict[str, list[int]]]] = {}
    for place, file in enumerate(files):
        for properties, skipped in cases(ElementTree.parse(file).getroot()):
            said = dict(properties)
            note = f"not run: {skipped}" if skipped else said.get("note", "")
            by_note = found.setdefault(said["setting"], [{} for _ in files])[place]
            by_note.setdefault(note, []).append(int(said["stage"]))
    return {
        "code": code(),
        "releases": [f"DeepSpeed {cells.read()[name].deepspeed}" for name in names],
        "stages": found,
    }


def settings_table(results: dict[str, Any]) -> str:
    """Return a row for each setting, a column for each release, and notes."""
    found: dict[str, list[dict[str, list[int]]]] = results["stages"]
    notes = Notes()

    def entry(by_note: dict[str, list[int]]) -> str:
        return ", ".join(ranges(by_note[note]) + notes.marked(note) for note in sorted(by_note, key=bool))

    rows = [[name, *map(entry, row)] for name, row in found.items()]
    return said_of(results) + markdown(["setting", *results["releases"]], rows, notes)


def quantized(before: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return a row for each kind of quantized base and ZeRO stage."""
    found = [dict(properties) for properties, _ in cases(ElementTree.parse(file).getroot())]
    refused = {said["kind"]: said["refused"] for said in found if "refused" in said}
    rows = []
    for said in found:
        if "bytes" in said:
            sizes = [f"{int(said[name]) / 1000:,.0f} kB" for name in ("full", "bytes")]
            ratio = f"{int(said['bytes']) / int(said['control']):.2f}"
            rows.append([said["kind"], said["stage"], *sizes, ratio, refused.get(said["kind"], "")])
    return {"code": code(), "rows": rows}


def quantized_table(results: dict[str, Any]) -> str:
    """Return these rows, and of which commit they are."""
    header = ["base", "ZeRO", "full", "trainable-only", "against bf16", "refused if another"]
    return said_of(results) + markdown(header, results["rows"])


def faults(before: dict[str, Any], *files: Path) -> dict[str, Any]:
    """Return how often each fault was injected, and in which run; those of tests that did not run stay.

    The files are those of one run in parts, on one day. Nothing was lost, or the tests would have failed.
    """
    suites = [next(ElementTree.parse(file).iter("testsuite")) for file in files]
    tried: Counter[str] = Counter()
    for suite in suites:
        for properties, _ in cases(suite):
            for what, times in properties:
                tried[what] += int(times)
    minutes = sum(float(suite.get("time", "")) for suite in suites) / 60
    day, where = suites[0].get("timestamp", "")[:10], described(machine(files[0]))
    run = f"on {day}, for {minutes:.0f} minutes, on {where}"
    return {**before, **{what: {"times": times, "run": run} for what, times in tried.items()}}


def faults_table(results: dict[str, Any]) -> str:
    """Return a row for each fault, below the runs; those of any run but the largest are named."""
    runs: dict[str, list[str]] = {}
    for what, found in results.items():
        runs.setdefault(found["run"], []).append(what)
    largest, *others = sorted(runs, key=lambda run: -len(runs[run]))
    said = [f"Run {largest}.", *(f"Run {run}: {'; '.join(runs[run])}." for run in others)]
    rows = [[what, str(found["times"]), "0"] for what, found in results.items()]
    return "\n\n".join([*said, markdown(["fault", "times", "lost, hung, or accepted silently"], rows)])


def scale(before: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return a row for each count of a save and of a load."""
    rows: dict[str, list[str]] = {}
    for properties, _ in cases(ElementTree.parse(file).getroot()):
        for step, row in properties:
            rows.setdefault(step, []).append(row)
    cell = cells.read()["everyday"]
    return {"code": code(), "releases": f"{cell.lightning} and deepspeed {cell.deepspeed}", "rows": rows}


def scale_table(results: dict[str, Any]) -> str:
    """Return a table for each kind of save, and of a load."""
    numbers = ["1", "2", "4", "8", "grows", "64", "512", "4096", "4096 without `patch()`"]
    titles = {"save": "a save", "first save": "the first save of a process, where it differs"}
    titles |= {"async save": "`async_save=True`, where it differs", "load": "a load"}
    tables = [f"Counted with {results['releases']}, in ZeRO-3, at commit {results['code']}."]
    for step, title in titles.items():
        tables.append(markdown([title, *numbers], [row.split(" | ") for row in results["rows"][step]]).strip())
    return "\n\n".join(tables)


def said_of(results: dict[str, Any]) -> str:
    """Return the line above a table that says of which commit it is."""
    return f"Measured at commit {results['code']}.\n\n"


COLLECT: dict[str, Callable[..., dict[str, Any]]]
COLLECT = {"settings": settings, "quantized": quantized, "faults": faults, "scale": scale}
RENDER = {"settings": settings_table, "quantized": quantized_table, "faults": faults_table, "scale": scale_table}

if __name__ == "__main__":
    session, *files = sys.argv[1:]
    results = json.loads(RESULTS.read_text())
    results[session] = COLLECT[session](results.get(session, {}), *map(Path, files))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    BLOCKS[session].write(RENDER[session](results[session]))

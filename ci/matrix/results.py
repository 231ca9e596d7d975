"""The tables of what tests found: `python -m matrix.results SESSION JUNIT...`, for the sessions of `TABLES`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from machine import described, machine
from matrix import cells
from tables import ROOT, Block, cases, markdown, ranges

BLOCKS = {
    "settings": Block("settings", ROOT / "docs" / "settings.md"),
    "quantized": Block("quantized", ROOT / "docs" / "qlora.md"),
    "faults": Block("faults", ROOT / "docs" / "faults.md"),
}


def settings(*results: Path) -> str:
    """Return a row for each of DeepSpeed's settings, a column for each cell: the stages where it works, and notes."""
    found: dict[str, dict[str, dict[str, list[int]]]] = {}  # ZeRO stages by setting, cell, and what there is to note
    names = [file.stem.removeprefix("settings-") for file in results]
    for name, file in zip(names, results, strict=True):
        for properties, skipped in cases(ElementTree.parse(file).getroot()):
            said = dict(properties)
            note = f"not run: {skipped}" if skipped else said.get("note", "")
            by_note = found.setdefault(said["setting"], {}).setdefault(name, {})
            by_note.setdefault(note, []).append(int(said["stage"]))
    notes = list(dict.fromkeys(note for row in found.values() for entry in row.values() for note in entry if note))

    def entry(by_note: dict[str, list[int]]) -> str:
        marks = {note: f" [{notes.index(note) + 1}]" if note else "" for note in by_note}
        return ", ".join(ranges(by_note[note]) + marks[note] for note in sorted(by_note, key=bool))

    rows = [[setting, *(entry(row[name]) for name in names)] for setting, row in found.items()]
    return markdown(["setting", *(f"DeepSpeed {cells.read()[name].deepspeed}" for name in names)], rows, notes)


def quantized(results: Path) -> str:
    """Return a row for each kind of quantized base and ZeRO stage."""
    found = [dict(properties) for properties, _ in cases(ElementTree.parse(results).getroot())]
    refused = {said["kind"]: said["refused"] for said in found if "refused" in said}
    rows = []
    for said in found:
        if "bytes" in said:
            sizes = [f"{int(said[name]) / 1000:,.0f} kB" for name in ("full", "bytes")]
            ratio = f"{int(said['bytes']) / int(said['control']):.2f}"
            rows.append([said["kind"], said["stage"], *sizes, ratio, refused.get(said["kind"], "")])
    return markdown(["base", "ZeRO", "full", "trainable-only", "against bf16", "refused if another"], rows)


def faults(results: Path) -> str:
    """Return a row for each fault and how often it was injected; rows of tests that did not run stay.

    Nothing was lost, or the tests would have failed.
    """
    suite = next(ElementTree.parse(results).iter("testsuite"))
    tried: Counter[str] = Counter()
    for properties, _ in cases(suite):
        for what, times in properties:
            tried[what] += int(times)
    minutes = float(suite.get("time", "")) / 60
    when = f"on {suite.get('timestamp', '')[:10]}, for {minutes:.0f} minutes, on {described(machine(results))}"
    shown = BLOCKS["faults"].read()
    before = {what: int(times) for what, times in re.findall(r"^\| (.*) \| (\d+) \| 0 \|$", shown, re.MULTILINE)}
    text = f"Run {when}."
    if not before.keys() <= tried.keys():
        full_run = shown.partition("\n\n|")[0].partition("\n\nRerun ")[0]
        text = f"{full_run}\n\nRerun {when}: {'; '.join(tried)}."
    rows = [[what, str(times), "0"] for what, times in {**before, **tried}.items()]
    return f"{text}\n\n{markdown(['fault', 'times', 'lost, hung, or accepted silently'], rows)}"


TABLES: dict[str, Callable[..., str]] = {"settings": settings, "quantized": quantized, "faults": faults}

if __name__ == "__main__":
    session, *files = sys.argv[1:]
    BLOCKS[session].write(TABLES[session](*map(Path, files)))

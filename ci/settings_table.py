"""The README's table of DeepSpeed's settings, of what their tests have left: `nox -f ci/noxfile.py -s settings`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import cells
from table import markdown, put_into_readme, ranges

BEGIN, END = "<!-- settings: nox -f ci/noxfile.py -s settings -->\n", "<!-- end of settings -->\n"


def collect(results: Path) -> dict[str, dict[int, str]]:
    """By setting and ZeRO stage, what there is to say of it, if it does not simply work; exits if a test failed."""
    found: dict[str, dict[int, str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        said = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('name')} failed: see {results}")
        skipped = case.find("skipped")
        note = said.get("note", "") if skipped is None else f"not run: {skipped.get('message')}"
        found.setdefault(said["setting"], {})[int(said["stage"])] = note
    return found


def render(outcomes: dict[str, dict[str, dict[int, str]]]) -> str:
    """A row for each setting, a column for each cell: the ZeRO stages in which it works, and notes on the others."""
    notes: list[str] = []
    header = ["setting", *(f"DeepSpeed {cells.read()[cell].deepspeed}" for cell in outcomes)]
    lines = [header, ["---"] * len(header)]
    for setting in next(iter(outcomes.values())):
        lines.append([setting, *(_entry(outcomes[cell][setting], notes) for cell in outcomes)])
    return markdown(lines, notes)


def _entry(by_stage: dict[int, str], notes: list[str]) -> str:
    parts = [ranges(stage for stage, note in by_stage.items() if not note)]
    for note in dict.fromkeys(filter(None, by_stage.values())):
        if note not in notes:
            notes.append(note)
        parts.append(f"{ranges(stage for stage, said in by_stage.items() if said == note)} [{notes.index(note) + 1}]")
    return ", ".join(filter(None, parts))


def main(files: list[str]) -> None:
    """Write the table of these results, each of a cell by its name."""
    outcomes = {Path(file).stem.removeprefix("settings-"): collect(Path(file)) for file in files}
    put_into_readme(BEGIN, render(outcomes), END)


if __name__ == "__main__":
    main(sys.argv[1:])

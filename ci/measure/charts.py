"""The charts of `docs/`, drawn from the JSON that its tables are made of: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import Any

from bench.svg import CARD, bars, grid, page
from bench.words import seconds, size
from sharded import WITHOUT_FROZEN

CI = Path(__file__).resolve().parents[1]
CHARTS = CI.parent / "docs" / "charts"
MEASURED = ("measure/bench/bench.json", "measure/compare/compare.json")
PATCHED = "Lightning, patch()"
WAYS = {"`patch()`": "ours", "`serve()`": "ours", WITHOUT_FROZEN: "flag"}
KINDS = {
    "hostile": "hostile files, read by the tools",
    "write error": "write errors, full and missing disks",
    "kill -9": "processes killed in a save, or in a tool",
    "damage": "damaged, missing and swapped files",
    "share a disk": "saves of several nodes that share a disk",
    "power cut": "power cuts in and after a save",
    "concurrent": "two jobs that save to one path",
}
OTHERS = "many saves in one process, modules of any kind"
MEANS = {"yes": "yes", "no": "no", "-": "", "converted": "partly"}  # a number is a yes: it can be saved so


def drawn() -> dict[str, str]:
    """Return each chart by the name of its file."""
    bench, compared, results, matrix = (
        json.loads((CI / file).read_text(encoding="utf-8"))
        for file in (*MEASURED, "matrix/results.json", "matrix/last-run.json")
    )
    return {
        "saves.svg": saves(bench["saves"]["found"]),
        "tools.svg": tools(bench),
        "comparison.svg": comparison(compared["features"]),
        "faults.svg": faults(results["faults"]["times"]),
        "settings.svg": settings(results["settings"]),
        "matrix.svg": cells(matrix),
    }


def saves(found: list[dict[str, Any]]) -> str:
    """Bytes and seconds of a save of the large model, its embeddings tied, in ZeRO-2."""
    (case,) = (case for case in found if (case["title"], case["stage"], case["tied"]) == ("large", 2, True))
    ways = {name.replace("`", ""): way for name, way in case["ways"].items() if "floor" not in name}
    ways = {PATCHED: ways[PATCHED], **ways}  # what people get is first, and in our colour
    sizes = [(name, way["bytes"], size(way["bytes"])) for name, way in ways.items()]
    times = [(name, statistics.median(way["seconds"]), seconds(way["seconds"])) for name, way in ways.items()]
    height = 60 + 36 * len(ways)
    lines = bars(28, "Size of a checkpoint", sizes) + bars(28 + height, "Time of a save", times)
    return page(CARD, 2 * height, lines)


def tools(bench: dict[str, Any]) -> str:
    """Seconds of each tool beside what else does its work."""
    lines, y = [], 28
    for tool in ("prune", "consolidate", "reshard", "merge"):
        times = {way: [round_["seconds"] for round_ in rounds] for way, rounds in bench[tool]["found"].items()}
        ours_first = sorted(times, key=lambda way: not way.startswith(tool))
        rows = [(way, statistics.median(times[way]), seconds(times[way])) for way in ours_first]
        lines += bars(y, tool, rows, ours=sum(way.startswith(tool) for way in times))
        y += 36 * len(rows) + 44
    return page(CARD, y - 16, lines)


def comparison(features: dict[str, Any]) -> str:
    """What each system does: partly where it does so in one ZeRO stage, or after a conversion."""

    def state(outcomes: dict[str, Any]) -> str:
        found = {MEANS.get(outcome["value"], "yes") for outcome in outcomes.values()}
        return found.pop() if len(found) == 1 else "partly"

    rows = {title: [state(of) for of in row.values()] for title, row in features.items() if "MB" not in title}
    systems = [system.split(", ") for system in next(iter(features.values()))]
    return grid([WAYS.get(way, way) for _, way in systems], rows, groups=[owner for owner, _ in systems])


def faults(times: dict[str, int]) -> str:
    """How often each kind of fault was injected."""
    kinds: Counter[str] = Counter()
    for fault, count in times.items():
        kinds[next((said for kind, said in KINDS.items() if kind in fault), OTHERS)] += count
    rows = [(kind, float(count), f"{count:,}") for kind, count in kinds.most_common()]
    title = f"{sum(kinds.values()):,} attempts to lose data, and nothing lost"
    return page(CARD, 60 + 36 * len(rows), bars(28, title, rows, ours=len(rows)))


def settings(results: dict[str, Any]) -> str:
    """The ZeRO stages in which each setting works, by release; partly where there is something to note."""

    def state(by_note: dict[str, list[int]], stage: int) -> str:
        notes = [note for note, stages in by_note.items() if stage in stages]
        return ("partly" if notes[0] else "yes") if notes else ""

    columns = [str(stage) for _ in results["releases"] for stage in range(4)]
    rows = {
        shorten(name.replace("`", ""), 52, placeholder=" …"): [state(of, stage) for of in row for stage in range(4)]
        for name, row in results["stages"].items()
    }
    return grid(columns, rows, beside=330)


def cells(matrix: dict[str, Any]) -> str:
    """The promises that were tested in each cell."""
    numbers = sorted({number for cell in matrix.values() for number in cell["promises"]}, key=int)
    rows = {
        name: ["yes" if cell["promises"].get(number, {}).get("passed") else "" for number in numbers]
        for name, cell in matrix.items()
    }
    return grid(numbers, rows, beside=160)


if __name__ == "__main__":
    for name, picture in drawn().items():
        (CHARTS / name).write_text(picture, encoding="utf-8")

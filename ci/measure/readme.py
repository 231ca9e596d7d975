"""The README's table, of the last benchmark and the last comparison: `nox -f ci/noxfile.py -s docs` writes it."""

from __future__ import annotations

import json
from typing import Any

from bench.finetune import FULL, NATIVE, NATIVE_SYNCED, OURS
from bench.timing import seconds, size
from tables import BENCHMARKS_PAGE, README, ROOT, markdown

COMPARED = {
    "resumes strictly without settings": ("a run resumes without extra settings", "2"),
    "`test` in ZeRO-3": ("evaluation from a checkpoint equals evaluation of the model in memory", "3"),
    "refuses another base": ("loading onto a different base raises an error", "2"),
    "survives a kill in a save": ("after a kill during a save, the same program resumes from the previous save", "2"),
}
"""What each row of yes and no says, the feature of the comparison that it is, and in which ZeRO stage."""


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of the benchmark and of the comparison."""
    files = (ROOT / "ci" / "measure" / name for name in ("bench/bench.json", "compare/compare.json"))
    bench, compared = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    return bench, compared


def shown_case(bench: dict[str, Any]) -> dict[str, Any]:
    """Return the case of the benchmark that the table shows, as the first chart of the benchmarks does."""
    shown = ("large", 2, True)
    (case,) = (case for case in bench["saves"]["found"] if (case["title"], case["stage"], case["tied"]) == shown)
    return dict(case)


def text() -> str:
    """Return the table, each row with a link to where its figures come from, and what they were measured with."""
    bench, compared = read()
    case = shown_case(bench)
    ways, saves = case["ways"], f"({README.link(BENCHMARKS_PAGE)}#saves)"
    plain, flag, synced, ours = (seconds(ways[way]) for way in (FULL, NATIVE, NATIVE_SYNCED, OURS))
    rows = [
        [f"[size]{saves}", *(size(ways[way]["bytes"][-1]) for way in (FULL, NATIVE, OURS))],
        [f"[time of a save]{saves}", plain, f"{flag}; {synced} with fsync", f"{ours} with fsync"],
    ]
    for title, (feature, stage) in COMPARED.items():
        row = compared["features"][feature]
        values = [row[f"Lightning, {way}"][stage]["value"] for way in ("plain", "flag", "`patch()`")]
        said = ["has its base" if value == "-" else value for value in values]
        rows.append([f"[{title}]({README.link(BENCHMARKS_PAGE)}#lightning)", *said])
    return (
        markdown(("", "Lightning", "with its own flag", "with `patch()`"), rows)
        + f"\nThe first two rows: a Llama with {size(case['frozen_bytes'])} of frozen bf16 weights and"
        f" {case['trainable'] / 1e6:.0f} M trained parameters, tied embeddings, ZeRO-2, two CPU ranks.\n"
    )


if __name__ == "__main__":
    README.write(text())

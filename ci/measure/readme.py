"""The README's table, of the last benchmark and the last comparison: `nox -f ci/noxfile.py -s docs` writes it."""

from __future__ import annotations

import json
from typing import Any

from bench.words import seconds, size
from tables import ROOT, Block, markdown

BLOCK = Block("docs", ROOT / "README.md")
SAVES = "docs/explanation/benchmarks.md#saves"
HEADER = ("", "Lightning", "with its own flag", "with `patch()`")
PLAIN, FLAG, FLAG_SYNCED, OURS = (
    "Lightning",
    "Lightning, `exclude_frozen_parameters=True`",
    "Lightning, `exclude_frozen_parameters=True`, and then fsync",
    "Lightning, `patch()`",
)
COMPARED = {
    "resumes strictly without settings": ("a run resumes without extra settings", "2"),
    "`test` in ZeRO-3": ("evaluation from a checkpoint equals evaluation of the model in memory", "3"),
    "refuses another base": ("loading onto a different base raises an error", "2"),
    "survives a kill in a save": ("after a kill during a save, the same program resumes from the previous save", "2"),
}
"""What each row of yes and no says, the feature of the comparison that it is, and in which ZeRO stage."""


def text() -> str:
    """Return the table, each row with a link to where its figures come from, and what they were measured with."""
    bench, compared = (
        json.loads((ROOT / "ci" / "measure" / file).read_text(encoding="utf-8"))
        for file in ("bench/bench.json", "compare/compare.json")
    )
    (case,) = (case for case in bench["saves"]["found"] if is_shown(case))
    model = (
        f"{size(case['frozen_bytes'])} of frozen bf16 weights and {case['trainable'] / 1e6:.0f} M trained parameters"
    )
    return (
        markdown(HEADER, [*_measured(case["ways"]), *_compared(compared["features"])])
        + f"\nThe first two rows: a Llama with {model}, tied embeddings, ZeRO-2, two CPU ranks.\n"
    )


def is_shown(case: dict[str, Any]) -> bool:
    """Whether this is the case of the benchmark that the table shows, as the first chart of the benchmarks does."""
    return (case["title"], case["stage"], case["tied"]) == ("large", 2, True)


def _measured(ways: dict[str, Any]) -> list[tuple[str, ...]]:
    sizes = (size(ways[way]["bytes"]) for way in (PLAIN, FLAG, OURS))
    plain, flag, synced, ours = (seconds(ways[way]["seconds"]) for way in (PLAIN, FLAG, FLAG_SYNCED, OURS))
    return [
        (f"[size]({SAVES})", *sizes),
        (f"[time of a save]({SAVES})", plain, f"{flag}; {synced} with fsync", f"{ours} with fsync"),
    ]


def _compared(features: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for title, (feature, stage) in COMPARED.items():
        values = [features[feature][f"Lightning, {way}"][stage]["value"] for way in ("plain", "flag", "`patch()`")]
        said = ["has its base" if value == "-" else value for value in values]
        rows.append((f"[{title}](docs/explanation/comparison.md#lightning)", *said))
    return rows


if __name__ == "__main__":
    BLOCK.write(text())

"""The README's table, of the last benchmark and the last comparison: `nox -f ci/noxfile.py -s docs` writes it."""

from __future__ import annotations

import json
from typing import Any

from bench.words import seconds, size
from tables import ROOT, Block, markdown

BLOCK = Block("docs", ROOT / "README.md")
HEADER = ("", "Lightning", "with its own flag", "with `patch()`", "source")
PLAIN, FLAG, FLAG_SYNCED, OURS = (
    "Lightning",
    "Lightning, `exclude_frozen_parameters=True`",
    "Lightning, `exclude_frozen_parameters=True`, and then fsync",
    "Lightning, `patch()`",
)
COMPARED = {
    "a run resumes strictly, without settings": ("a run resumes without extra settings", "2"),
    "`test` from a checkpoint in ZeRO-3": (
        "evaluation from a checkpoint equals evaluation of the model in memory",
        "3",
    ),
    "another base is an error": ("loading onto a different base raises an error", "2"),
    "a kill during a save leaves a checkpoint to resume from": (
        "after a kill during a save, the same program resumes from the previous save",
        "2",
    ),
}
"""What each row of yes and no says, the feature of the comparison that it is, and in which ZeRO stage."""


def text() -> str:
    """Return the table."""
    bench, compared = (
        json.loads((ROOT / "ci" / file).read_text(encoding="utf-8"))
        for file in ("bench/bench.json", "compare/compare.json")
    )
    return markdown(HEADER, [*_measured(bench["saves"]["found"]), *_compared(compared["features"])])


def _measured(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The size and the time of a save of the large model, tied, in ZeRO-2."""
    (case,) = (case for case in found if (case["title"], case["stage"], case["tied"]) == ("large", 2, True))
    ways = case["ways"]
    model = (
        f"{size(case['frozen_bytes'])} of frozen bf16 weights and {case['trainable'] / 1e6:.0f} M trained parameters"
    )
    source = f"[benchmarks](docs/benchmarks.md#saves): {model}, tied embeddings, ZeRO-2, two CPU ranks"
    synced = f"{seconds(ways[FLAG]['seconds'])}; synced to the disk {seconds(ways[FLAG_SYNCED]['seconds'])}"
    times = (seconds(ways[PLAIN]["seconds"]), synced, f"{seconds(ways[OURS]['seconds'])}, synced to the disk")
    return [
        ("size of a checkpoint", *(size(ways[way]["bytes"]) for way in (PLAIN, FLAG, OURS)), source),
        ("time of a save", *times, "the same"),
    ]


def _compared(features: dict[str, Any]) -> list[tuple[str, ...]]:
    """What works and what does not."""
    rows = []
    for title, (feature, stage) in COMPARED.items():
        values = [features[feature][f"Lightning, {way}"][stage]["value"] for way in ("plain", "flag", "`patch()`")]
        said = ["it contains its base" if value == "-" else value for value in values]
        rows.append((title, *said, "[comparison](docs/comparison.md#lightning)"))
    return rows


if __name__ == "__main__":
    BLOCK.write(text())

"""ds_frozen_patch and its peers, feature by feature, measured in one run: `nox -f ci/noxfile.py -s compare`.

Writes `compare.json` and the tables beside it, `tables.md`. Every system makes the run of `task.py` on CPU ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.saves import ranks
from compare.features import FEATURES, ROWS, STAGES
from compare.task import FLAG, OURS
from compare.trial import System, Trial
from kit import nodes
from machine import releases
from tables import COMPARISON, Notes, markdown
from training import WITHOUT_FROZEN

RESULTS = Path(__file__).with_name("compare.json")

LIGHTNING = System(
    "Lightning", "plain", "`save_weights_only=True`", saved="epoch={epoch}.ckpt", middle="step={step}.ckpt",
    states="checkpoint",
)  # fmt: skip
TRAINER = System(
    "Trainer", "plain", "`save_only_model=True`", saved="checkpoint-{step}", middle="checkpoint-{step}",
    states="global_step{step}",
)  # fmt: skip
ACCELERATE = System(
    "Accelerate", "plain", "`unwrap_model(model).save_pretrained(...)`", saved="checkpoints/checkpoint_{epoch}",
    states="pytorch_model",
)  # fmt: skip
DEEPSPEED = System("DeepSpeed", "plain", "`save_16bit_model()`")
WITH_FLAG = replace(DEEPSPEED, way="flag", kind=FLAG, weights_only="`save_16bit_model(exclude_frozen_parameters=True)`")
FSDP = System("FSDP2 and DCP", "plain", "the model's state dict alone", asynchronous="`dcp.async_save`")
SYSTEMS = (
    replace(LIGHTNING, way="`patch()`", kind=OURS),
    replace(LIGHTNING, way="flag", kind=FLAG),
    LIGHTNING,
    replace(TRAINER, way="`patch()`", kind=OURS),
    TRAINER,
    replace(ACCELERATE, way="`patch()`", kind=OURS),
    replace(ACCELERATE, way="flag", kind=FLAG),
    ACCELERATE,
    replace(WITH_FLAG, way="`serve()`", kind=OURS),
    WITH_FLAG,
    DEEPSPEED,
    replace(FSDP, way=WITHOUT_FROZEN, kind=FLAG),
    FSDP,
)


def measure(folder: Path) -> dict[str, Any]:
    """Return the facts of the run, and the outcome of every feature, by system and ZeRO stage."""
    found: dict[str, Any] = {title: {} for title in FEATURES}
    with ranks(folder, 1) as one, ranks(folder, 2) as two:
        for system, stage in product(SYSTEMS, STAGES):
            print(f"{system.title}, ZeRO-{stage}", file=sys.stderr, flush=True)
            trial = Trial(system, stage, {1: one, 2: two}, folder / f"{SYSTEMS.index(system)}-{stage}")
            for title, row in FEATURES.items():
                if any(stage in stages for stages in ROWS[title]):
                    value, note = row(trial)
                    found[title].setdefault(system.title, {})[str(stage)] = {"value": value, "note": note}
                    print(f"  {title}: {value} {note}", file=sys.stderr, flush=True)
    return {"trainable": trial.whole[0].trainable, "frozen": trial.whole[0].frozen, "features": found}


def render(result: dict[str, Any]) -> str:
    """Return a table for each owner in Markdown, with notes."""
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    parameters = f"{result['frozen'] / 1e6:.2f} M frozen and {result['trainable'] / 1e6:.2f} M trained parameters"
    parts = [f"Measured on {result['date']}, with {parameters}, {versions}.\n"]
    for owner in dict.fromkeys(system.owner for system in SYSTEMS):
        systems, notes = [system for system in SYSTEMS if system.owner == owner], Notes()
        lines = []
        for title, row in result["features"].items():
            for stages in ROWS[title]:
                name = f"{title}, ZeRO-{stages[0]}" if len(stages) == 1 else title
                lines.append([name, *(_cell(row[system.title], stages, notes) for system in systems)])
        table = markdown(["", *(system.way for system in systems)], lines, notes)
        parts.append(f"## {owner}\n\n{table}")
    return "\n".join(parts)


def _cell(outcomes: dict[str, Any], stages: list[int], notes: Notes) -> str:
    """Return what a cell says: once, if it is so in all of these stages."""
    parts: dict[str, list[str]] = {}
    for stage in stages:
        value, note = outcomes[str(stage)]["value"], outcomes[str(stage)]["note"]
        parts.setdefault(value + notes.marked(note), []).append(f"ZeRO-{stage}")
    if len(parts) == 1:
        return next(iter(parts))
    return ", ".join(f"{text} in {' and '.join(names)}" for text, names in parts.items())


def main() -> None:
    """Measure, and write the table."""
    if why := nodes.why_no_cached_disk():
        sys.exit(f"The slow disk is missing: {why}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - begun),
        "versions": releases(),
        **found,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    COMPARISON.write(render(result))
    print(f"{result['seconds']} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()

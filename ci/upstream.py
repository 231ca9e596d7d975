"""The page on the faults of other projects, made of `ds_frozen_patch.workarounds`: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

import json

from tables import ROOT, Block, markdown

from ds_frozen_patch.workarounds import FAULTS
from ds_frozen_patch.workarounds.fault import Fault

BLOCK = Block("docs", ROOT / "docs" / "reference" / "upstream.md")
TITLES = {"deepspeed": "DeepSpeed", "fabric": "Lightning's Fabric", "transformers": "Trainer of transformers"}
SERIES = json.loads((ROOT / "patches" / "deepspeed" / "index.json").read_text(encoding="utf-8"))["lines"]
NEWEST = {"deepspeed": f"deepspeed/{SERIES[-1]['folder']}", "fabric": "master"}
HEADER = ("fault", "without ds_frozen_patch", "with it", "releases", "thread", "patch")


def text() -> str:
    """Return a table for each project."""
    return "\n".join(
        f"## {TITLES[package]}\n\n{markdown(HEADER, [_row(package, fault) for fault in faults])}"
        for package, faults in FAULTS.items()
    )


def _row(package: str, fault: Fault) -> tuple[str, ...]:
    number, address = fault.thread.rpartition("/")[2], f"https://github.com/deepspeedai/DeepSpeed/{fault.thread}"
    thread = f"[{number}]({address})" if fault.thread else "none found"
    patch = f"[{fault.patch[:4]}](../../patches/{NEWEST[package]}/{fault.patch})" if fault.patch else ""
    return fault.name, fault.effect, fault.cure, _releases(fault), thread, patch


def _releases(fault: Fault) -> str:
    since = f"from {fault.since}" if fault.since else ""
    until = f"before {fault.mended}" if fault.mended else ""
    found = " ".join(filter(None, (since, until))) or "all"
    return f"{found}, with DeepSpeed from {fault.with_deepspeed}" if fault.with_deepspeed else found


if __name__ == "__main__":
    BLOCK.write(text())

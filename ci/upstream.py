"""The page on the faults of other projects, made of `upstream.toml`: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from series.folder import PATCHES, lines
from tables import UPSTREAM, markdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TITLES = {"deepspeed": "DeepSpeed", "fabric": "Lightning's Fabric", "transformers": "Trainer of transformers"}
BLOCK = UPSTREAM
NEWEST = {"deepspeed": lines(PATCHES / "deepspeed")[-1], "fabric": lines(PATCHES)[-1]}
HEADER = ("fault", "without ds_frozen_patch", "with it", "releases", "thread", "patch")


def read() -> dict[str, dict[str, Any]]:
    """Return what `upstream.toml` says of each fault, by package and name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def text() -> str:
    """Return a table for each project."""
    return "\n".join(
        f"## {TITLES[package]}\n\n{markdown(HEADER, [_row(package, *item) for item in said.items()])}"
        for package, said in read().items()
    )


def _row(package: str, name: str, said: dict[str, str]) -> tuple[str, ...]:
    thread, patch = said.get("thread"), said.get("patch")
    address = f"https://github.com/deepspeedai/DeepSpeed/{thread}"
    report = f"[{thread.rpartition('/')[2]}]({address})" if thread else "none found"
    fixed_by = f"[{patch[:4]}]({BLOCK.link(NEWEST[package] / patch)})" if patch else ""
    return name, said["effect"], said["cure"], _releases(said), report, fixed_by


def _releases(said: dict[str, str]) -> str:
    words = (("from", "since"), ("before", "fixed"), ("with DeepSpeed from", "with_deepspeed"))
    return ", ".join(f"{word} {said[key]}" for word, key in words if key in said) or "all"


if __name__ == "__main__":
    BLOCK.write(text())

"""The blocks of code in the README and in `docs/`, and a shell that runs them in the everyday cell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = ("run", "usage", "world-size", "exports", "saves", "nodes", "tools", "testing", "troubleshooting", "reference")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in GUIDES)]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
"""The pages whose blocks run, in an order in which each finds what the ones before have left."""


@dataclass(frozen=True)
class Command:
    """A line that a reader types, and what the page says it prints."""

    line: str
    prints: tuple[str, ...]


def blocks(kind: str) -> list[str]:
    """The blocks of one kind, such as "python", or "" where none is said, without their indentation."""
    found: list[str] = []
    inside = None
    for line in TEXT.splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            inside = line.strip()[3:] if inside is None else None
            found += [""] if inside == kind else []
        elif inside == kind:
            found[-1] += line
    return [textwrap.dedent(block) for block in found]


def commands(block: str) -> list[Command]:
    """The commands of a block of console."""
    found = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *prints = part.splitlines()
        found.append(Command(line, tuple(prints)))
    return found


def starts() -> list[Command]:
    """The ways to start a program under `run`."""
    (block,) = (block for block in blocks("console") if block.startswith("$ ds-frozen-patch run -- "))
    return commands(block)


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a reader would, with the programs of this Python's environment."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    torchrun = programs / "torchrun"  # the cells' torch is of a base environment, whose programs are not in theirs
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "HOME": str(folder), "COLUMNS": "100", **environment}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=400, check=False
    )


def masked(line: str) -> str:
    """A line without its numbers and their padding, which differ between runs."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.]*( [kMG]?B\b)?", "#", line)).strip()

"""A command on many checkpoints: an error of one does not stop the others, and a table at the end shows all."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.text import human_bytes, printable
from ..patching.run import CommandError

FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of one checkpoint.

    Attributes:
        word: a word for it; `FAILED` makes the exit status 1.
        cells: the columns of the table. Integers are sizes in bytes, of which the last line has the sum.
        values: for `--json`.
    """

    word: str
    cells: tuple[int | str, ...]
    values: dict[str, Any]


def run_each(
    args: argparse.Namespace, paths: Sequence[str], columns: Sequence[str], run: Callable[[str], Outcome]
) -> int:
    """Run a tool on each path, print the table or JSON, and return the exit status: 1 if one of them has failed."""
    outcomes = []
    quiet = getattr(args, "quiet", False)
    for number, path in enumerate(paths, 1):
        if not (quiet or args.json):
            print(f"{number} of {len(paths)}: {printable(path)}", file=sys.stderr, flush=True)
        try:
            outcome = run(path)
        except Exception as error:
            if args.debug:
                raise
            message = describe(error)
            print(f"ds-frozen-patch: {printable(message)}", file=sys.stderr)
            outcome = Outcome(FAILED, ("-",) * len(columns), {"path": path, "error": message})
        outcomes.append(outcome)
    if args.json:
        print(json.dumps([outcome.values for outcome in outcomes], indent=1))
    elif not quiet:
        print(_table(paths, columns, outcomes))
    return int(any(outcome.word == FAILED for outcome in outcomes))


def _table(paths: Sequence[str], columns: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    sums = ["", *(_sum([outcome.cells[at] for outcome in outcomes]) for at in range(len(columns)))]
    words = Counter(outcome.word for outcome in outcomes)
    rows = [
        ["", *columns, "checkpoint"],
        *([item.word, *map(_shown, item.cells), printable(path)] for path, item in zip(paths, outcomes, strict=True)),
        [*sums, ", ".join(f"{count} {word}" for word, count in words.items())],
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns) + 1)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]) for row in rows
    )


def _shown(cell: int | str) -> str:
    return cell if isinstance(cell, str) else human_bytes(cell)


def _sum(cells: Sequence[int | str]) -> str:
    sizes = [cell for cell in cells if isinstance(cell, int)]
    return human_bytes(sum(sizes)) if sizes else ""


def describe(error: Exception) -> str:
    """The message that a person gets for an error."""
    if isinstance(error, CheckpointError | CheckpointMismatchError | CommandError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}. This command needs torch: pip install torch"
    return f"{type(error).__name__}: {error}. This was not expected; --debug shows where it was raised."

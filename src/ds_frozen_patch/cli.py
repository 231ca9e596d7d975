"""The command line `ds-frozen-patch`: each command is a function. Results go to stdout, talk to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from ._errors import CheckpointError, CheckpointMismatchError
from ._patching import status
from ._text import human_bytes
from .checkpoint.inspection import Inspection, inspect

EXAMPLES = """examples:
  ds-frozen-patch status
  ds-frozen-patch inspect lightning_logs/version_0/checkpoints/last.ckpt
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 1 where something is wrong. Wrong use exits with 2."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "status":
            _status(given.json)
        else:
            _inspect(given)
    except (CheckpointError, CheckpointMismatchError) as error:
        print(f"ds-frozen-patch: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-frozen-patch",
        description="Trainable-only checkpoints for Lightning + DeepSpeed, seen from outside.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("status", help="what is installed, and what patch() would do about it")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("inspect", help="what the bytes of a checkpoint are; reads no tensor")
    command.add_argument("checkpoint", metavar="CKPT", help="the directory of a DeepSpeed checkpoint")
    command.add_argument("--tag", help="the folder in it (default: what its file `latest` says)")
    command.add_argument("--trust", action="store_true", help="read files that name unexpected classes, and run none")
    command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _status(as_json: bool) -> None:
    found = status()
    print(json.dumps({n: dataclasses.asdict(item) for n, item in found.items()}, indent=1) if as_json else found)


def _inspect(given: argparse.Namespace) -> None:
    found = inspect(given.checkpoint, given.tag, trust=given.trust)
    print(json.dumps(found.to_json(), indent=1) if given.json else _report(found))


def _report(found: Inspection) -> str:
    """What a person wants to see first, first."""
    said = (("epoch", found.epoch), ("step", found.global_step))
    progress = [f"{name} {value}" for name, value in said if value is not None]
    lines = [
        f"{found.path}, {found.tag}: {human_bytes(found.size)}",
        ", ".join([f"ZeRO stage {found.zero_stage}", f"ranks: {found.world_size}", *progress]),
        ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        "",
        *(f"{human_bytes(size):>8}  {size / found.size:4.0%}  {kind}" for kind, size in found.kinds.items()),
        "",
        *(f"{human_bytes(sum(kinds.values())):>8}  {name}" for name, kinds in found.files.items()),
        "",
    ]
    if found.manifest:
        left_out = f"{len(found.manifest.left_out)} frozen parameters, {human_bytes(found.manifest.total_bytes)}"
        lines.append(f"Trainable-only: {left_out} were left out.")
    elif found.prunable:
        lines.append(f"Without its frozen weights it would be {human_bytes(found.size - found.prunable)}.")
    else:
        lines.append("It has no manifest, and no weights that are known to be frozen.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

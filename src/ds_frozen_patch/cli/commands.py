"""One function for each command: it calls the Python function of the same name and prints the result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..patching.run import PATCH, lines, replace_by
from ..patching.status import status
from ..record import Record
from ..settings import Settings, switch
from ..tools.consolidate import DEFAULT_SHARD_BYTES, FILE_SUFFIXES, consolidate
from ..tools.export import export
from ..tools.inspect import inspect
from ..tools.merge import merge
from ..tools.prune import prune
from ..tools.reshard import reshard
from ..tools.verify import verify

_SETTINGS = ("strict", "cpu", *(field.name for field in fields(Settings)))


def run_run(args: argparse.Namespace) -> int:
    """Replace this process by the given command, or print the variables that patch its children."""
    settings = {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}
    command = args.program[args.program[:1] == ["--"] :]
    if bool(command) == bool(args.env):
        args.wrong("pass a command, such as: ds-frozen-patch run -- python train.py; or --env without a command")
    if command:
        replace_by(command, settings)
    print("\n".join(lines(settings)))
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Print what is installed, and whether `run` is in force; 1 if `patch()` raises here, or `run` has been lost."""
    report = status()
    frameworks = {name: asdict(item) for name, item in report.items()}
    values = {"in_force": report.in_force, "problem": report.problem, "frameworks": frameworks}
    print(json.dumps(values, indent=1) if args.json else report)
    is_lost = bool(switch(PATCH)) and not report.in_force and not report.problem
    if is_lost:
        print(f"{PATCH}=1 has no effect: PYTHONPATH lacks the folder of `ds-frozen-patch run`.", file=sys.stderr)
    return int(bool(report.problem) or is_lost)


def run_inspect(args: argparse.Namespace) -> int:
    """Print the sizes."""
    result = inspect(args.checkpoint, args.tag, trust=args.trust)
    _print_json(result) if args.json else print(result)
    return 0


def run_prune(args: argparse.Namespace) -> int:
    """Prune a checkpoint."""
    options = {"trainable": args.trainable, "keep": args.keep, "fingerprints": not args.no_fingerprints}
    return _write(args, prune, trust=args.trust, **options)


def run_consolidate(args: argparse.Namespace) -> int:
    """Consolidate a checkpoint."""
    options = {"dtype": args.dtype, "base": args.base, "max_shard_size": args.max_shard_size or DEFAULT_SHARD_BYTES}
    return _write(args, consolidate, trust=args.trust, **options)


def run_merge(args: argparse.Namespace) -> int:
    """Merge a checkpoint and its base into a Hugging Face folder."""
    if Path(args.target).suffix in FILE_SUFFIXES:
        args.wrong("merge writes a folder; for one file, pass --base to consolidate")
    return _write(args, merge, **_options(args, "base", "dtype", "adapter", "adapter_config", "trust"))


def run_export(args: argparse.Namespace) -> int:
    """Export what was trained."""
    names = ("format", "dtype", "adapter", "adapter_config", "trainable", "trust")
    return _write(args, export, **_options(args, *names))


def run_reshard(args: argparse.Namespace) -> int:
    """Reshard a checkpoint."""
    if args.ranks is None and args.stage is None and args.precision is None:
        args.wrong("pass --ranks, --stage or --precision")
    return _write(args, reshard, **_options(args, "ranks", "stage", "precision", "restart_optimizer", "trust"))


def run_verify(args: argparse.Namespace) -> int:
    """Verify a checkpoint. Problems are printed even with --quiet."""
    result = verify(args.checkpoint, args.tag, base=args.base, trust=args.trust, quiet=args.quiet or args.json)
    if args.json:
        _print_json(result)
    elif result.problems or not args.quiet:
        print(result)
    return 1 if result.problems else 0


def to_json(result: Any) -> dict[str, Any]:
    """The fields and properties of a result as plain values."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    values |= {name: getattr(result, name) for name, item in vars(type(result)).items() if isinstance(item, property)}
    return {name: value.to_values() if isinstance(value, Record) else value for name, value in values.items()}


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _write(args: argparse.Namespace, tool: Callable[..., Any], **options: Any) -> int:
    """Run a tool, and print what it has written, or would write; returns the exit status."""
    quiet = args.quiet or args.json
    result = tool(args.source, args.target, args.tag, **options, dry_run=args.dry_run, quiet=quiet)
    if args.json:
        _print_json(result, dry_run=args.dry_run)
    elif not args.quiet:
        print("Would write" if args.dry_run else "Wrote", result)
    return 0


def _print_json(result: Any, **more: object) -> None:
    print(json.dumps({**to_json(result), **more}, indent=1))  # json escapes everything that is not ASCII

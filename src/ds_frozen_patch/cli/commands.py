"""One function for each command: it calls the Python function of the same name and prints the result."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..common.text import printable
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
from .batches import FAILED, Outcome, run_each

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
    if len(args.checkpoints) == 1:
        result = inspect(args.checkpoints[0], args.tag)
        _print_json(result) if args.json else print(result)
        return 0

    def run(path: str) -> Outcome:
        found = inspect(path, args.tag)
        is_small = found.record and found.record.is_trainable_only
        kind = "trainable-only" if is_small else "full" if found.prunable else "unknown"
        sizes = found.size, found.size - found.prunable
        step = "-" if found.global_step is None else str(found.global_step)
        return Outcome(kind, (*sizes, str(found.zero_stage), str(found.world_size), step), to_json(found))

    return run_each(args, args.checkpoints, ("size", "without frozen", "stage", "ranks", "step"), run)


def run_prune(args: argparse.Namespace) -> int:
    """Prune one checkpoint, or many into a folder."""
    options = {"trainable": args.trainable, "keep": args.keep, "fingerprints": not args.no_fingerprints}
    if args.into is None:
        if len(args.paths) != 2:
            args.wrong("pass SRC and DST, or several SRC and --into FOLDER")
        args.source, args.target = args.paths
        if args.skip_existing and Path(args.target).exists():
            print(f"{printable(args.target)} is there already.", file=sys.stderr)
            return 0
        return _write(args, prune, **options)
    targets = {path: Path(args.into, Path(path).resolve().name) for path in args.paths}
    if twice := [target for target, count in Counter(targets.values()).items() if count > 1]:
        args.wrong(f"several SRC would become {twice[0]}; prune them into different folders")
    if inside := [path for path, target in targets.items() if target.resolve() == Path(path).resolve()]:
        args.wrong(f"{inside[0]} is in {args.into} itself; pass another folder")

    def run(path: str) -> Outcome:
        target = targets[path]
        if args.skip_existing and target.exists():
            return Outcome("there already", ("-", "-"), {"source": path, "target": str(target), "skipped": True})
        if not args.dry_run:
            target.parent.mkdir(parents=True, exist_ok=True)
        quiet = args.quiet or args.json
        done = prune(path, target, args.tag, **options, dry_run=args.dry_run, quiet=quiet)
        word = "would be pruned" if args.dry_run else "pruned"
        return Outcome(word, (done.size_before, done.size_after), {**to_json(done), "dry_run": args.dry_run})

    return run_each(args, args.paths, ("before", "after"), run)


def run_consolidate(args: argparse.Namespace) -> int:
    """Consolidate a checkpoint."""
    options = {"dtype": args.dtype, "base": args.base, "max_shard_size": args.max_shard_size or DEFAULT_SHARD_BYTES}
    return _write(args, consolidate, **options)


def run_merge(args: argparse.Namespace) -> int:
    """Merge a checkpoint and its base into a Hugging Face folder."""
    if Path(args.target).suffix in FILE_SUFFIXES:
        args.wrong("merge writes a folder; for one file, pass --base to consolidate")
    return _write(args, merge, **_options(args, "base", "dtype", "adapter", "adapter_config"))


def run_export(args: argparse.Namespace) -> int:
    """Export what was trained."""
    names = ("format", "dtype", "adapter", "adapter_config", "trainable")
    return _write(args, export, **_options(args, *names))


def run_reshard(args: argparse.Namespace) -> int:
    """Reshard a checkpoint."""
    if args.ranks is None and args.stage is None and args.precision is None:
        args.wrong("pass --ranks, --stage or --precision")
    return _write(args, reshard, **_options(args, "ranks", "stage", "precision", "restart_optimizer"))


def run_verify(args: argparse.Namespace) -> int:
    """Verify checkpoints. Problems are printed even with --quiet."""
    is_one = len(args.checkpoints) == 1

    def run(path: str) -> Outcome:
        result = verify(path, args.tag, base=args.base, quiet=args.quiet or args.json)
        if not args.json and (result.problems or (is_one and not args.quiet)):
            print(result)
        cells = result.size, str(result.trained), str(result.left_out), str(result.compared)
        return Outcome(FAILED if result.problems else "verified", cells, to_json(result))

    if is_one:
        outcome = run(args.checkpoints[0])
        if args.json:
            print(json.dumps(outcome.values, indent=1))
        return int(outcome.word == FAILED)
    return run_each(args, args.checkpoints, ("size", "trained", "left out", "match the base"), run)


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

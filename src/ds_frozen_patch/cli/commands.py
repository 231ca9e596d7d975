"""One function for each command: it calls the Python function of the same name and prints the result."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from ..manifest import Manifest
from ..patching.launch import lines, replace_by
from ..patching.patch import status
from ..settings import Settings
from ..tools.consolidate import DEFAULT_SHARD_BYTES, consolidate
from ..tools.export import export
from ..tools.inspect import inspect
from ..tools.merge import merge
from ..tools.prune import prune
from ..tools.reshard import reshard
from ..tools.universal import universal
from ..tools.verify import verify

_SETTINGS = ("strict", "cpu", *(field.name for field in fields(Settings)))


def run_run(given: argparse.Namespace) -> int:
    """Replace this process by the given command, or print the variables that patch its children."""
    settings = {name: value for name in _SETTINGS if (value := getattr(given, name)) is not None}
    command = given.program[given.program[:1] == ["--"] :]
    if bool(command) == bool(given.env):
        given.wrong("pass a command, such as: ds-frozen-patch run -- python train.py; or --env without a command")
    if command:
        replace_by(command, settings)
    print("\n".join(lines(settings)))
    return 0


def run_status(given: argparse.Namespace) -> int:
    """Print what is installed."""
    found = status()
    print(json.dumps({name: asdict(item) for name, item in found.items()}, indent=1) if given.json else found)
    return 0


def run_inspect(given: argparse.Namespace) -> int:
    """Print the sizes."""
    found = inspect(given.checkpoint, given.tag, trust=given.trust)
    _print_json(found) if given.json else print(found)
    return 0


def run_prune(given: argparse.Namespace) -> int:
    """Prune a checkpoint."""
    options = {"trainable": given.trainable, "keep": given.keep, "fingerprints": not given.no_fingerprints}
    return _report(given, prune(given.source, given.target, given.tag, **options, **_common_options(given)))


def run_consolidate(given: argparse.Namespace) -> int:
    """Consolidate a checkpoint."""
    options = {"dtype": given.dtype, "base": given.base, "max_shard_size": given.max_shard_size or DEFAULT_SHARD_BYTES}
    return _report(given, consolidate(given.source, given.target, given.tag, **options, **_common_options(given)))


def run_merge(given: argparse.Namespace) -> int:
    """Merge a checkpoint and its base: into a Hugging Face folder, or under the names of the run's module."""
    if given.format is None:
        if given.adapter or given.adapter_config:
            given.wrong("--adapter and --adapter-config are for --format hf")
        return run_consolidate(given)
    if given.max_shard_size:
        given.wrong("--format hf writes files as large as the base's; --max-shard-size has no effect")
    options = {name: getattr(given, name) for name in ("base", "dtype", "adapter", "adapter_config")}
    return _report(given, merge(given.source, given.target, given.tag, **options, **_common_options(given)))


def run_export(given: argparse.Namespace) -> int:
    """Export what was trained."""
    names = ("format", "dtype", "adapter", "adapter_config", "trainable")
    options = {name: getattr(given, name) for name in names}
    return _report(given, export(given.source, given.target, given.tag, **options, **_common_options(given)))


def run_reshard(given: argparse.Namespace) -> int:
    """Reshard a checkpoint."""
    if given.ranks is None and given.stage is None and given.precision is None:
        given.wrong("pass --ranks, --stage or --precision")
    options = {name: getattr(given, name) for name in ("ranks", "stage", "precision", "optimizer")}
    return _report(given, reshard(given.source, given.target, given.tag, **options, **_common_options(given)))


def run_universal(given: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    quiet = given.quiet or given.json
    return _report(given, universal(given.source, given.target, given.tag, dry_run=given.dry_run, quiet=quiet))


def run_verify(given: argparse.Namespace) -> int:
    """Verify a checkpoint. Problems are printed even with --quiet."""
    found = verify(given.checkpoint, given.tag, base=given.base, trust=given.trust, quiet=given.quiet or given.json)
    if given.json:
        _print_json(found)
    elif found.problems or not given.quiet:
        print(found)
    return 1 if found.problems else 0


def to_json(result: Any) -> dict[str, Any]:
    """The fields and properties of a result as plain values."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    values |= {name: getattr(result, name) for name, item in vars(type(result)).items() if isinstance(item, property)}
    return {name: value.to_state() if isinstance(value, Manifest) else value for name, value in values.items()}


def _common_options(given: argparse.Namespace) -> dict[str, Any]:
    return {"trust": given.trust, "dry_run": given.dry_run, "quiet": given.quiet or given.json}


def _report(given: argparse.Namespace, result: Any) -> int:
    """Print what a command has written, or would write; returns the exit status."""
    if given.json:
        _print_json(result, dry_run=given.dry_run)
    elif not given.quiet:
        print("Would write" if given.dry_run else "Wrote", result)
    return 0


def _print_json(result: Any, **more: object) -> None:
    print(json.dumps({**to_json(result), **more}, indent=1))  # json escapes everything that is not ASCII

"""The command line `ds-frozen-patch`: each command is a function. Results go to stdout, talk to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .checkpoint.dtypes import DTYPES
from .checkpoint.tools.consolidate import Consolidated, consolidate, parse_size
from .checkpoint.tools.export import FORMATS, Exported, export
from .checkpoint.tools.inspect import Inspection, inspect
from .checkpoint.tools.prune import Pruned, prune
from .checkpoint.tools.reshard import Resharded, reshard
from .checkpoint.tools.universal import Universal, universal
from .checkpoint.tools.verify import Verified, verify
from .common.errors import CheckpointError, CheckpointMismatchError, named
from .common.text import human_bytes, printable
from .manifest import Manifest
from .parameters import BUFFER, PARAMETER, PART
from .patching.launch import CommandError, lines, replace_by
from .patching.patch import status
from .settings import EXPORT, VERIFY_BASE

EXAMPLES = {
    "": """
  ds-frozen-patch run -- torchrun --nproc-per-node 4 train.py
  ds-frozen-patch status
  ds-frozen-patch inspect lightning_logs/version_0/checkpoints/last.ckpt
  ds-frozen-patch prune last.ckpt small.ckpt
  ds-frozen-patch consolidate small.ckpt whole.ckpt --base ./Llama-3.1-8B
  ds-frozen-patch export small.ckpt adapter --format peft
  ds-frozen-patch reshard last.ckpt last.4gpus.ckpt --ranks 4
""",
    "run": """
  ds-frozen-patch run -- python train.py --lr 1e-4
  ds-frozen-patch run --strict -- torchrun --nproc-per-node 4 train.py
  srun ds-frozen-patch run --elastic -- python -m my.package fit --config run.yaml
  eval "$(ds-frozen-patch run --env)"
""",
    "status": "\n  ds-frozen-patch status --json\n",
    "inspect": "\n  ds-frozen-patch inspect last.ckpt\n",
    "prune": """
  ds-frozen-patch prune last.ckpt small.ckpt
  ds-frozen-patch prune last.ckpt small.ckpt --dry-run
""",
    "consolidate": """
  ds-frozen-patch consolidate last.ckpt weights.ckpt
  ds-frozen-patch consolidate last.ckpt weights.safetensors --dtype bf16
  ds-frozen-patch consolidate small.ckpt whole --base ./Llama-3.1-8B --max-shard-size 2GB
""",
    "merge": "\n  ds-frozen-patch merge small.ckpt whole.ckpt --base ./Llama-3.1-8B\n",
    "export": """
  ds-frozen-patch export last.ckpt adapter --format peft
  ds-frozen-patch export last.ckpt trained.safetensors --format safetensors
""",
    "reshard": """
  ds-frozen-patch reshard last.ckpt last.4gpus.ckpt --ranks 4
""",
    "universal": "\n  ds-frozen-patch universal last.ckpt last.universal\n",
    "verify": """
  ds-frozen-patch verify small.ckpt
  ds-frozen-patch verify small.ckpt --base ./Llama-3.1-8B
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 1 where something is wrong. Wrong use exits with 2."""
    given = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int] = given.run
        status = run(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough; Python's own flush would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("ds-frozen-patch: interrupted; nothing was left at the target", file=sys.stderr)
        return 1
    except Exception as error:
        if given.debug:
            raise
        print(f"ds-frozen-patch: {printable(_message(error))}", file=sys.stderr)
        return error.status if isinstance(error, CommandError) else 1


def _message(error: Exception) -> str:
    if isinstance(error, CheckpointError | CheckpointMismatchError | CommandError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}. This command needs torch: pip install torch"
    return f"{type(error).__name__}: {error}. This was not expected; --debug shows where it was raised."


def _print(lines: Iterable[str]) -> None:
    """To stdout. What a checkpoint says stays on its line, and no terminal acts on it."""
    print("\n".join(map(printable, lines)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-frozen-patch",
        description="Trainable-only checkpoints for Lightning + DeepSpeed.",
        epilog=f"examples:{EXAMPLES['']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=f"examples:{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, wrong=command.error)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    _runs(add("run", _run, "a program, and all that it starts, with trainable-only checkpoints"))
    _common(add("status", _status, "what is installed, and what patch() would do about it"))
    command = add("inspect", _inspect, "what the bytes of a checkpoint are; reads no tensor")
    command.add_argument("checkpoint", metavar="CKPT", help="the directory of a DeepSpeed checkpoint")
    _reads(command)
    command = add("prune", _prune, "a full checkpoint without its frozen parameters, as if it had been saved so")
    _writes(command, "a directory to make")
    _chooses(command)
    command.add_argument(
        "--no-fingerprints",
        action="store_true",
        help="do not read the frozen parameters: faster, but a load cannot verify its base then",
    )
    command = add("consolidate", _consolidate, "the weights of a checkpoint in one file, what was trained in fp32")
    _writes(command, "a .ckpt for Lightning, a .safetensors, or a folder of such files to make")
    _gathers(command, is_whole=False)
    command = add("merge", _consolidate, "the same as consolidate with a base: a trainable-only checkpoint made whole")
    _writes(command, "a .ckpt for Lightning, a .safetensors, or a folder of such files to make")
    _gathers(command, is_whole=True)
    command = add("export", _export, "what was trained, as a PEFT adapter or a plain file of safetensors")
    _writes(command, "for peft a folder to make, else a file")
    _chooses(command)
    command.add_argument("--format", choices=FORMATS, required=True)
    command.add_argument(
        "--dtype", choices=list(DTYPES), help="of all (default: what was trained in fp32, else as saved)"
    )
    command.add_argument("--adapter", metavar="NAME", help="which of the run's adapters, for peft")
    command.add_argument(
        "--adapter-config", metavar="FILE", help="an adapter_config.json, where the run has not recorded its own"
    )
    command = add(
        "reshard", _reshard, "a checkpoint as another number of ranks would have saved it, to resume with that"
    )
    _writes(command, "a directory to make")
    command.add_argument(
        "--ranks", metavar="N", type=_ranks, required=True, help="how many are to resume from it: nodes times devices"
    )
    command = add("universal", _universal, "a universal checkpoint of DeepSpeed's, for programs that load these")
    _writes(command, "a directory to make", trusts=False)
    command = add("verify", _verify, "whether a checkpoint is whole, of one save, and its base the right one")
    command.add_argument("checkpoint", metavar="CKPT", help="the directory of a DeepSpeed checkpoint")
    command.add_argument("--base", help="what the run was built from, to be compared with the manifest")
    _reads(command)
    command.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _runs(command: argparse.ArgumentParser) -> None:
    command.usage = "%(prog)s [options] -- COMMAND ..."
    command.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program and its arguments")
    command.add_argument(
        "--strict", action="store_true", default=None, help="end the program if what is installed cannot be patched"
    )
    command.add_argument("--verify-base", choices=VERIFY_BASE, help="if a checkpoint is loaded onto another base")
    command.add_argument(
        "--keep", metavar="PATTERN", action="append", help="frozen parameters to save all the same; may be given again"
    )
    command.add_argument(
        "--leave-out", metavar="PATTERN", action="append", help="buffers to leave out as base; may be given again"
    )
    command.add_argument("--export", choices=EXPORT, help="what to put into each checkpoint, to be used at once")
    command.add_argument(
        "--fp32-weights", action="store_true", default=None, help="let weights alone be the fp32 masters"
    )
    command.add_argument(
        "--elastic", action=argparse.BooleanOptionalAction, help="reshard what another number of ranks has saved"
    )
    command.add_argument(
        "--sync",
        action=argparse.BooleanOptionalAction,
        help="wait in a save until its files are on the disk (default: yes)",
    )
    command.add_argument(
        "--trust",
        action=argparse.BooleanOptionalAction,
        help="let loads run what a checkpoint names (default: yes, with a warning)",
    )
    command.add_argument(
        "--cpu", action="store_true", default=None, help="train on CPU ranks, to try a program without a GPU"
    )
    command.add_argument("--env", action="store_true", help="run nothing; print the environment variables for a shell")


def _reads(command: argparse.ArgumentParser, trusts: bool = True) -> None:
    command.add_argument("--tag", help="the folder in it (default: what its file `latest` says)")
    if trusts:
        about = "read files that name unexpected classes, and run none"
        command.add_argument("--trust", action="store_true", help=about)
    _common(command)


def _writes(command: argparse.ArgumentParser, target: str, trusts: bool = True) -> None:
    command.add_argument("source", metavar="SRC", help="the directory of a DeepSpeed checkpoint; stays as it is")
    command.add_argument("target", metavar="DST", help=target)
    _reads(command, trusts)
    command.add_argument("--dry-run", action="store_true", help="write nothing, and say what would be written")
    command.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr, nothing on stdout")


def _chooses(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trainable",
        metavar="PATTERN",
        action="append",
        default=[],
        help="names that were trained, for a ZeRO stage 0 or 1 that does not say it; may be given again",
    )


def _gathers(command: argparse.ArgumentParser, is_whole: bool) -> None:
    command.add_argument(
        "--dtype", choices=list(DTYPES), help="of all (default: what was trained in fp32, else as saved)"
    )
    command.add_argument(
        "--base",
        required=is_whole,
        help="what the run was built from, to put in what was left out: a folder of safetensors, a file, or a full"
        " checkpoint; it is verified",
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, default="5GB", help="of each file in a folder (default: 5GB)"
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; give 1 or more")
    return int(text)


def _run(given: argparse.Namespace) -> int:
    names = ("strict", "cpu", "verify_base", "keep", "leave_out", "export", "fp32_weights", "elastic", "sync", "trust")
    said = {name: value for name in names if (value := getattr(given, name)) is not None}
    command = given.program[given.program[:1] == ["--"] :]
    if bool(command) == bool(given.env):
        given.wrong("name a command, such as: ds-frozen-patch run -- python train.py; or --env, and none")
    if command:
        replace_by(command, said)
    print("\n".join(lines(said)))
    return 0


def _status(given: argparse.Namespace) -> int:
    found = status()
    print(json.dumps({n: dataclasses.asdict(item) for n, item in found.items()}, indent=1) if given.json else found)
    return 0


def _inspect(given: argparse.Namespace) -> int:
    found = inspect(given.checkpoint, given.tag, trust=given.trust)
    _print_json(found) if given.json else _print(_report(found))
    return 0


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """What the commands that write have in common."""
    return {
        "trust": given.trust,
        "dry_run": given.dry_run,
        "quiet": given.quiet or given.json,
    }


def _print_json(found: Any, **more: object) -> None:
    print(json.dumps({**found.to_json(), **more}, indent=1))  # json escapes all that is not ASCII


def _say(given: argparse.Namespace, found: Any, lines: Sequence[str]) -> None:
    if given.json:
        _print_json(found, dry_run=given.dry_run)
    elif not given.quiet:
        first, *rest = lines
        _print([f"Would write {first}" if given.dry_run else f"Wrote {first}", *rest])


def _prune(given: argparse.Namespace) -> int:
    found = prune(
        given.source,
        given.target,
        given.tag,
        trainable=given.trainable,
        fingerprints=not given.no_fingerprints,
        **_options(given),
    )
    _say(given, found, _pruned(found, given))
    return 0


def _pruned(found: Pruned, given: argparse.Namespace) -> list[str]:
    size = f"{human_bytes(found.size_after)} of " if found.size_after is not None else "a part of "
    lines = [
        f"{found.target}: {size}{human_bytes(found.size_before)}.",
        f"Left out: {_left_out(found.manifest)}.",
    ]
    if given.no_fingerprints:
        lines.append("Without fingerprints: a load cannot tell a wrong base.")
    return lines


def _consolidate(given: argparse.Namespace) -> int:
    found = consolidate(
        given.source,
        given.target,
        given.tag,
        dtype=given.dtype,
        base=given.base,
        max_shard_size=given.max_shard_size,
        **_options(given),
    )
    _say(given, found, _consolidated(found))
    return 0


def _consolidated(found: Consolidated) -> list[str]:
    files = f" in {len(found.files)} files" if len(found.files) > 1 else ""
    lines = [f"{found.target}: {found.tensors} tensors, {human_bytes(found.size)}{files}."]
    if not found.is_whole:
        lines.append("Its frozen parameters were left out of the checkpoint; --base puts them in.")
    if found.unverified:
        lines.append(f"Not verified: {named(found.unverified, 3)}.")
    return lines


def _export(given: argparse.Namespace) -> int:
    found = export(
        given.source,
        given.target,
        given.tag,
        format=given.format,
        dtype=given.dtype,
        adapter=given.adapter,
        adapter_config=given.adapter_config,
        trainable=given.trainable,
        **_options(given),
    )
    _say(given, found, _exported(found))
    return 0


def _exported(found: Exported) -> list[str]:
    lines = [f"{found.target}: {len(found.tensors)} tensors, {human_bytes(found.size)}."]
    if found.outside:
        lines.append(f"Trained too, but outside of the model that has the adapter: {named(found.outside, 3)}.")
    return lines


def _reshard(given: argparse.Namespace) -> int:
    found = reshard(given.source, given.target, given.tag, ranks=given.ranks, **_options(given))
    _say(given, found, _resharded(found))
    return 0


def _resharded(found: Resharded) -> list[str]:
    return [
        f"{found.target}: {human_bytes(found.size)}, ZeRO stage {found.zero_stage}, for {found.ranks} ranks in place of"
        f" {found.ranks_before}."
    ]


def _universal(given: argparse.Namespace) -> int:
    options = {"dry_run": given.dry_run, "quiet": given.quiet or given.json}
    found = universal(given.source, given.target, given.tag, **options)
    _say(given, found, _made_universal(found))
    return 0


def _made_universal(found: Universal) -> list[str]:
    size = f"{human_bytes(found.size)}, " if found.size is not None else ""
    return [
        f"{found.target}: {size}ZeRO stage {found.zero_stage}, by deepspeed {found.deepspeed}.",
        'DeepSpeed loads it with "checkpoint": {"load_universal": true}.',
    ]


def _verify(given: argparse.Namespace) -> int:
    found = verify(given.checkpoint, given.tag, base=given.base, trust=given.trust, quiet=given.quiet or given.json)
    if given.json:
        _print_json(found)
    elif not (given.quiet and not found.problems):
        _print(_verified(found, given.base))
    return 1 if found.problems else 0


def _verified(found: Verified, base: str | None) -> list[str]:
    if found.problems:
        return [f"{found.path}: {len(found.problems)} wrong.", *(f"- {said}" for said in found.problems)]
    lines = [
        f"{found.path}: whole, {found.files} files, {human_bytes(found.size)}.",
        f"{found.trained} trained parameters; {found.left_out} left out.",
    ]
    if base:
        lines.append(f"{found.compared} of them are in {base} as they were at the save.")
    if found.unverified:
        lines.append(f"Not to be verified: {named(found.unverified, 3)}.")
    return lines


def _left_out(manifest: Manifest) -> str:
    """How much was left out, in words."""
    counts = Counter(one.kind for one in manifest.left_out)
    parts = f", {counts[PART]} parts of them" if counts[PART] else ""
    buffers = f", {counts[BUFFER]} buffers" if counts[BUFFER] else ""
    return f"{counts[PARAMETER]} frozen parameters{parts}{buffers}, {human_bytes(manifest.total_bytes)}"


def _report(found: Inspection) -> list[str]:
    """What a person wants to see first, first."""
    said = (("epoch", found.epoch), ("step", found.global_step))
    progress = [f"{name} {value}" for name, value in said if value is not None]
    lines = [
        f"{found.path}, {found.tag}: {human_bytes(found.size)}",
        ", ".join([f"ZeRO stage {found.zero_stage}", f"ranks: {found.world_size}", *progress]),
        ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        *(f"base: {kind}" for kind in found.base),
        "",
        *(f"{human_bytes(size):>8}  {size / found.size:4.0%}  {kind}" for kind, size in found.kinds.items()),
        "",
        *(f"{human_bytes(sum(kinds.values())):>8}  {name}" for name, kinds in found.files.items()),
        "",
    ]
    if found.manifest:
        lines.append(f"Trainable-only: {_left_out(found.manifest)} were left out.")
    elif found.prunable:
        lines.append(f"Without its frozen weights it would be {human_bytes(found.size - found.prunable)}.")
    else:
        lines.append("It has no manifest, and no weights that are known to be frozen.")
    return lines


if __name__ == "__main__":
    sys.exit(main())

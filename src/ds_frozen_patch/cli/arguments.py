"""The arguments of each command, and how one is run. `docs/reference/command-line.md` is made of them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..checkpoint.dtypes import DTYPES
from ..common.text import did_you_mean, printable
from ..patching.run import CommandError
from ..settings import OPTIONS, described, variable
from ..tools.export import FORMATS
from ..tools.reshard import PRECISIONS
from . import commands
from .batches import describe

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
    "inspect": "\n  ds-frozen-patch inspect last.ckpt\n  ds-frozen-patch inspect runs/*.ckpt\n",
    "prune": """
  ds-frozen-patch prune last.ckpt small.ckpt
  ds-frozen-patch prune runs/*.ckpt --into small --skip-existing
  ds-frozen-patch prune runs/*.ckpt --into small --dry-run
""",
    "consolidate": """
  ds-frozen-patch consolidate last.ckpt weights.ckpt
  ds-frozen-patch consolidate last.ckpt weights.safetensors --dtype bf16
  ds-frozen-patch consolidate small.ckpt whole --base ./Llama-3.1-8B --max-shard-size 2GB
""",
    "merge": """
  ds-frozen-patch merge small.ckpt merged --base ./Llama-3.1-8B
  ds-frozen-patch merge small.ckpt merged --base meta-llama/Llama-3.1-8B
""",
    "export": """
  ds-frozen-patch export last.ckpt adapter --format peft
  ds-frozen-patch export last.ckpt trained.safetensors --format safetensors
""",
    "reshard": """
  ds-frozen-patch reshard last.ckpt last.4gpus.ckpt --ranks 4
  ds-frozen-patch reshard last.ckpt last.zero3.ckpt --stage 3 --ranks 8
""",
    "verify": """
  ds-frozen-patch verify small.ckpt
  ds-frozen-patch verify small/*.ckpt --base ./Llama-3.1-8B
""",
}
_FILE_OR_FOLDER = "the output: a .ckpt for Lightning, a .safetensors file, or a new directory for sharded safetensors"
_BASE = "a directory of safetensors, a file, a full checkpoint, or the hub's id of a model in the local cache"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest a command, a choice or an option for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with a suggestion, and exit with status 2."""
        suggestion = ""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            suggestion = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif option := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            suggestion = did_you_mean(option[1], re.findall(r"--[\w-]+", self.format_help()))
        super().error(f"{message}. {suggestion}" if suggestion else message)


def make_parser() -> argparse.ArgumentParser:
    """The parser; each command sets `run`, its function, and `wrong`, which reports wrong usage."""
    parser = _Parser(
        prog="ds-frozen-patch",
        description="Trainable-only checkpoints for Lightning + DeepSpeed.",
        epilog=f"examples:{EXAMPLES['']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}", help="show the version and exit"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=f"examples:{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, wrong=command.error)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    command = add("run", commands.run_run, "run a command and its child processes with patching enabled")
    _add_run_arguments(command)
    about = "show what patch() does here with each package; the exit status is 1 if it would raise"
    command = add("status", commands.run_status, about)
    _add_json(command)
    command = add("inspect", commands.run_inspect, "show what takes up space in a checkpoint, without reading tensors")
    _add_checkpoints(command)
    _add_reading(command)
    command = add("prune", commands.run_prune, "convert a full checkpoint into a trainable-only checkpoint")
    command.usage = "%(prog)s [options] SRC DST\n       %(prog)s [options] SRC ... --into FOLDER"
    about = (
        "the directory of a DeepSpeed checkpoint; it is not changed. Without --into, the second is DST, to be created"
    )
    command.add_argument("paths", metavar="SRC", nargs="+", help=about)
    command.add_argument("--into", metavar="FOLDER", help="create the directories in this one, by the names of SRC")
    command.add_argument("--skip-existing", action="store_true", help="leave out what is there already")
    _add_reading(command)
    _add_output(command)
    _add_trainable(command)
    command.add_argument(
        "--keep",
        metavar="PATTERN",
        action="append",
        default=[],
        help="names of frozen parameters that no base has, such as an average of the weights (repeatable)",
    )
    command.add_argument(
        "--no-fingerprints",
        action="store_true",
        help="do not read the frozen parameters: faster, but loads cannot verify the base",
    )
    command = add(
        "consolidate", commands.run_consolidate, "collect the weights of a checkpoint, the trained ones in fp32"
    )
    _add_writing(command, _FILE_OR_FOLDER)
    _add_dtype(command)
    command.add_argument("--base", help=f"add the frozen parameters from here, and verify them: {_BASE}")
    command.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_parse_size,
        help="maximum size of each file in a directory (default: 5GB)",
    )
    about = "merge a checkpoint, or PEFT's adapter folder, and its base into a folder for from_pretrained and vLLM"
    command = add("merge", commands.run_merge, about)
    _add_writing(command, "the directory to create")
    _add_dtype(command, "as in the base's files")
    command.add_argument("--base", required=True, help="the folder, or the hub's id, of the model; it is verified")
    _add_adapter(command, "which adapter of the run to fold in", "")
    command = add("export", commands.run_export, "export the trained weights as a PEFT adapter or a safetensors file")
    _add_writing(command, "the directory (peft) or file (safetensors) to create")
    _add_trainable(command)
    command.add_argument("--format", choices=FORMATS, required=True, help="the output format")
    _add_dtype(command)
    _add_adapter(command, "which adapter of the run to export (peft)", " (peft)")
    command = add(
        "reshard", commands.run_reshard, "convert a checkpoint to another number of ranks, ZeRO stage or precision"
    )
    _add_writing(command, "the directory to create")
    command.add_argument(
        "--ranks", metavar="N", type=_parse_ranks, help="the new world size: nodes times devices (default: as it is)"
    )
    command.add_argument("--stage", type=int, choices=range(4), help="the new ZeRO stage (default: as it is)")
    command.add_argument("--precision", choices=PRECISIONS, help="of the run that is to load it (default: as it is)")
    command.add_argument(
        "--restart-optimizer",
        action="store_true",
        help="write the masters alone, for a fresh optimizer",
    )
    command = add("verify", commands.run_verify, "check that a checkpoint is complete, undamaged and consistent")
    _add_checkpoints(command)
    command.add_argument("--base", help=f"compare this base with the fingerprints in the record: {_BASE}")
    _add_reading(command)
    command.add_argument("-q", "--quiet", action="store_true", help="do not show progress on stderr")
    return parser


def _add_run_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "%(prog)s [options] -- COMMAND ..."
    command.add_argument("program", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command and its arguments")
    switch = argparse.BooleanOptionalAction
    command.add_argument("--strict", action=switch, help="exit with an error if a checkpoint would be full")
    for option in OPTIONS.values():
        words, kind = described(option).replace("`", ""), option.metadata["kind"]
        settings: dict[str, Any] = {
            "choice": {"choices": option.metadata["choices"], "help": words},
            "patterns": {"metavar": "PATTERN", "action": "append", "help": f"{words} Repeatable."},
            "switch": {"action": switch, "help": words},
        }[kind]
        name = option.name.replace("_", "-")
        command.add_argument(f"--{name}", **settings)
        if kind != "switch" and option.default in (None, ()):  # the environment may have set it
            about = f"undo {variable(option.name)}"
            command.add_argument(f"--no-{name}", dest=option.name, action="store_const", const="", help=about)
    command.add_argument("--cpu", action=switch, help="train on CPU, to test without a GPU")
    command.add_argument("--env", action="store_true", help="print the environment variables instead, for a shell")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_checkpoints(command: argparse.ArgumentParser) -> None:
    about = "the directory of a DeepSpeed checkpoint; for several, a table is printed"
    command.add_argument("checkpoints", metavar="CKPT", nargs="+", help=about)


def _add_reading(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tag", help="the subdirectory to read (default: the one named in `latest`)")
    _add_json(command)


def _add_writing(command: argparse.ArgumentParser, target: str) -> None:
    command.add_argument("source", metavar="SRC", help="the directory of a DeepSpeed checkpoint; it is not changed")
    command.add_argument("target", metavar="DST", help=target)
    _add_reading(command)
    _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dry-run", action="store_true", help="show what would be written, without writing it")
    command.add_argument("-q", "--quiet", action="store_true", help="print nothing, and do not show progress")


def _add_trainable(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trainable",
        metavar="PATTERN",
        action="append",
        default=[],
        help="names of trained parameters, if a ZeRO stage 0 or 1 checkpoint does not tell (repeatable)",
    )


def _add_dtype(command: argparse.ArgumentParser, default: str = "trained weights in fp32, others as saved") -> None:
    command.add_argument(
        "--dtype", choices=list(DTYPES), help=f"convert all floating-point tensors (default: {default})"
    )


def _add_adapter(command: argparse.ArgumentParser, which: str, only: str) -> None:
    command.add_argument("--adapter", metavar="NAME", help=which)
    about = f"an adapter_config.json to use if the checkpoint contains none{only}"
    command.add_argument("--adapter-config", metavar="FILE", help=about)


def _parse_size(text: str) -> int:
    """Bytes, from text such as "5GB", "500MB" or "1000000"; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; pass one such as 5GB or 500MB")
    return size


def _parse_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; pass 1 or more")
    return int(text)


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command and return the exit status: 0, or 1 after an error. Wrong usage exits with status 2."""
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would show the usage of no command
        args.wrong(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed stdout; Python's own flush at exit would fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        print(f"ds-frozen-patch: {printable(describe(error))}", file=sys.stderr)
        return error.status if isinstance(error, CommandError) else 1

"""Runs one command, and reports an error of it in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.text import printable
from ..patching.launch import CommandError
from .arguments import make_parser


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
        print(f"ds-frozen-patch: {printable(_message(error))}", file=sys.stderr)
        return error.status if isinstance(error, CommandError) else 1


def _message(error: Exception) -> str:
    if isinstance(error, CheckpointError | CheckpointMismatchError | CommandError):
        return str(error)
    if isinstance(error, ImportError):
        return f"{error}. This command needs torch: pip install torch"
    return f"{type(error).__name__}: {error}. This was not expected; --debug shows where it was raised."

"""The command line `ds-frozen-patch`: results go to stdout, everything else to stderr. Nothing imports this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in shells: 128 and the number of SIGINT."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 after an error, or 130 after Ctrl-C.

    Wrong usage exits with status 2.
    """
    try:
        from .arguments import run_command  # here, so that Ctrl-C during imports ends without a traceback, too

        return run_command(arguments)
    except KeyboardInterrupt:
        print("ds-frozen-patch: interrupted; nothing was left at the target", file=sys.stderr)
        return INTERRUPTED

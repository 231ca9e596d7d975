"""How far a long piece of work has got, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Gives a function that takes the bytes done since its last call; a bar where stderr is a terminal and tqdm there.

    Args:
        what: is done, in a word or two.
        total: how many bytes there are.
        quiet: show nothing.
    """
    bar = None
    if not quiet and sys.stderr.isatty():
        try:
            from tqdm import tqdm  # Lightning and DeepSpeed require it, so it is nearly always there
        except ImportError:
            pass
        else:
            bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)
    try:
        yield bar.update if bar is not None else lambda _: None
    finally:
        if bar is not None:
            bar.close()

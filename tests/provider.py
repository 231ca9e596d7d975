"""Who makes checkpoints trainable-only in this cell: the shim, or Lightning itself with our patch series.

Lightning's own argument is False unless it is said; a cell with the series makes True its default while a test runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from under_test import CELL, DeepSpeedStrategy, FabricDeepSpeed

import ds_frozen_patch


def trainable_only() -> None:
    """From now on, new strategies save trainable-only checkpoints."""
    if CELL.patches:
        _set_default(True)
    else:
        ds_frozen_patch.patch()


def stop() -> None:
    """Leave Lightning as it was."""
    _set_default(False) if CELL.patches else ds_frozen_patch.unpatch()


@contextmanager
def full_checkpoint(*strategies: Any) -> Iterator[None]:
    """While this lasts, checkpoints are full: of these strategies, and of those that are made meanwhile."""
    if not CELL.patches:
        with ds_frozen_patch.full_checkpoint():
            yield
        return
    _set_default(False)
    for strategy in strategies:
        strategy.exclude_frozen_parameters = False
    try:
        yield
    finally:
        _set_default(True)
        for strategy in strategies:
            strategy.exclude_frozen_parameters = True


def _set_default(value: bool) -> None:
    for strategy in (DeepSpeedStrategy, FabricDeepSpeed):
        init: Any = strategy.__init__
        # The arguments with a default are the last ones.
        names = init.__code__.co_varnames[: init.__code__.co_argcount][-len(init.__defaults__) :]
        defaults = dict(zip(names, init.__defaults__, strict=True)) | {"exclude_frozen_parameters": value}
        init.__defaults__ = tuple(defaults.values())

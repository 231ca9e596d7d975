"""What makes checkpoints trainable-only in this cell: the shim, or Lightning itself with our patch series.

Lightning's own argument defaults to False; in a cell with the series, its default is True while a test runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from under_test import CELL, DeepSpeedStrategy, FabricDeepSpeed

import ds_frozen_patch


def trainable_only() -> None:
    """Have new strategies save trainable-only checkpoints from now on."""
    if CELL.patches:
        _set_default(True)
    else:
        ds_frozen_patch.patch()


def stop() -> None:
    """Restore Lightning."""
    _set_default(False) if CELL.patches else ds_frozen_patch.unpatch()


@contextmanager
def full_checkpoint(*strategies: Any) -> Iterator[None]:
    """Save full checkpoints within this block, with these strategies and with new ones."""
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

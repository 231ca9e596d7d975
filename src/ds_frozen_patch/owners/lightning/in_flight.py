"""What Lightning does after a save, put off while that is in flight: wrappers of what removes, links and ends.

A wrapper takes wrapt's four arguments: the wrapped function (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...engine import in_flight


def remove_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`Strategy.remove_checkpoint`: removes an old checkpoint once the new one has its name."""
    in_flight.afterwards(partial(wrapped, *args, **kwargs))


def link_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._link_checkpoint`, for `save_last="link"`: links to a checkpoint once it has its name."""
    if not in_flight.is_any():
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    trainer = call.arguments["trainer"]
    no_barrier = SimpleNamespace(barrier=lambda *_: None)  # a thread must not enter a collective
    call.arguments["trainer"] = SimpleNamespace(is_global_zero=trainer.is_global_zero, strategy=no_barrier)
    in_flight.afterwards(partial(wrapped, *call.args, **call.kwargs))
    return trainer.strategy.barrier()


def teardown(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Strategy.teardown`, at the end of a run: waits, and raises the error of a save unless there is one already."""
    result = wrapped(*args, **kwargs)
    in_flight.join() if sys.exc_info()[1] is not None else in_flight.wait()
    return result

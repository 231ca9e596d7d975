"""What Lightning does after a save, put off while that is in flight: wrappers of what reads, removes, links and ends.

A wrapper takes wrapt's four arguments: the wrapped function (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...common.overrides import overridden
from ...publish import in_flight
from ...settings import current as settings
from ..readers import goes_on_after, may_read


def save_by_callback(wrapped: Callable[..., Any], callback: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._save_checkpoint`: what reads the checkpoint after each save finds a finished one.

    That is a logger, which it calls on rank 0, or a subclass.
    """
    if not settings().async_save:
        return wrapped(*args, **kwargs)
    trainer = inspect.signature(wrapped).bind(*args, **kwargs).arguments["trainer"]
    readers = [type(logger).__name__ for logger in trainer.loggers if _reads(logger)]
    framework_class = next(cls for cls in reversed(type(callback).__mro__) if "_save_checkpoint" in vars(cls))
    if goes_on_after(type(callback), framework_class, "_save_checkpoint"):
        readers.append(type(callback).__name__)
    if not readers:
        return wrapped(*args, **kwargs)

    def save_and_wait(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        in_flight.wait_for(readers[0])

    save = trainer.save_checkpoint
    with overridden([(trainer, "save_checkpoint", save_and_wait)]):
        return wrapped(*args, **kwargs)


def _reads(logger: Any) -> bool:
    """Whether a logger may read each checkpoint; Lightning's own that call `_scan_checkpoints` upload files alone."""
    function = inspect.unwrap(logger.after_save_checkpoint)
    return may_read(logger, "after_save_checkpoint") and "_scan_checkpoints" not in getattr(function, "__globals__", {})


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
    in_flight.wait_at_end()
    return result

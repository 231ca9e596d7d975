"""What Trainer does after a save while that is in flight: what it removes and links is put off, and its end waits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...publish import in_flight
from ..readers import wait_for_readers


def after_save(strategy: Any) -> None:
    """After each save of Trainer's: if it is in flight, put off what removes checkpoints, and wait for what may read."""
    if not in_flight.is_any():
        return
    if "teardown" not in vars(strategy.checkpoint_io):
        _attend(strategy.checkpoint_io)
    trainer = strategy.lightning_module.trainer
    wait_for_readers(trainer.checkpoint_callbacks, "_save_checkpoint")
    wait_for_readers(trainer.loggers, "after_save_checkpoint")


def _attend(plugin: Any) -> None:
    """Until the end of the run, let a `CheckpointIO`, by which a strategy removes checkpoints, do it after a save."""
    remove = plugin.remove_checkpoint

    def teardown() -> None:
        """At the end of a run: waits, and raises the error of a save unless there is one already."""
        del plugin.remove_checkpoint, plugin.teardown
        plugin.teardown()
        in_flight.wait_at_end()

    plugin.remove_checkpoint = lambda *args: in_flight.afterwards(partial(remove, *args))
    plugin.teardown = teardown


def link_checkpoint(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`ModelCheckpoint._link_checkpoint`, for `save_last="link"`: links to a checkpoint once it has its name.

    A wrapper, with wrapt's arguments.
    """
    if not in_flight.is_any():
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    trainer = call.arguments["trainer"]
    no_barrier = SimpleNamespace(barrier=lambda *_: None)  # a thread must not enter a collective
    call.arguments["trainer"] = SimpleNamespace(is_global_zero=trainer.is_global_zero, strategy=no_barrier)
    in_flight.afterwards(partial(wrapped, *call.args, **call.kwargs))
    return trainer.strategy.barrier()

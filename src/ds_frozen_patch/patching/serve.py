"""`serve()`: an engine that was made before `patch()`, or in a program that patches nothing else."""

from __future__ import annotations

from typing import Any

from ..common.errors import PatchError
from ..engine import handshake
from ..engine.served import attached
from ..engine.topology import topology_of
from ..frameworks.plain import owner_of
from ..frameworks.serving import begin_serving
from .patch import is_in_force, patch


def serve(engine: Any) -> None:
    """Make the checkpoints of one engine trainable-only, and loadable, if it was created before `patch()`.

    Call it on every rank, after `deepspeed.initialize` and before training. It calls `patch()` if the program has not
    called it. An engine that is created after `patch()` does not need it.

    Args:
        engine: the first of what `deepspeed.initialize` returns.

    Raises:
        TypeError: it is not an engine of DeepSpeed's.
        PatchError: DeepSpeed cannot be patched; another rank has not called it, or has other settings; or it is a kind
            of engine that is not supported.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        name = f"{type(engine).__module__}.{type(engine).__qualname__}"
        raise TypeError(
            f"serve() takes the engine that deepspeed.initialize returns first, not an object of {name}. Engines that"
            " are created after patch(), by any framework or none, do not need it."
        )
    if not is_in_force():
        patch()
    if attached(engine) is not None:
        return
    owner = owner_of(engine)
    handshake.check(handshake.LONG_WAIT_SECONDS, "serve()")
    if reason := topology_of(engine).unserved:
        raise PatchError(f"{type(engine).__name__} cannot be served: ds_frozen_patch does not support {reason}.")
    begin_serving(engine, owner)

"""`serve()`: an engine that no framework has made."""

from __future__ import annotations

from typing import Any

from ..common.errors import PatchError
from ..engine import handshake
from ..engine.served import attached
from ..engine.topology import topology_of
from ..frameworks.plain import owner_of
from ..frameworks.serving import begin_serving
from .patch import is_in_force, patch

_WAIT_SECONDS = 60.0
"""How far apart ranks may call it."""


def serve(engine: Any) -> None:
    """Make the checkpoints of one engine trainable-only, and loadable, where no framework has made it.

    Call it on every rank, after `deepspeed.initialize` and before training. It calls `patch()` if the program has not
    called it. For an engine that is served already it changes nothing.

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
            f"serve() takes the engine that deepspeed.initialize returns first, not an object of {name}. Engines of"
            " Lightning, Accelerate and Trainer need patch() alone."
        )
    if not is_in_force():
        patch()
    if attached(engine) is not None:
        return
    owner = owner_of(engine)
    handshake.check(_WAIT_SECONDS, "serve()")
    if reason := topology_of(engine).unserved:
        raise PatchError(f"{type(engine).__name__} cannot be served: ds_frozen_patch does not support {reason}.")
    begin_serving(engine, owner)

"""Who gets control when an asynchronous save returns, and may read the checkpoint in its next line."""

from __future__ import annotations

import inspect

_FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "trl")
_PASSED = (*_FRAMEWORKS, "contextlib", "ds_frozen_patch", "lightning_utilities", "torch", "wrapt")
"""The packages whose functions do not look at a checkpoint that they have just saved."""
_TRAIN = ("fit", "train")


def asker() -> str | None:
    """The function of somebody else that has asked for the save which runs; None if a framework's own training has.

    Between the save and `Trainer.fit`, or Trainer's `train`, the call stack has functions of frameworks alone, unless a
    callback, an override or a program saves by itself.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if module.partition(".")[0] not in _PASSED:
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"  # which Python 3.10 does not have
        if code.co_name in _TRAIN:
            return None
        frame = frame.f_back
    return None

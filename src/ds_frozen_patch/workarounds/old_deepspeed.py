"""How old releases of DeepSpeed treat files differently, recognised by their version alone."""

from __future__ import annotations

from .fault import is_older


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """True if the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: in stage 1 before 0.13.0.

    It is not the installed one, so its version is all there is.
    """
    return zero_stage == 1 and is_older(version, "0.13.0")

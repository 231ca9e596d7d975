"""How old releases of DeepSpeed treat files differently, recognised by their version alone."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """True if the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: in stage 1 before 0.13.0.

    It is not the installed one, so its version is all there is.
    """
    try:
        return zero_stage == 1 and Version(version) < Version("0.13.0")
    except InvalidVersion:
        return False

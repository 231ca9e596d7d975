"""How old releases of DeepSpeed treat files differently, recognised by their version or source alone."""

from __future__ import annotations

from .fault import is_older, source

_CONVERTER = "checkpoint/ds_to_universal.py"


def converter_needed(zero_stage: int) -> str | None:
    """The first DeepSpeed whose universal converter supports a ZeRO stage; None if the installed one does."""
    function, since = ("extract_zero_shards_stage3", "0.14.5") if zero_stage == 3 else ("main", "0.11.2")
    return None if f"def {function}(" in source("deepspeed", _CONVERTER) else since


def converter_reads_one_group(zero_stage: int) -> bool:
    """True if DeepSpeed's universal converter ignores all but the first parameter group: in ZeRO-3 before 0.18.0."""
    return zero_stage == 3 and "enumerate(param_shapes)" not in source("deepspeed", _CONVERTER)


def ignores_round_robin(version: str, zero_stage: int) -> bool:
    """True if the DeepSpeed that saved a checkpoint ignored `round_robin_gradients`: in stage 1 before 0.13.0.

    It is not the installed one, so its version is all there is.
    """
    return zero_stage == 1 and is_older(version, "0.13.0")

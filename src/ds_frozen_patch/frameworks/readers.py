"""Code of others that runs right after a save, and may read the checkpoint: which is to find a finished one."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from textwrap import dedent
from typing import Any

_FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning")
_UPLOADS = (
    "_log_model",  # of W&B, MLflow (Lightning), ClearML, DVCLive and SwanLab
    "_log_artifacts",  # of MLflow (transformers)
    "_log_model_checkpoints",  # of Neptune (Lightning)
    "_should_upload_checkpoint",  # of Neptune (transformers)
    "sync_checkpoints",  # of Flyte
)
_OFF = (None, False, "false", "end")


def may_read(item: Any, method: str) -> bool:
    """Whether a method that a framework calls after each save may read the checkpoint.

    It cannot if it does nothing, or is of a framework and what it uploads is switched off.
    """
    function = inspect.unwrap(getattr(item, method))
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_names:
        return False
    is_of_framework = str(function.__module__).partition(".")[0] in _FRAMEWORKS
    uploads = [getattr(item, name) for name in _UPLOADS if hasattr(item, name)]
    return not (is_of_framework and uploads and all(value in _OFF for value in uploads))


def goes_on_after(cls: type, base: type, method: str) -> bool:
    """Whether a class overrides a method of a base, and does more after it has called that."""
    overrides = [vars(derived)[method] for derived in cls.__mro__[: cls.__mro__.index(base)] if method in vars(derived)]
    return not all(_ends_with_super(override, method) for override in overrides)


@cache
def _ends_with_super(function: Any, method: str) -> bool:
    """Whether the last that a function does is to call the method that it overrides."""
    try:
        (definition,) = ast.parse(dedent(inspect.getsource(function))).body
        last: Any = definition.body[-1]  # type: ignore[attr-defined]
        return ast.unparse(last.value.func) == f"super().{method}"
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return False

"""What happens around Lightning's own converter to one file: ours does its work.

The original loads with `torch.load`'s default, which torch changed in 2.6, keeps DeepSpeed's second copy of the frozen
weights in its output, loses those of ZeRO-1, and looks up a part of the checkpoint without the tag that it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def convert(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_file, tag=None)`.

    As the original it replaces a file that is there, and gives what it has written; the tensors of it are mapped from
    the file, and objects of classes are stand-ins.
    """
    from ..checkpoint.tools.consolidate import consolidate_over

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    return consolidate_over(**call.arguments)

"""The wrapper of Lightning's own converter to a single file: ours does its work.

The original loads with the default of `torch.load`, which torch 2.6 changed (mended in Lightning 2.6.0). It also keeps
DeepSpeed's second copy of the frozen weights in its output, loses those of ZeRO-1, and ignores the tag in one look-up.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any


def convert(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_file, tag=None)`.

    Like the original, it replaces an existing file and returns what it has written. The tensors returned are mapped
    from the file, and objects of classes are stand-ins.
    """
    from ...checkpoint.format.archive import UnreadableError
    from ...tools.consolidate import consolidate_over

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    try:
        return consolidate_over(**call.arguments)
    except UnreadableError as error:
        logging.getLogger("ds_frozen_patch").warning("%s Lightning's own converter goes on.", error)
        return dict(wrapped(*args, **kwargs))

"""The model that transformers makes of a folder: its class, and its names of weights where the files have others.

Since transformers 5, a model may have one tensor where its files have many, such as the experts of a layer.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.format.records import TensorSource
from ..common.errors import CheckpointError

CONFIG = "config.json"


def loaded_names(folder: Path, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of a base that have another name, or are parts of another tensor, once they are loaded.

    Args:
        folder: of the base. Its own code is not run.
        tensors: the base's, by their names in the files.

    Returns:
        The tensors by their names in the model; none if transformers does not know the model, or has no such names.
    """
    try:
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion

        model: Any = empty_model(folder)
        values = {name: value for name, value in model.state_dict().items() if value.numel() and name not in tensors}
        # transformers converts numbers in place of values, one for each row: those in the result tell what is where.
        widths = {name: value.shape[-1] if value.dim() > 1 else 1 for name, value in values.items()}
        rows, begins, end = dict[str, torch.Tensor](), list[int](), 0
        for name, value in values.items():
            begins.append(end)
            end += value.numel() // widths[name]
            rows[name] = torch.arange(begins[-1], end).view(*value.shape[:-1], -1 if value.dim() == 1 else 1)
        pieces: dict[str, dict[int, TensorSource]] = defaultdict(dict)
        for is_old in (True, False):
            # As `from_pretrained` leaves it. Prefixes are found in another way.
            rules = get_model_conversion_mapping(model, add_legacy=is_old)
            model._weight_conversions = [rule for rule in rules if not isinstance(rule, PrefixChange)]
            for in_file, part in revert_weight_conversion(model, dict(rows)).items():
                first, tensor = int(part.min()), tensors.get(in_file)
                name = [*values][bisect(begins, first) - 1]
                shape = (*part.shape[:-1], part.shape[-1] * widths[name]) if part.dim() > 1 else tuple(part.shape)
                is_in_order = torch.equal(part.flatten(), torch.arange(first, first + part.numel()))
                if tensor is not None and tensor.view is None and tensor.shape == shape and is_in_order:
                    pieces[name][first] = tensor
    except Exception:  # transformers is missing, does not know the model, or has other rules, as before release 5
        return {}
    loaded = {}
    for name, parts in pieces.items():
        whole = tuple(piece for _, tensor in sorted(parts.items()) for piece in tensor.pieces)
        kinds = {tensor.dtype for tensor in parts.values()}
        if len(kinds) == 1 and sum(piece.count for piece in whole) == values[name].numel():
            loaded[name] = TensorSource(kinds.pop(), tuple(values[name].shape), whole)
    return loaded


def empty_model(folder: Path) -> Any:
    """The model that a folder's configuration describes, without values. No code of the folder's is run.

    Raises:
        CheckpointError: transformers is missing, or does not know the model.
    """
    try:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        kind: Any = getattr(transformers, config.architectures[0])
        with torch.device("meta"):
            model = kind(config)
            model.tie_weights()
        return model
    except ImportError as error:
        raise CheckpointError(f"transformers is needed for this: pip install transformers ({error}).") from None
    except Exception as error:  # whatever a configuration leads to
        raise CheckpointError(
            f"{folder} is not the folder of a model that transformers knows ({type(error).__name__}: {error}). Pass the"
            " folder that save_pretrained wrote, or that was downloaded."
        ) from None

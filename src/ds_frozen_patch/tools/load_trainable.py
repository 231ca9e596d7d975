"""Load the trained weights of a checkpoint or export into a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.adapters import Adapter
from ..checkpoint.format.records import Records, TensorSource
from ..checkpoint.zero.layout import located
from ..checkpoint.zero.opening import open_checkpoint
from ..common.errors import CheckpointError, CheckpointMismatchError, named
from ..parameters import plain
from ..record import adapters_of
from .base import open_base

if TYPE_CHECKING:
    import torch


def load_trainable(
    module: torch.nn.Module,
    path: str | Path,
    tag: str | None = None,
    *,
    adapter: str | None = None,
) -> None:
    """Load the weights that a run has trained into a module, strictly: no missing and no unexpected keys.

    Args:
        module: built as the run's module was, and not partitioned. Values are converted to its parameters' dtypes.
        path: the output of `export` or `consolidate`, a single file that Lightning has saved, or the directory of a
            DeepSpeed checkpoint, full or trainable-only.
        tag: the subdirectory of a DeepSpeed checkpoint to read; by default the one named in `latest`.
        adapter: the module's adapter that an adapter folder is loaded into; by default its only one, or "default".

    Raises:
        CheckpointError: nothing can be read from the path, or it is damaged.
        CheckpointMismatchError: keys are missing, unexpected or have other shapes. The module has not been changed.
    """
    import torch

    path = located(path, tag)
    tensors = _find_tensors(path, tag)
    named_tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    in_module = {plain(name): tensor for name, tensor in named_tensors}
    if (path / "adapter_config.json").is_file():
        tensors = _rename_for_module(module, in_module, tensors, adapter, path)
    _check_keys_and_shapes(module, in_module, tensors, path)
    with Records() as records:
        values = {name: records.read(tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, content in values.items():
            if content:
                elements = torch.frombuffer(content, dtype=getattr(torch, tensors[name].dtype))
                in_module[name].copy_(elements.view(tensors[name].shape))


def _find_tensors(path: Path, tag: str | None) -> dict[str, TensorSource]:
    """All tensors by name; from a checkpoint, the masters of the trained weights."""
    if tag is None and not (path / "latest").is_file():
        return open_base(path).tensors
    weights = open_checkpoint(path, tag).weights
    # A quantized base stays as the program builds it: no parameter could take its scales.
    frozen = {name: tensor for name, tensor in weights.frozen.items() if name not in weights.quantized}
    return {**frozen, **weights.trained, **weights.buffers}


def _rename_for_module(
    module: torch.nn.Module,
    in_module: Mapping[str, torch.Tensor],
    tensors: Mapping[str, TensorSource],
    adapter: str | None,
    path: Path,
) -> dict[str, TensorSource]:
    """The tensors of an adapter folder by their names in the module."""
    recorded = adapters_of(dict(module.named_modules()))
    if len(recorded) != 1:
        raise CheckpointError(
            f"{path} contains an adapter, but the module has {len(recorded)} PEFT models instead of one."
        )
    ((inner, adapters),) = recorded.items()
    name = adapter or (next(iter(adapters)) if len(adapters) == 1 else "default")
    here = Adapter(inner, name, None).members(in_module, (), (), adapters)
    # A key that is not in the module keeps its name, for the error message.
    return {here.get(key, key): tensor for key, tensor in tensors.items()}


def _check_keys_and_shapes(
    module: torch.nn.Module, in_module: Mapping[str, torch.Tensor], tensors: Mapping[str, TensorSource], path: Path
) -> None:
    """Raise CheckpointMismatchError for missing and unexpected keys and other shapes."""
    taken = {id(in_module[name]) for name in tensors if name in in_module}
    problems = {
        "missing keys": [plain(n) for n, p in module.named_parameters() if p.requires_grad and id(p) not in taken],
        "unexpected keys": [name for name in tensors if name not in in_module],
        "other shapes": [name for name, t in tensors.items() if name in in_module and in_module[name].shape != t.shape],
    }
    problems_found = [f"{problem}: {named(names)}" for problem, names in problems.items() if names]
    if problems_found:
        raise CheckpointMismatchError(
            f"{path} does not fit this module; {'; '.join(problems_found)}. Build the module as the run that saved it"
            " did."
        )

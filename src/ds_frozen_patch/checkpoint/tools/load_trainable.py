"""What was trained, back into a module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import CheckpointError, CheckpointMismatchError, named
from ...manifest import adapters_of
from ...parameters import plain
from ..format.records import Records, Whole
from ..zero.states import check_together, load
from ..zero.weights import check_one_run, weights
from .base import open_base
from .export import Adapter

if TYPE_CHECKING:
    import torch


def load_trainable(
    module: torch.nn.Module, path: str | Path, *, adapter: str | None = None, trust: bool = False
) -> None:
    """Put what a run has trained into a module built as that run's was, strictly: all of it, and nothing else.

    Args:
        module: with the same names, whole and not partitioned. Parameters take their values in their own dtype.
        path: what `export` or `consolidate` has made, a single file that Lightning has saved, or the directory of a
            DeepSpeed checkpoint, full or trainable-only.
        adapter: the module's adapter that takes an adapter folder; by default its only one, or "default".
        trust: also read files that name classes which do not belong there. Nothing of them is run.

    Raises:
        CheckpointError: there is nothing at the path that can be read, or it is damaged.
        CheckpointMismatchError: a trainable parameter of the module is not there, or something there is not in the
            module or has another shape. Nothing has been changed then.
    """
    import torch

    found = _found(Path(path), trust)
    if (Path(path) / "adapter_config.json").is_file():
        found = _named_as_in(module, found, adapter, Path(path))
    there = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    there = {plain(name): tensor for name, tensor in there.items()}
    _check(module, there, found, Path(path))
    with Records() as records:
        values = {name: records.read(tensor) for name, tensor in found.items()}
    with torch.no_grad():
        for name, content in values.items():
            if content:
                elements = torch.frombuffer(content, dtype=getattr(torch, found[name].dtype))
                there[name].copy_(elements.view(found[name].shape))


def _found(path: Path, trust: bool) -> dict[str, Whole]:
    """All tensors by name; of a checkpoint, the masters of what was trained."""
    if not (path / "latest").is_file():
        return open_base(path, trust).tensors
    states = load(path, None, trust)
    check_together(states)
    all_ = weights(states, ("*",))  # who was trained makes no difference here
    check_one_run(all_)
    # A quantized base is as the program builds it: its scales are in no parameter that could take them.
    frozen = {name: tensor for name, tensor in all_.frozen.items() if name not in all_.quantized}
    return {**frozen, **all_.trained, **all_.buffers}


def _named_as_in(
    module: torch.nn.Module, found: Mapping[str, Whole], adapter: str | None, path: Path
) -> dict[str, Whole]:
    """The tensors of an adapter folder by their names in the module."""
    recorded = adapters_of(module)
    if len(recorded) != 1:
        raise CheckpointError(f"{path} holds an adapter, but the module has {len(recorded)} models of PEFT to take it.")
    ((inner, adapters),) = recorded.items()
    name = adapter or (next(iter(adapters)) if len(adapters) == 1 else "default")
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    here = Adapter(inner, name, None).members([plain(own) for own, _ in named], (), (), adapters)
    # What is not in the module stays under its own name, to be named as such.
    return {here.get(own, own): tensor for own, tensor in found.items()}


def _check(module: torch.nn.Module, there: Mapping[str, torch.Tensor], found: Mapping[str, Whole], path: Path) -> None:
    taken = {id(there[name]) for name in found if name in there}
    said = {
        "lacks": [plain(n) for n, p in module.named_parameters() if p.requires_grad and id(p) not in taken],
        "has what the module has not:": [name for name in found if name not in there],
        "has another shape of": [name for name, t in found.items() if name in there and there[name].shape != t.shape],
    }
    wrong = [f"it {what} {named(names)}" for what, names in said.items() if names]
    if wrong:
        raise CheckpointMismatchError(
            f"{path} does not belong to this module: {'; '.join(wrong)}. Build the module as for the run that saved it."
        )

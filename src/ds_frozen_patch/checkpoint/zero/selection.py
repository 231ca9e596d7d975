"""Other trained parameters than those of a checkpoint, for a run that goes on from it.

What both have keeps its master and the optimizer's state. What is new begins without state, with its value in the
checkpoint, or else with the model's.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError
from ...manifest import KEY, LeftOut, reference
from ...parameters import plain, with_adapters
from ..format.archive import read_archive
from ..format.records import Records
from ..format.stored import Storage, StoredTensor
from ..format.writing import write_archive
from .labels import PLAIN_GROUPS
from .partitions import Shapes
from .states import States
from .trained import Group, Trained, by_plain_name, whole
from .weights import locate_weights

_MASTERS = "float32"


@dataclass(frozen=True)
class Selection:
    """What is trained from now on.

    Attributes:
        groups: the parameter groups of the optimizer.
        settings: those of each group, for an optimizer that has more or fewer groups than the saved one.
        fresh: the shapes of the parameters that the checkpoint has not trained, by plain name.
        names: all plain names of the model, for what PEFT has wrapped since, see `with_adapters`.
        stored: the values of what is fresh, flat, see `write_fresh`.
    """

    groups: Sequence[Shapes]
    settings: Sequence[Mapping[str, Any]]
    fresh: Shapes
    names: Container[str]
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)


def rename(states: States, names: Container[str]) -> States:
    """The states with the names of a model to which PEFT has added adapters since."""
    manifest = states.manifest
    left_out = () if manifest is None else tuple(_renamed(entry, names) for entry in manifest.left_out)
    changed = manifest and replace(manifest, left_out=left_out)
    contents = list(states.contents)
    for index, model in enumerate(states.models):
        state = {
            **model,
            **{key: _with_names(model[key], names) for key in _BY_NAME if isinstance(model.get(key), dict)},
        }
        for key in ("param_shapes", PLAIN_GROUPS):
            if isinstance(model.get(key), list):
                state[key] = [_with_names(group, names) for group in model[key]]
        if changed is not None:
            referred = reference(model.get(KEY))
            state[KEY] = changed.to_state() if referred is None else changed.to_reference(referred[0])
        contents[index] = replace(contents[index], state=state)
    return replace(states, contents=tuple(contents))


_BY_NAME = ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params")


def _with_names(values: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """A dict by name, with what torch attaches to a state dict; the values of `shared_params` are names too."""

    def now(name: str) -> str:
        return with_adapters(plain(name), names)

    changed = {name: now(value) if isinstance(value, str) else value for name, value in values.items()}
    if any(now(name) != plain(name) for name in values):
        changed = {now(name): value for name, value in changed.items()}
    result = type(values)(changed)
    if hasattr(values, "__dict__"):
        vars(result).update(vars(values))
    return result


def _renamed(entry: LeftOut, names: Container[str]) -> LeftOut:
    return replace(
        entry, names=tuple(with_adapters(name, names) for name in entry.names), group=with_adapters(entry.group, names)
    )


def select(states: States, saved: Sequence[Group], selection: Selection) -> list[Group]:
    """The groups of the optimizer that goes on.

    Args:
        states: of the checkpoint.
        saved: its groups.
        selection: with what it has `stored`.

    Raises:
        CheckpointError: a parameter would have a master of another dtype than the others.
    """
    trained = by_plain_name(saved)
    if selection.fresh and any(parameter.master.like.dtype != _MASTERS for parameter in trained.values()):
        raise CheckpointError(
            f"{states.layout.root} has no fp32 masters, so no other parameters than before can be trained from it."
            " Freeze them, or resume in fp32, or with fp32 masters."
        )
    for name in selection.fresh:
        trained[name] = Trained(selection.fresh[name], whole(states, selection.stored[name], name), {})
    has_same_number = len(saved) == len(selection.groups)
    settings = [group.settings for group in saved] if has_same_number else selection.settings
    return [
        Group(group_settings, {name: trained[plain(name)] for name in group})
        for group_settings, group in zip(settings, selection.groups, strict=True)
    ]


def write_fresh(
    states: States, selection: Selection, values: Iterable[tuple[str, Any]], path: Path
) -> Mapping[str, StoredTensor]:
    """Write the values with which parameters begin to be trained to a file, in fp32 and one at a time.

    Args:
        states: of the checkpoint, whose value counts if it has one.
        selection: what is trained from now on.
        values: the model's, by plain name, in the order of `selection.fresh`.
        path: the file to create.

    Returns:
        What is in the file.

    Raises:
        CheckpointError: the checkpoint has a value of another shape.
    """
    import torch

    weights = locate_weights(states, ("*",))
    saved = {**weights.frozen, **weights.trained}
    remaining = iter(values)
    with Records() as records:

        def content(*_: Any) -> Iterator[memoryview]:
            name, value = next(remaining)
            source = saved.get(weights.aliases.get(name, name))
            if source is not None:
                if source.shape != selection.fresh[name]:
                    raise CheckpointError(
                        f"{states.layout.root} has {name!r} in shape {list(source.shape)}, and the model in"
                        f" {list(selection.fresh[name])}. Build the model as in the run that saved it."
                    )
                if source.numel:
                    value = torch.frombuffer(records.read(source), dtype=getattr(torch, source.dtype))
            yield memoryview(value.detach().to(torch.float32).contiguous().view(-1).numpy())

        write_archive(path, _flat(selection.fresh), content)
    state: Mapping[str, StoredTensor] = read_archive(path).state
    return state


def _flat(shapes: Shapes) -> dict[str, StoredTensor]:
    """Flat tensors that are in no file yet."""
    return {
        name: StoredTensor(Storage(None, str(index), _MASTERS, prod(shape)), _MASTERS, 0, (prod(shape),), (1,))
        for index, (name, shape) in enumerate(shapes.items())
    }

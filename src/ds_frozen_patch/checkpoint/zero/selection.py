"""Other trained parameters than those of a checkpoint, for a run that resumes from it.

What both have keeps its master and the optimizer's state. What is new begins without state, with its value in the
checkpoint, or else with the model's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...common.errors import CheckpointError
from ...parameters import plain, with_adapters
from ..format.records import Piece
from ..format.stored import Storage, StoredTensor
from .groups import Group, Trained, Values
from .partitions import Shapes
from .resharding import with_attributes
from .states import States, as_names


@dataclass(frozen=True)
class Selection:
    """What is trained from now on.

    Attributes:
        groups: the parameter groups of the optimizer.
        settings: those of each group, for an optimizer that has more or fewer groups than the saved one.
        fresh: the shapes of the parameters that the checkpoint has not trained, by plain name.
        frozen: the plain names of those that it has trained, and that are frozen from now on.
        names: all plain names of the model, for what PEFT has wrapped since, see `with_adapters`.
    """

    groups: Sequence[Shapes]
    settings: Sequence[Mapping[str, Any]]
    fresh: Shapes
    frozen: tuple[str, ...]
    names: Container[str]

    def rename(self, states: States) -> States:
        """The states with the names of a model to which PEFT has added adapters since."""

        def now(name: str) -> str:
            return with_adapters(plain(name), self.names)

        def renamed(values: dict[str, Any]) -> dict[str, Any]:
            changed = {name: now(value) if isinstance(value, str) else value for name, value in values.items()}
            if any(now(name) != plain(name) for name in values):
                changed = {now(name): value for name, value in changed.items()}
            return with_attributes(values, changed)

        left_out = tuple(
            replace(entry, names=tuple(map(now, entry.names)), group=now(entry.group))
            for entry in states.record.left_out
        )
        contents = list(states.contents)
        for index, model in enumerate(states.models):
            state = {**model, **{key: renamed(model[key]) for key in _BY_NAME if isinstance(model.get(key), dict)}}
            state["buffer_names"] = sorted(map(now, as_names(model.get("buffer_names"))))
            if isinstance(groups := model.get("param_shapes"), list):
                state["param_shapes"] = [renamed(group) for group in groups]
            contents[index] = replace(contents[index], state=state)
        return replace(states, contents=tuple(contents), record=replace(states.record, left_out=left_out))

    def select(self, saved: Sequence[Group]) -> list[Group]:
        """The groups of the optimizer from now on, given those of the checkpoint; what is fresh is in no file.

        Raises:
            CheckpointError: a parameter would have a master of another dtype than the others.
        """
        trained = {plain(name): parameter for group in saved for name, parameter in group.parameters.items()}
        if self.fresh and any(parameter.master.like.dtype != _MASTERS for parameter in trained.values()):
            raise CheckpointError(
                "The checkpoint has no fp32 masters, so no other parameters than before can be trained from it. Freeze"
                " them, or resume in fp32, or with fp32 masters."
            )
        for name, shape in self.fresh.items():
            storage = fresh_storage(name, shape)
            like = StoredTensor(storage, _MASTERS, 0, (storage.numel,), (1,))
            trained[name] = Trained(shape, Values((Piece(storage, 0, storage.numel),), like))
        settings = [group.settings for group in saved] if len(saved) == len(self.groups) else self.settings
        return [
            Group(group_settings, {name: trained[plain(name)] for name in group})
            for group_settings, group in zip(settings, self.groups, strict=True)
        ]


_BY_NAME = ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
_MASTERS = "float32"


def fresh_storage(name: str, shape: Sequence[int]) -> Storage:
    """What stands for the value of a parameter that is trained from now on."""
    return Storage(None, f"fresh {name}", _MASTERS, prod(shape))

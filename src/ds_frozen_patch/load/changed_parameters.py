"""A load into an engine that trains other parameters than the one that saved: with `patch(elastic=True)`.

What both train is restored by name. What is trained from now on starts with a fresh optimizer state, and what is frozen
from now on keeps its trained value. A checkpoint with trained parameters that the model lacks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base import Maker, origins
from ..checkpoint.format.records import Piece, TensorSource
from ..checkpoint.format.stored import Storage
from ..checkpoint.zero.entries import with_plain_names
from ..checkpoint.zero.groups import MASTER, Group
from ..checkpoint.zero.partitions import Shapes, numel
from ..checkpoint.zero.states import States
from ..checkpoint.zero.weights import Weights
from ..common.errors import CheckpointError, CheckpointMismatchError, named
from ..engine.served import attached, warn
from ..internals import groups_to_save, trained_groups
from ..parameters import Contents, ModuleTensor, plain, with_adapters
from .running import Load


@dataclass(frozen=True)
class Selection:
    """What is trained from now on.

    Attributes:
        groups: the parameter groups of the optimizer.
        settings: those of each group, for an optimizer that has more or fewer groups than the saved one.
        fresh: the shapes of the parameters that the checkpoint has not trained, by plain name.
        frozen: the plain names of those that it has trained, and that are frozen from now on.
        held: what the model has, by all plain names.
    """

    groups: Sequence[Shapes]
    settings: Sequence[Mapping[str, Any]]
    fresh: Shapes
    frozen: tuple[str, ...]
    held: Mapping[str, ModuleTensor]

    def rename(self, states: States) -> States:
        """The states with the names of a model to which PEFT has added adapters since."""

        def now(name: str) -> str:
            return with_adapters(plain(name), self.held)

        contents = [
            replace(item, state=with_plain_names(item.state, now)) if "module" in item.state else item
            for item in states.contents
        ]
        left_out = tuple(
            replace(entry, names=tuple(map(now, entry.names)), group=now(entry.group))
            for entry in states.record.left_out
        )
        return replace(states, contents=tuple(contents), record=replace(states.record, left_out=left_out))

    def select(self, weights: Weights, saved: Sequence[Group]) -> list[Group]:
        """The groups of the optimizer from now on, given those of the checkpoint.

        What is fresh begins with its value in the checkpoint, or with the model's, for which a storage without a file
        stands.

        Raises:
            CheckpointError: a fresh parameter has another shape there, or masters of another dtype beside it.
        """
        trained = {plain(name): values for group in saved for name, values in group.parameters.items()}
        if self.fresh and any(values[MASTER].dtype != "float32" for values in trained.values()):
            raise CheckpointError(
                "The checkpoint has no fp32 masters, so no other parameters than before can be trained from it. Freeze"
                " them, or resume in fp32, or with fp32 masters."
            )
        in_files = {**weights.frozen, **weights.trained}
        for name, shape in self.fresh.items():
            own = Piece(Storage(None, name, "float32", numel({name: shape})), 0, numel({name: shape}))
            source = in_files.get(weights.aliases.get(name, name), TensorSource("float32", shape, (own,)))
            if source.shape != shape:
                raise CheckpointError(
                    f"The checkpoint has {name!r} in shape {list(source.shape)}, and the model in {list(shape)}."
                    " Build the model as in the run that saved it."
                )
            trained[name] = {MASTER: replace(source, dtype="float32")}
        settings = [group.settings for group in saved] if len(saved) == len(self.groups) else self.settings
        return [
            Group(group_settings, {name: trained[plain(name)] for name in group})
            for group_settings, group in zip(settings, self.groups, strict=True)
        ]


def find_selection(load: Load, is_resharded: bool) -> Selection | None:
    """What the engine trains; None if it is what the checkpoint has trained.

    Args:
        load: the running load.
        is_resharded: whether the checkpoint is resharded anyway, and so gets the engine's order of parameters.

    Raises:
        CheckpointMismatchError: the model lacks trained parameters, or has them in another shape.
    """
    engine, served, held = load.engine, attached(load.engine), load.held
    groups = trained_groups(engine)
    if not groups or served is None or served.topology.is_divided:
        return None
    now = _merged(groups)
    saved = {with_adapters(name, held): shape for name, shape in _merged(load.listing.trained).items()}
    problems = []
    if gone := [name for name in saved.keys() - now.keys() if name not in held or held[name].name in now]:
        problems.append(f"trained in the checkpoint, and not in the model, or under another name there: {named(gone)}")
    shapes = {name: now[name] if name in now else held[name].shape for name in saved.keys() - {*gone}}
    if reshaped := [
        f"{n}: saved {list(saved[n])}, now {list(shape)}" for n, shape in shapes.items() if saved[n] != shape
    ]:
        problems.append(f"in another shape: {named(reshaped)}")
    if problems:
        raise CheckpointMismatchError(
            "The checkpoint's trainable parameters do not fit the model:\n"
            + "\n".join(f"- {problem}" for problem in problems)
            + "\nTheir trained values would be lost. Build the model with them, frozen if they are not to be trained"
            " any more."
        )
    in_memory, in_files = ([list(map(plain, g)) for g in gs] for gs in (groups_to_save(engine), load.listing.trained))
    if now.keys() == saved.keys() and (is_resharded or in_memory == in_files):
        return None
    settings = [{key: value for key, value in g.items() if key != "params"} for g in engine.optimizer.param_groups]
    fresh = {name: shape for name, shape in now.items() if name not in saved}
    return Selection(groups, settings, fresh, tuple(name for name in saved if name not in now), held)


def _merged(groups: Any) -> dict[str, tuple[int, ...]]:
    return {plain(name): tuple(shape) for group in groups for name, shape in group.items()}


def finish(load: Load, selection: Selection) -> None:
    """Once the checkpoint is loaded: say what has changed, and keep what is frozen now in later checkpoints."""
    origin_of = origins(Contents(load.engine.module))
    for name in selection.frozen:
        origin_of[name].maker = Maker.TRAINING
    sentences = []
    if selection.fresh:
        sentences.append(f"Trained from now on, with a fresh optimizer state: {named(selection.fresh)}.")
    if selection.frozen:
        sentences.append(f"Frozen from now on, with their trained values: {named(selection.frozen)}.")
    if not sentences:
        sentences = ["They are in other parameter groups or sub-groups (sub_group_size), or in another order."]
    warn(
        load.owner,
        "patch(elastic=True): the trained parameters are not those of the checkpoint, and were restored by name."
        f" {' '.join(sentences)}",
    )

"""A load into an engine that trains other parameters than the one that saved: with `patch(elastic=True)`.

What both train is restored by name. What is trained from now on starts with a fresh optimizer state, and what is frozen
from now on keeps its trained value. A checkpoint with trained parameters that the model lacks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base import Maker, origins
from ..common.errors import CheckpointMismatchError, named
from ..engine.served import attached, warn
from ..internals import groups_to_save, trained_groups
from ..parameters import Contents, plain, with_adapters
from .listing import Listing
from .running import Load

if TYPE_CHECKING:
    from ..checkpoint.zero.selection import Selection

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Change:
    """How the trained parameters differ from the checkpoint's, by plain name.

    Attributes:
        groups: the engine's, by its own names.
        fresh: what the checkpoint has not trained.
        frozen: what the engine does not train.
        names: all of the model.
    """

    groups: list[dict[str, tuple[int, ...]]]
    fresh: Shapes
    frozen: Shapes
    names: frozenset[str]


def find_change(load: Load, listing: Listing, is_resharded: bool) -> Change | None:
    """How the engine's trained parameters differ from the checkpoint's; None if they do not.

    Args:
        load: the running load.
        listing: of the checkpoint.
        is_resharded: whether the checkpoint is resharded anyway, and so gets the engine's order of parameters.

    Raises:
        CheckpointMismatchError: the model lacks trained parameters, or has them in another shape.
    """
    served, groups = attached(load.engine), trained_groups(load.engine)
    if not groups or served is None or served.topology.is_divided:
        return None
    now = _merged(groups)
    saved = {with_adapters(name, load.held): shape for name, shape in _merged(listing.trained).items()}
    _check_model_has(saved, now, load)
    if now.keys() == saved.keys() and (is_resharded or _is_in_order(load.engine, listing)):
        return None
    fresh, frozen = (
        {name: shape for name, shape in names.items() if name not in other}
        for names, other in ((now, saved), (saved, now))
    )
    return Change(groups, fresh, frozen, frozenset(load.held))


def _merged(groups: Any) -> dict[str, tuple[int, ...]]:
    return {plain(name): tuple(shape) for group in groups for name, shape in group.items()}


def _is_in_order(engine: Any, listing: Listing) -> bool:
    """Whether the partitions of the optimizer have the saved order of parameters."""
    now, saved = ([list(map(plain, group)) for group in which] for which in (groups_to_save(engine), listing.trained))
    return now == saved


def _check_model_has(saved: Shapes, now: Shapes, load: Load) -> None:
    problems = []
    contents = load.held
    if gone := [name for name in saved.keys() - now.keys() if name not in contents or contents[name].name in now]:
        problems.append(f"trained in the checkpoint, and not in the model, or under another name there: {named(gone)}")
    shapes = {name: now[name] if name in now else contents[name].shape for name in saved.keys() - {*gone}}
    if reshaped := [
        f"{name}: saved {list(saved[name])}, now {list(shape)}"
        for name, shape in shapes.items()
        if saved[name] != shape
    ]:
        problems.append(f"in another shape: {named(reshaped)}")
    if problems:
        raise CheckpointMismatchError(
            "The checkpoint's trainable parameters do not fit the model:\n"
            + "\n".join(f"- {problem}" for problem in problems)
            + "\nTheir trained values would be lost. Build the model with them, frozen if they are not to be trained"
            " any more."
        )


def selection_of(change: Change, engine: Any) -> Selection:
    """What is to be written for the engine."""
    from ..checkpoint.zero.selection import Selection

    groups = engine.optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Selection(change.groups, settings, change.fresh, change.names)


def begin(load: Load, change: Change) -> None:
    """Let the load accept that the checkpoint lacks what starts fresh."""
    load.starts_fresh = frozenset(alias for name in change.fresh for alias in load.held[name].names)


def finish(load: Load, change: Change) -> None:
    """Once the checkpoint is loaded: say what has changed, and keep what is frozen now in later checkpoints."""
    origin_of = origins(Contents(load.engine.module))
    for name in change.frozen:
        origin_of[name].maker = Maker.TRAINING
    sentences = []
    if change.fresh:
        sentences.append(f"Trained from now on, with a fresh optimizer state: {named(change.fresh)}.")
    if change.frozen:
        sentences.append(f"Frozen from now on, with their trained values: {named(change.frozen)}.")
    if not sentences:
        sentences = ["They are in other parameter groups or sub-groups (sub_group_size), or in another order."]
    warn(
        load.owner,
        "patch(elastic=True): the trained parameters are not those of the checkpoint, and were restored by name."
        f" {' '.join(sentences)}",
    )

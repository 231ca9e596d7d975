"""A load into an engine that trains other parameters than the one that saved: with `patch(elastic=True)`.

What both train is restored by name. What is trained from now on starts with a fresh optimizer state, and what is frozen
from now on keeps its trained value. A checkpoint with trained parameters that the model lacks is refused.
"""

from __future__ import annotations

from typing import Any

from ..base import Maker, origins
from ..checkpoint.zero.partitions import Shapes
from ..checkpoint.zero.selection import Selection
from ..common.errors import CheckpointMismatchError, named
from ..engine.served import attached, warn
from ..internals import groups_to_save, trained_groups
from ..parameters import Contents, plain, with_adapters
from .running import Load


def find_selection(load: Load, is_resharded: bool) -> Selection | None:
    """What the engine trains; None if it is what the checkpoint has trained.

    Args:
        load: the running load.
        is_resharded: whether the checkpoint is resharded anyway, and so gets the engine's order of parameters.

    Raises:
        CheckpointMismatchError: the model lacks trained parameters, or has them in another shape.
    """
    engine, served, trained = load.engine, attached(load.engine), load.listing.trained
    groups = trained_groups(engine)
    if not groups or served is None or served.topology.is_divided:
        return None
    now = _merged(groups)
    saved = {with_adapters(name, load.held): shape for name, shape in _merged(trained).items()}
    _check_model_has(saved, now, load)
    in_memory, in_files = ([list(map(plain, g)) for g in which] for which in (groups_to_save(engine), trained))
    if now.keys() == saved.keys() and (is_resharded or in_memory == in_files):
        return None
    settings = [{key: value for key, value in g.items() if key != "params"} for g in engine.optimizer.param_groups]
    fresh = {name: shape for name, shape in now.items() if name not in saved}
    frozen = tuple(name for name in saved if name not in now)
    return Selection(groups, settings, fresh, frozen, load.held)


def _merged(groups: Any) -> dict[str, tuple[int, ...]]:
    return {plain(name): tuple(shape) for group in groups for name, shape in group.items()}


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

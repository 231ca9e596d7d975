"""What a save adds to DeepSpeed's client state: the id of the save, and what the engine would lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import cures
from ..common.errors import named
from ..internals import fragments_of, has_plain_optimizer, is_expert, optimized, trained_groups
from ..parameters import plain
from ..record import KEY, Record
from .running import Save

_UNIVERSAL_INFO = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""What DeepSpeed's universal converter requires in the state of a checkpoint of ZeRO 1 or 2."""


def extended(client_state: Mapping[str, Any], save: Save, record: Record) -> dict[str, Any]:
    """The client state of a program, with ours.

    Args:
        client_state: what the program, or its framework, has passed.
        save: the save.
        record: of the checkpoint. If others give the files their names, or write them later, it is in these.
    """
    topology = save.served.topology
    needed = _UNIVERSAL_INFO if topology.stage in (1, 2) and not topology.is_divided else {}
    state = {**needed, **client_state, KEY: record.save if save.place.is_managed else record.to_json()}
    if cures.forgets_optimizer(save.engine):
        state["optimizer"] = save.engine.optimizer.state_dict()
    if record.is_trainable_only:
        state |= _kept_fragments(save)
    if topology.stage == 0 and has_plain_optimizer(save.engine) and (groups := trained_groups(save.engine)):
        state["param_shapes"] = groups  # as DeepSpeed saves them from ZeRO-1 on
    return state


def _kept_fragments(save: Save) -> dict[str, Any]:
    """The parameters that DeepSpeed would save nowhere, and frozen ones where it has a place for these.

    It has one from stage 2 on, for all of them or, with its flag, for none. What no optimizer has is nowhere else in
    ZeRO-3; below that, what the module's own `state_dict` leaves out.
    """
    engine = save.engine
    partitioned = {} if has_plain_optimizer(engine) else optimized(engine)  # is in the files of ZeRO's optimizer
    left_out = {entry.name for entry in save.base.left_out} if save.base else set[str]()
    in_state = set(save.contents.names_in_state)
    saved = {p: names[0] for p, names in save.contents.names.items() if names[0] not in left_out}
    if lacking := [name for p, name in saved.items() if p in partitioned and p not in in_state]:
        save.served.warn_once(
            f"{type(engine.module).__name__}.state_dict() lacks {len(lacking)} trained parameters ({named(lacking)}),"
            " which only ds_frozen_patch can load: it takes them from the optimizer's partitions."
        )
    if engine.zero_optimization_partition_weights():
        in_state = set()  # it has only placeholders
    has_place = engine.zero_optimization_partition_gradients()
    kept = {
        name: parameter
        for parameter, name in saved.items()
        if parameter not in partitioned
        and not is_expert(parameter)
        and (parameter not in in_state or (has_place and not parameter.requires_grad))
    }
    if not kept:
        return {}
    actual = {plain(name): name for name in save.contents.raw_names}
    shapes, fragments = fragments_of(engine, {actual[name]: parameter for name, parameter in kept.items()})
    return {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}

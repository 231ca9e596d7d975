"""What a save adds to DeepSpeed's client state: the manifest, and what the engine would lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.zero.labels import ELASTIC_KEY, PLAIN_GROUPS, UNIVERSAL_INFO
from ..common.errors import named
from ..internals import fragments_of, has_plain_optimizer, is_expert, optimized, states_file, trained_groups
from ..manifest import KEY, Manifest
from ..parameters import plain
from ..workarounds import for_deepspeed as cures
from .running import Save


def extended(client_state: Mapping[str, Any], save: Save, left_out: Manifest | None) -> dict[str, Any]:
    """The client state of a program, with ours.

    Args:
        client_state: what the program, or its framework, has passed.
        save: the save.
        left_out: its manifest; None for a full checkpoint.
    """
    topology = save.served.topology
    needed = UNIVERSAL_INFO if topology.stage in (1, 2) and not topology.is_divided else {}
    state = {**needed, **client_state}
    if cures.forgets_optimizer(save.engine):
        state["optimizer"] = save.engine.optimizer.state_dict()
    if left_out is not None:
        state |= {KEY: _manifest_or_reference(save, left_out), **_kept_fragments(save)}
    if topology.stage == 0 and has_plain_optimizer(save.engine) and (groups := trained_groups(save.engine)):
        state[PLAIN_GROUPS] = groups
    if save.served.loss_factor != 1:
        state[ELASTIC_KEY] = {"loss_factor": save.served.loss_factor}
    return state


def _manifest_or_reference(save: Save, left_out: Manifest) -> dict[str, Any]:
    """The manifest, or in ZeRO-3 a reference to the file of the rank that writes it on this disk."""
    rank, engine = save.owner.rank, save.engine
    publisher = rank - save.owner.local_rank if save.place.is_on_own_disks else 0
    file = states_file(engine, "", "").name
    part = f"zero_pp_rank_{rank}_"
    if publisher != rank and engine.zero_optimization_partition_weights() and part in file:
        return left_out.to_reference(file.replace(part, f"zero_pp_rank_{publisher}_"))
    return left_out.to_state()


def _kept_fragments(save: Save) -> dict[str, Any]:
    """The parameters that DeepSpeed would save nowhere, and frozen ones where it has a place for these.

    It has one from stage 2 on, for all of them or, with its flag, for none. What no optimizer has is nowhere else in
    ZeRO-3; below that, what the module's own `state_dict` leaves out.
    """
    engine = save.engine
    partitioned = {} if has_plain_optimizer(engine) else optimized(engine)  # is in the files of ZeRO's optimizer
    left_out = {tensor.name for tensor in save.left_out or ()}
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

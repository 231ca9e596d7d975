"""What a save leaves out and adds: its record, the client state, and what the user reads of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from .. import cures
from ..base import Base
from ..common.errors import named
from ..common.text import human_bytes
from ..engine.served import Owner, is_first, warn
from ..fingerprint import sketch
from ..internals import copies_to_masters, fragments_of, has_plain_optimizer, is_expert, optimized, trained_groups
from ..parameters import PARAMETER, PART, compiled_modules, plain
from ..record import FULL, KEY, TRAINABLE_ONLY, UNIVERSAL_INFO, LeftOut, Record, adapters_of, versions
from .running import Save

_CHANGED = (
    "Frozen parameters differ from what the program built, because training has changed them or a checkpoint has"
    " replaced them: {}. No base has these values, so checkpoints contain them from now on. To leave them out all the"
    " same, name them in patch(leave_out=[...])."
)
_MERGED = (
    "Adapters are merged into {}, and checkpoints contain the merged values and the adapters. A resume into layers that"
    " are not merged adds the adapters a second time, as it does without patch(). To avoid this, call"
    " unmerge_adapter() before each save, or name these weights in patch(leave_out=[...]): then checkpoints record them"
    " as the program built them."
)
_UNDONE = (
    "Adapters are merged into {}. Checkpoints contain the adapters and record these weights as the program built them,"
    " so a resume must not merge the adapters before it loads."
)
_AT_RANDOM = (
    "The ranks have built frozen parameters with different values: {}. So the program draws them at random, and no"
    " later run builds them again: checkpoints contain them. Set the same seed on all ranks before the model is built,"
    " and they are left out; or, if only rank 0 reads them from a file, name them in patch(leave_out=[...])."
)


def settle(save: Save, base: Base) -> None:
    """Save what is no base, and say why; see `Base.settle`."""
    changed, drawn = base.settle()
    if new := [name for name in sorted(changed) if save.served.is_first_time(f"changed: {name}")]:
        warn(save.owner, _CHANGED.format(named(new)))
        if merged := base.merged & {*new}:
            warn(save.owner, _MERGED.format(named(sorted(merged))))
    if drawn:
        warn(save.owner, _AT_RANDOM.format(named(sorted(drawn))))


def describe(save: Save) -> Record:
    """The record of a save, without its files, with fingerprints as built; every rank must call it."""
    topology, base = save.served.topology, save.base
    left_out = base.left_out if base is not None else []
    if base is not None and left_out and base.unmerged:
        save.served.log_once(
            "merged adapters",
            "PEFT has merged adapters into the base and taken them out again, which rounds some of its values"
            f" ({named(sorted(base.unmerged))}). Checkpoints record the base as the program built it, and a resume"
            " begins with that.",
        )
    if base is not None and (merged := base.merged & {n for entry in left_out for n in entry.names}):
        save.served.log_once("merged", _UNDONE.format(named(sorted(merged))))
    prints = base.fingerprints() if base is not None else []
    if unread := [entry.name for entry, print_ in zip(left_out, prints, strict=True) if print_ is None]:
        save.served.log_once(
            f"not read: {unread}",
            f"{len(unread)} left-out parameters cannot be read, or were not read before training may have changed them"
            f" ({named(unread)}), so a load cannot verify them.",
        )
    entries = (
        LeftOut(entry.names, entry.shape, entry.dtype, print_, entry.kind, entry.group if entry.kind == PART else "")
        for entry, print_ in zip(left_out, prints, strict=True)
    )
    return Record(
        save=save.place.id,
        world_size=topology.ranks,
        zero_stage=topology.stage,
        step=int(save.engine.global_steps),
        versions=versions(),
        kind=FULL if base is None else TRAINABLE_ONLY,
        left_out=tuple(entries),
        total_bytes=sum(entry.nbytes for entry in left_out),
        adapters=adapters_of(save.contents.layers),
        compiled=compiled_modules(save.contents.raw_names),
        loss_factor=save.served.loss_factor,
    )


def log_once(save: Save, record: Record, client_state: Mapping[str, Any]) -> None:
    """Log what the first save of an engine has left out, from what was really removed from its files.

    Args:
        save: of the engine.
        record: of what it leaves out.
        client_state: that the program has passed.
    """
    owner, base = save.owner, save.base
    if base is None or not is_first(owner) or not save.served.is_first_time("what is left out"):
        return
    count = len(record.parameters)
    if not count:
        owner.logger.info("ds_frozen_patch: no parameter is frozen, so checkpoints leave nothing out.")
        return
    _warn_of_copies(base, client_state, owner)
    _warn_of_masters(save)
    everything = save.contents.tensors
    removed = sum(entry.nbytes for entry in base.left_out if save.removed.intersection(entry.names))
    is_shown = owner.logger.isEnabledFor(logging.INFO)  # not by Trainer and Accelerate, as they come
    owner.logger.log(
        logging.INFO if is_shown else logging.WARNING,
        "ds_frozen_patch: checkpoints leave out %d of %d parameters, %s of %s (%s%s). A resume needs them: build the"
        " model as in this run.",
        count,
        sum(entry.kind == PARAMETER for entry in everything),
        human_bytes(removed),
        human_bytes(sum(entry.nbytes for entry in everything)),
        ", ".join(parameter.name for parameter in record.parameters[:2]),
        ", ..." if count > 2 else "",
    )


def _warn_of_masters(save: Save) -> None:
    """In stage 0 in 16 bits, the optimizer has a copy in fp32 of each of its parameters, frozen or not."""
    if not copies_to_masters(save.engine):
        return
    copied = [parameter.numel() for parameter in optimized(save.engine) if not parameter.requires_grad]
    if copied:
        warn(
            save.owner,
            f"The optimizer was made of {len(copied)} frozen parameters too, and DeepSpeed saves a copy of each in"
            f" fp32: {human_bytes(4 * sum(copied))} in each checkpoint. To avoid this, make the optimizer of the"
            " parameters with requires_grad.",
        )


_DEPTH = 10
"""So deep, copies of the base are searched for in what a program adds to a checkpoint."""


def _warn_of_copies(base: Base, client_state: Mapping[str, Any], owner: Owner) -> None:
    """Log which keys of the client state contain values that the save leaves out."""
    tensors = list(_tensors(client_state, ()))
    if not tensors:
        return
    sketches = {sketch(entry.tensor) for entry in base.left_out} - {0}
    sizes: dict[str, int] = {}
    for path, tensor in tensors:
        if sketch(tensor) in sketches:
            key = "".join(f"[{name!r}]" for name in path[:-1][:2])
            sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
    for key, size in sizes.items():
        warn(
            owner,
            f"Each checkpoint contains {human_bytes(size)} of what it leaves out all the same: the program saves copies"
            f" of frozen weights as client_state{key}. Save only what is trained there.",
        )


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping | list | tuple) and len(path) < _DEPTH:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, (*path, key))


def extended(client_state: Mapping[str, Any], save: Save, record: Record) -> dict[str, Any]:
    """The client state of a program, with ours.

    Args:
        client_state: what the program, or its framework, has passed.
        save: the save.
        record: of the checkpoint. If others give the files their names, or write them later, it is in these.
    """
    topology = save.served.topology
    needed = UNIVERSAL_INFO if topology.stage in (1, 2) and not topology.is_divided else {}
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

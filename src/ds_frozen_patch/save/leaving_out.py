"""What a save leaves out: its record, what is saved after all, and what the user reads of it."""

from __future__ import annotations

import logging

from ..common.collectives import add_up, world_size
from ..common.errors import named
from ..common.text import human_bytes
from ..core.base import optimized
from ..engine.origins import origins
from ..engine.owner import is_first, warn
from ..engine.topology import shard_of
from ..engine.tuners import unmerged
from ..fingerprint import fingerprints
from ..parameters import PARAMETER, PART, compiled_modules
from ..record import FULL, TRAINABLE_ONLY, LeftOut, Record, adapters_of, versions
from ..settings import current as settings
from .running import Save


def describe(save: Save) -> Record:
    """The record of a save, without its files, with fingerprints as built; every rank must call it."""
    topology, is_full = save.served.topology, save.left_out is None
    prints = [] if is_full else _fingerprints(save)
    left_out = save.left_out or []
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
        kind=FULL if is_full else TRAINABLE_ONLY,
        left_out=tuple(entries),
        total_bytes=sum(entry.nbytes for entry in left_out),
        adapters=adapters_of(save.engine.module),
        compiled=compiled_modules(save.contents.raw_names),
        loss_factor=save.served.loss_factor,
    )


def _fingerprints(save: Save) -> list[str | None]:
    """The fingerprint of each as built; what a rank does not know yet is added up by all.

    What the ranks have built differently, before DeepSpeed has shared rank 0's values, they have drawn at random
    without a common seed. No later run builds it again, so it is saved.
    """
    import torch

    left_out, device = save.left_out or [], save.engine.device
    if not save.base_is_known:
        origin_of, divided = origins(save.engine.module), save.served.topology.is_divided
        contents = [save.built[entry] for entry in left_out]
        unknown = [content is not None and content.fingerprint is None for content in contents]
        heads = [
            origin_of[entry.group].head if entry.kind == PARAMETER and entry.group in origin_of and not divided else 0
            for entry in left_out
        ]
        # Numbers are equal if, and only if, the square of their sum is the sum of their squares, times how many.
        rows = [unknown, [head > 0 for head in heads], heads, [head**2 for head in heads]]
        numbers = torch.tensor(rows, dtype=torch.int64)
        sums = zip(left_out, contents, *add_up(numbers, device).tolist(), strict=True)
        at_random, todo = set[str](), []
        for entry, content, is_unknown, there, total, squares in sums:
            is_overruled = settings().leaves_out(entry.names)
            if there == world_size() and total**2 != there * squares and not is_overruled:
                at_random.add(entry.group)
            elif is_unknown:
                todo.append((entry, content))
        if at_random:
            _keep(save, at_random, _AT_RANDOM)
        tensors = [entry.tensor for entry, _ in todo]
        shards = [shard_of(save.engine, tensor) for tensor in tensors]
        fingerprints(tensors, device, [content for _, content in todo], shards=shards)
    contents = [save.built[entry] for entry in save.left_out or ()]
    return [content.fingerprint if content is not None else None for content in contents]


def log_rounding(save: Save) -> None:
    """Log once that merged adapters have rounded the base."""
    save.served.log_once(
        "merged adapters",
        "PEFT has merged adapters into the base and taken them out again, which rounds some of its values"
        f" ({named(sorted(unmerged(save.engine.module)))}). Checkpoints record the base as the program built it, and a"
        " resume begins with that.",
    )


_CHANGED = (
    "Frozen parameters differ from what the program built, because training has changed them or a checkpoint has"
    " replaced them: {}. No base has these values, so checkpoints contain them from now on. To leave them out all the"
    " same, name them in patch(leave_out=[...])."
)
_AT_RANDOM = (
    "The ranks have built frozen parameters with different values: {}. So the program draws them at random, and no"
    " later run builds them again: checkpoints contain them. Set the same seed on all ranks before the model is built,"
    " and they are left out; or, if only rank 0 reads them from a file, name them in patch(leave_out=[...])."
)


def keep_changed(save: Save, changed: set[str]) -> None:
    """Save these groups (see `ModuleTensor`) from now on, since no base has their values."""
    overruled = {entry.group for entry in save.left_out or () if settings().leaves_out(entry.names)}
    if changed := changed - overruled:
        _keep(save, changed, _CHANGED)


def _keep(save: Save, groups: set[str], message: str) -> None:
    origin_of = origins(save.engine.module)
    for name in groups & origin_of.keys():
        origin_of[name].is_changed = True
    save.left_out = [entry for entry in save.left_out or () if entry.group not in groups]
    warn(save.owner, message.format(named(sorted(groups))))


def _warn_of_masters(save: Save) -> None:
    """In stage 0 in 16 bits, the optimizer has a copy in fp32 of each of its parameters, frozen or not."""
    if not hasattr(save.engine.optimizer, "fp16_groups"):
        return
    copied = [parameter.numel() for parameter in optimized(save.engine) if not parameter.requires_grad]
    if copied:
        warn(
            save.owner,
            f"The optimizer was made of {len(copied)} frozen parameters too, and DeepSpeed saves a copy of each in"
            f" fp32: {human_bytes(4 * sum(copied))} in each checkpoint. To avoid this, make the optimizer of the"
            " parameters with requires_grad.",
        )


def log_once(save: Save, record: Record) -> None:
    """Log what the first save of an engine has left out, from what was really removed from its files."""
    owner = save.owner
    if not is_first(owner) or not save.served.is_first_time("what is left out"):
        return
    count = len(record.parameters)
    if not count:
        owner.logger.info("ds_frozen_patch: no parameter is frozen, so checkpoints leave nothing out.")
        return
    _warn_of_masters(save)
    everything = save.contents.tensors
    removed = sum(entry.nbytes for entry in save.left_out or () if save.removed.intersection(entry.names))
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

"""What a save leaves out: its manifest, what is saved after all, and what the user reads of it."""

from __future__ import annotations

import logging

from .. import manifest
from ..common.errors import named
from ..common.text import human_bytes
from ..engine.origins import origins
from ..engine.owner import is_first, warn
from ..engine.topology import shard_of
from ..parameters import PARAMETER
from ..settings import current as settings
from .running import Save


def describe(save: Save) -> manifest.Manifest:
    """The manifest of what a save leaves out; every rank must call it.

    From the second save of an engine on, fingerprints show changes that a sample does not: these are saved.
    """
    described = _describe(save)
    before = save.served.prints
    now = {entry.name: entry.fingerprint for entry in described.left_out}
    changed = {name for name, print_ in now.items() if print_ and (before.get(name) or print_) != print_}
    if changed:
        keep_changed(save, {entry.group for entry in save.left_out or () if entry.name in changed})
        save.base_is_known = True
        described = _describe(save)
        now = {entry.name: entry.fingerprint for entry in described.left_out}
    if unread := [name for name, print_ in now.items() if print_ is None and name not in before]:
        warn(
            save.owner,
            f"The content of {len(unread)} left-out parameters cannot be read ({named(unread)}), so a load cannot"
            " verify it.",
        )
    save.served.prints = {**before, **{name: print_ for name, print_ in now.items() if print_ or name not in before}}
    return described


def _describe(save: Save) -> manifest.Manifest:
    engine, topology, left_out = save.engine, save.served.topology, save.left_out or ()
    return manifest.describe(
        left_out,
        contents=save.contents,
        device=engine.device,
        zero_stage=topology.stage,
        world_size=topology.ranks,
        all_known=save.base_is_known,
        shards=[shard_of(engine, entry.tensor) for entry in left_out] if topology.is_divided else (),
    )


def keep_changed(save: Save, changed: set[str]) -> None:
    """Save these groups (see `ModuleTensor`) from now on, since no base has their values."""
    assert save.left_out is not None
    overruled = {entry.group for entry in save.left_out if settings().leaves_out(entry.names)}
    if changed := changed - overruled:
        origin_of = origins(save.engine.module)
        for name in changed & origin_of.keys():
            origin_of[name].is_changed = True
        save.left_out = [entry for entry in save.left_out if entry.group not in changed]
        warn(
            save.owner,
            "Frozen parameters differ from what the program built, because training has changed them or a checkpoint"
            f" has replaced them: {named(sorted(changed))}. No base has these values, so checkpoints contain them from"
            " now on. To leave them out all the same, name them in patch(leave_out=[...]).",
        )


def log_once(save: Save, left_out: manifest.Manifest) -> None:
    """Log what the first save of an engine has left out, from what was really removed from its files."""
    owner = save.owner
    if not is_first(owner) or not save.served.is_first_time("what is left out"):
        return
    count = len(left_out.parameters)
    if not count:
        owner.logger.info("ds_frozen_patch: no parameter is frozen, so checkpoints leave nothing out.")
        return
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
        ", ".join(parameter.name for parameter in left_out.parameters[:2]),
        ", ..." if count > 2 else "",
    )

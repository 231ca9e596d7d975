"""What happens around a save of an engine: the wrappers of two methods of `DeepSpeedEngine`.

A wrapper takes wrapt's four arguments: the wrapped method (bound), its instance, args and kwargs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import manifest
from ..checkpoint.zero.labels import ELASTIC_KEY, UNIVERSAL_INFO
from ..common.errors import named
from ..common.overrides import overridden
from ..common.text import human_bytes
from ..core.base import in_partitions
from ..core.record import Record
from ..engine.owner import is_first, warn
from ..engine.served import attached
from ..engine.topology import is_expert, shard_of
from ..parameters import PARAMETER, contents, names_by_parameter, names_in_state_dict, plain
from ..publish.ways import Way
from ..settings import FLAG
from ..settings import current as settings
from ..workarounds import for_deepspeed as cures
from .copies import warn_of_copies
from .save import Save, current
from .saving import keep_changed, saving, writes_before_it_returns
from .writing import writing


def save_checkpoint(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.save_checkpoint`, which every framework calls: sets the flag, and adds the manifest.

    The tag's folder is there once it is whole, and then `latest` names it.
    """
    known = attached(engine)
    if known is None:
        return wrapped(*args, **kwargs)
    cures.check_nvme(engine)
    cures.check_step_counts(engine)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    tag = call.arguments.get("tag")
    call.arguments["tag"] = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed does
    exclude = known.owner.excludes(call.arguments.get(FLAG))
    with saving(engine, known, Path(call.arguments["save_dir"]), call.arguments["tag"], exclude) as save:
        return _save(wrapped, call, save)


def _save(wrapped: Callable[..., Any], call: inspect.BoundArguments, save: Save) -> Any:
    engine, exclude = save.engine, save.left_out is not None
    call.arguments[FLAG] = exclude
    ours: dict[str, Any] = {}
    left_out = make_manifest(save) if exclude else None
    if cures.forgets_optimizer(engine):
        ours["optimizer"] = engine.optimizer.state_dict()
    if left_out is not None:
        warn_of_copies(save, call.arguments.get("client_state") or {})
        save.names_left_out = left_out.names
        ours |= {manifest.KEY: _manifest_or_reference(save, left_out)} | _kept_fragments(save)
    if save.attached.loss_factor != 1:
        ours[ELASTIC_KEY] = {"loss_factor": save.attached.loss_factor}
    topology = save.attached.topology
    needed = UNIVERSAL_INFO if topology.stage in (1, 2) and not topology.is_divided else {}
    call.arguments["client_state"] = {**needed, **(call.arguments.get("client_state") or {}), **ours}
    if settings().export and topology.is_divided:
        save.attached.warn_once(
            "patch(export=...) has no effect on this engine: with experts of deepspeed.moe or tensor parallelism, no"
            " rank has all weights."
        )
    elif settings().export:
        from . import export_trained

        export_trained.write(save, save.place.export)
    with cures.explaining_nvme_errors(), overridden(cures.config_by_content(engine)):
        saved = _write(wrapped, call, save, left_out)
    if left_out is not None:
        _log_once(save, left_out)
    return saved


def _write(
    wrapped: Callable[..., Any], call: inspect.BoundArguments, save: Save, left_out: manifest.Manifest | None
) -> Any:
    """Let DeepSpeed write all of its files, but for `latest`."""
    if not writes_before_it_returns(save.engine):
        if save.attached.is_first_time("an engine that writes later"):
            warn(
                save.owner,
                f"DeepSpeed's {type(save.engine.checkpoint_engine).__name__} writes after a save has returned. A"
                f" save to {save.place.folder} that is killed or fails leaves an incomplete checkpoint. Use DeepSpeed's"
                " default checkpoint engine to prevent that.",
            )
        return wrapped(*call.args, **call.kwargs)
    if save.place.way is not Way.UNMANAGED:
        call.apply_defaults()
        save.place.latest = call.arguments["tag"] if call.arguments["save_latest"] else None
        call.arguments["save_latest"] = False  # DeepSpeed writes it in a way whose errors cannot be deferred
        if save.place.way is Way.EXCHANGED:
            call.arguments.update(save_dir=str(save.place.destination.parent), tag=save.place.destination.name)
        save.record = None if save.attached.topology.is_divided else _record(save, left_out)
    with writing(save):
        return wrapped(*call.args, **call.kwargs)


def _record(save: Save, left_out: manifest.Manifest | None) -> Record:
    """The record of a save, without its files, which are not written yet."""
    topology = save.attached.topology
    return Record(
        save=save.place.id,
        world_size=topology.ranks,
        zero_stage=topology.stage,
        step=int(save.engine.global_steps),
        versions=manifest.versions(),
        files={},
        manifest=left_out,
    )


def _manifest_or_reference(save: Save, left_out: manifest.Manifest) -> dict[str, Any]:
    """The manifest, or in ZeRO-3 a reference to the file of the rank that writes it on this disk."""
    rank, engine = save.owner.rank, save.engine
    publisher = rank - save.owner.local_rank if save.place.is_on_own_disks else 0
    own = Path(engine._get_ckpt_name("", "")).name
    part = f"zero_pp_rank_{rank}_"
    if publisher != rank and engine.zero_optimization_partition_weights() and part in own:
        return left_out.to_reference(own.replace(part, f"zero_pp_rank_{publisher}_"))
    return left_out.to_state()


def make_manifest(save: Save) -> manifest.Manifest:
    """The manifest of what a save leaves out; every rank must call it."""
    engine, known = save.engine, save.attached

    def describe() -> manifest.Manifest:
        return manifest.describe(
            save.left_out or (),
            module=engine.module,
            device=engine.device,
            zero_stage=known.topology.stage,
            world_size=known.topology.ranks,
            all_known=save.base_is_known,
            shards=[shard_of(engine, one.tensor) for one in save.left_out or ()] if known.topology.is_divided else (),
        )

    made = describe()
    # From the second save on, fingerprints show changes that a sample does not.
    before, groups = known.prints, {one.name: one.group for one in save.left_out or ()}
    now = {one.name: one.fingerprint for one in made.left_out}
    if changed := {groups[name] for name, print_ in now.items() if print_ and (before.get(name) or print_) != print_}:
        keep_changed(save, changed)
        save.base_is_known = True
        made = describe()
    known.prints = {**before, **{one.name: one.fingerprint for one in made.left_out if one.fingerprint}}
    if unread := [one.name for one in made.left_out if one.fingerprint is None and one.name not in before]:
        known.prints = {**known.prints, **dict.fromkeys(unread)}
        warn(
            save.owner,
            f"The content of {len(unread)} left-out parameters cannot be read ({named(unread)}), so a load cannot"
            " verify it.",
        )
    return made


def _kept_fragments(save: Save) -> dict[str, Any]:
    """The parameters that DeepSpeed would save nowhere, and frozen ones where it has a place for these.

    It has one from stage 2 on, for all of them or, with its flag, for none. What no optimizer has is nowhere else in
    ZeRO-3; below that, what the module's own `state_dict` leaves out.
    """
    engine, partitioned = save.engine, in_partitions(save.engine)
    left_out = {one.name for one in save.left_out or ()}
    in_state = set(names_in_state_dict(engine.module))
    saved = {p: names[0] for p, names in names_by_parameter(engine.module).items() if names[0] not in left_out}
    if lacking := [name for p, name in saved.items() if p in partitioned and p not in in_state]:
        save.attached.warn_once(
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
    actual = {plain(name): name for name, _ in engine.module.named_parameters()}
    shape, fragment = engine._get_param_shape_func, engine._get_param_fragment_func
    return {
        "frozen_param_shapes": {actual[name]: shape(parameter) for name, parameter in kept.items()},
        "frozen_param_fragments": {actual[name]: fragment(parameter) for name, parameter in kept.items()},
    }


def module_state_dict(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`DeepSpeedEngine.module_state_dict`: leaves out the base, each of its parameters under all names.

    DeepSpeed's own exclusion walks `named_parameters()`, which gives a tied parameter only once, and
    before 0.12.3 it raises KeyError for a module whose `state_dict` gives a subset.
    """
    save = current.get()
    left_out = save.names_left_out if save is not None and save.engine is engine else None
    if save is None or left_out is None:
        return wrapped(*args, **kwargs)
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.arguments[FLAG] = False
    state = wrapped(*call.args, **call.kwargs)
    for name in [name for name in state if plain(name) in left_out]:
        save.removed.add(plain(name))
        del state[name]
    return state


def _log_once(save: Save, left_out: manifest.Manifest) -> None:
    """Log what the first save of an engine has left out, from what was really removed from its files."""
    owner = save.owner
    if not is_first(owner) or not save.attached.is_first_time("what is left out"):
        return
    count = len(left_out.parameters)
    if not count:
        owner.logger.info("ds_frozen_patch: no parameter is frozen, so checkpoints leave nothing out.")
        return
    everything = contents(save.engine.module)
    removed = sum(one.nbytes for one in save.left_out or () if save.removed.intersection(one.names))
    is_shown = owner.logger.isEnabledFor(logging.INFO)  # not by Trainer and Accelerate, as they come
    owner.logger.log(
        logging.INFO if is_shown else logging.WARNING,
        "ds_frozen_patch: checkpoints leave out %d of %d parameters, %s of %s (%s%s). A resume needs them: build the"
        " model as in this run.",
        count,
        sum(one.kind == PARAMETER for one in everything),
        human_bytes(removed),
        human_bytes(sum(one.nbytes for one in everything)),
        ", ".join(p.name for p in left_out.parameters[:2]),
        ", ..." if count > 2 else "",
    )

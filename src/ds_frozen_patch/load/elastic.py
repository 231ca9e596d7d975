"""A load in another ZeRO stage, precision or world size than the save's, unless `patch(elastic=False)`.

Each rank reads the ranges of the files that it needs, whose checksums the ranks have verified before, and DeepSpeed
loads its shard as if it had read it from its own file. Nothing is written. So it is for other trained parameters (see
`changed_parameters`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.format.records import Piece, Records, TensorSource
from ..checkpoint.format.writing import write_archive
from ..checkpoint.zero.groups import BASE_STATE, MASTER
from ..checkpoint.zero.resharding import Resharding, optimizer_name, target_for
from ..checkpoint.zero.states import FLAT_MASTERS, check_contents, check_shard_count, masters_key, read_states
from ..checkpoint.zero.weights import check_masters_match, locate_weights
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..common.overrides import Attributes, overridden
from ..cures import ignores_round_robin
from ..engine.served import attached, is_first
from ..internals import (
    gathered,
    has_gaps,
    has_plain_optimizer,
    loss_scaling,
    optimizer_group,
    with_files,
    with_listed_files,
    with_merge,
)
from ..parameters import Contents
from ..record import UNKNOWN
from ..settings import current
from . import changed_parameters
from .agreement import LoadRanks
from .changed_parameters import Selection
from .running import Load

if TYPE_CHECKING:
    import torch

NEEDED = ("ds_config", "dp_world_size")
"""What `Owner.after_load` needs of the checkpoint's own state."""
_MASTERS = {"": "in fp32", "fp32_groups": "in 16 bits", FLAT_MASTERS: "in 16 bits with FusedAdam"}


@contextmanager
def resharded(load: Load) -> Iterator[Attributes]:
    """While this lasts, the engine can load the checkpoint: its reads get what it would have saved, if need be.

    Every rank must call it.

    Yields:
        What lets the engine take the names of files from the listing.

    Raises:
        CheckpointMismatchError: it cannot be loaded, or not with `patch(elastic=False)`.
        CheckpointError: it cannot be resharded.
    """
    engine, listing = load.engine, load.listing
    scaling = loss_scaling(engine)
    is_needed = _needs_resharding(load)
    selection = changed_parameters.find_selection(load, is_needed) if listing.trained else None
    if is_needed or selection is not None:
        answers = _Answers(load, selection)
        config = answers.resharding.states.models[0].get("ds_config")
        with overridden(answers.attributes()):
            yield []
        if selection is not None:
            changed_parameters.finish(load, selection)
    else:
        try:
            yield with_listed_files(engine, listing.model, listing.optimizer) if listing.tag is not None else []
        except (CheckpointError, CheckpointMismatchError):
            raise
        except Exception as error:
            served = attached(engine)
            if served is None or not (served.topology.is_divided and load.restores_optimizer and current().elastic):
                raise
            raise CheckpointMismatchError(
                f"{load.source} could not be loaded ({error}). With tensor parallelism, or experts of deepspeed.moe,"
                " patch(elastic=True) changes neither the world size nor the ZeRO stage. Resume with those of the save."
            ) from error
        config = load.state.get("ds_config")
    if load.restores_optimizer and isinstance(config, Mapping):
        was_in_fp16 = isinstance(section := config.get("fp16"), Mapping) and bool(section.get("enabled"))
        if was_in_fp16 != bool(engine.fp16_enabled()):  # a run begins with its own loss scale
            vars(engine.optimizer).update(scaling)


class _Answers:
    """What DeepSpeed's reads are answered with, on this rank; every rank must make one.

    Args:
        load: the running load.
        selection: what is trained from now on; None for what was trained.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be resharded.
    """

    def __init__(self, load: Load, selection: Selection | None) -> None:
        self.load, self._seen = load, dict[str, Any]()
        LoadRanks(load.owner.device, load).step("plan the resharding", partial(self._plan, selection))
        if selection is not None:
            self._keep_fresh()
            load.starts_fresh = frozenset(alias for name in selection.fresh for alias in load.held[name].names)
        if is_first(load.owner):
            target = self.resharding.target
            load.owner.logger.info("%s is resharded for stage %d at %d.", load.source, target.stage, target.ranks)

    def _plan(self, selection: Selection | None) -> None:
        """Read the pickles of the files, and find out what this rank needs."""
        import torch.distributed as dist

        load, engine = self.load, self.load.engine
        own = dist.get_rank(optimizer_group(engine))
        states = read_states(load.source, load.listing.tag, rank=own)
        check_shard_count(states.layout, states.models[0], states.zero_stage)
        if current().verify_files:  # they may have been replaced since they were verified
            check_contents(states)
        scheduler = states.models[0].get("lr_scheduler")
        if selection is not None:
            states = selection.rename(states)
            selection, scheduler = _with_other_groups(engine, selection, scheduler)
        weights = locate_weights(states, ("*",))
        if load.record is None or load.record.kind == UNKNOWN:  # nothing says that the files are of one save
            check_masters_match(weights.trained, weights.halves)
        target = target_for(states, **_target(engine))
        select = {} if selection is None else {"select": partial(selection.select, weights)}
        self.resharding = Resharding(states, weights, target, **select)
        load.record = self.resharding.record
        # DeepSpeed looks up the file of model states, so that one is named which is there.
        self.model = str(states.layout.model[min(own, len(states.layout.model) - 1)])
        folder = states.layout.model[0].parent
        self.optimizers = [str(folder / optimizer_name(target, index)) for index in range(target.ranks)]
        self.files = {self.model: {**self.resharding.model(own if target.stage == 3 else 0), "lr_scheduler": scheduler}}
        if load.restores_optimizer and target.stage:
            self.files[self.optimizers[own]] = self.resharding.optimizer(own)

    def _keep_fresh(self) -> None:
        """Keep what this rank needs of the model's own values, with which it begins to train parameters."""
        import torch

        resharding = self.resharding
        masters = [values[MASTER] for group in resharding.groups for values in group.parameters.values()]
        absent = [piece.storage.key for master in masters for piece in master.pieces if piece.storage.file is None]
        wanted = {
            piece for pieces in resharding.tensors.pieces.values() for piece in pieces if isinstance(piece, Piece)
        }
        parameters = Contents(self.load.engine.module).parameters
        for name, value in gathered({name: parameters[name] for name in absent}, True):
            for piece in (piece for piece in wanted if piece.storage.file is None and piece.storage.key == name):
                part = value.reshape(-1)[piece.begin : piece.begin + piece.count]
                resharding.tensors.values[piece] = part.to(torch.float32, copy=True).numpy().data

    def attributes(self) -> Attributes:
        """What lets DeepSpeed read the answers."""
        files = with_files(self.load.engine, lambda *_, **__: [self.model], lambda *_, **__: self.optimizers)
        return [(self.load, "answers", self._answer), *files, *with_merge(self._weights)]

    def _answer(self, path: str) -> Any:
        """What DeepSpeed is to get for a file; None if that is what the file contains."""
        if path in self._seen:  # DeepSpeed reads the model states twice
            return self._seen.pop(path)
        state = self._in_memory(self.files[path]) if path in self.files else None
        if path == self.model:
            self._seen[path] = state
        return state

    def _in_memory(self, state: Mapping[str, Any]) -> Any:
        """What torch reads from a file in memory; the tensors are that file, of which there is no copy."""
        import torch

        with os.fdopen(os.memfd_create("ds_frozen_patch"), "wb") as file, Records(check=False) as records:
            path = f"/proc/self/fd/{file.fileno()}"
            write_archive(Path(path), state, lambda *place: self.resharding.tensors.content(records, *place))
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)

    def _weights(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """All weights, as `get_fp32_state_dict_from_zero_checkpoint` returns them."""
        weights = self.resharding.weights
        with Records(check=False) as records:
            values = {name: _read(records, source) for name, source in weights.all.items()}
        return {alias: value for name, value in values.items() for alias in weights.names_of(name)}


def _with_other_groups(engine: Any, selection: Selection, scheduler: Any) -> tuple[Selection, Any]:
    """What a scheduler that has a setting for each group loads if there are more or fewer groups than before.

    It has the program's settings then, as the optimizer has, at the fraction of the learning rate that was reached.
    """
    own = engine.lr_scheduler.state_dict() if getattr(engine, "lr_scheduler", None) is not None else {}
    before = scheduler.get("base_lrs") if isinstance(scheduler, Mapping) else None
    if not before or not own.get("base_lrs") or len(before) == len(own["base_lrs"]):
        return selection, scheduler
    lists = {key for key, value in own.items() if isinstance(value, list) and isinstance(scheduler.get(key), list)}
    reached = scheduler.get("_last_lr", before)[0] / (before[0] or 1)
    rates = [rate * reached for rate in own["base_lrs"]]
    settings = [{**group, "lr": rate} for group, rate in zip(selection.settings, rates, strict=True)]
    changed = {**scheduler, **{key: own[key] for key in lists}, "_last_lr": rates}
    return replace(selection, settings=settings), changed


def _read(records: Records, source: TensorSource) -> torch.Tensor:
    import torch

    dtype = getattr(torch, source.dtype)
    return (torch.frombuffer(records.read(source), dtype=dtype) if source.numel else torch.empty(0, dtype=dtype)).view(
        source.shape
    )


def _needs_resharding(load: Load) -> bool:
    engine, served, saved = load.engine, attached(load.engine), load.listing
    if not saved.ranks or served is None:
        return False  # `agreement.check` reports what is wrong
    stage, ranks = served.topology.stage, served.topology.ranks
    is_plain, is_bf16 = has_plain_optimizer(engine), bool(engine.bfloat16_enabled())
    masters = masters_key(vars(engine.optimizer)) if is_plain else ""
    now = _format(stage, ranks, is_plain, masters, is_bf16, has_gaps(engine))
    was_bf16 = bool(saved.optimizer) and saved.optimizer[0].startswith("bf16_")
    masters = masters if saved.masters is None else saved.masters
    before = _format(saved.stage, saved.ranks, not saved.optimizer, masters, was_bf16, saved.has_gaps)
    fits = before == now
    if not load.restores_optimizer:
        # Without an optimizer every rank reads all files, but DeepSpeed looks for one of its own.
        fits = stage < 3 or saved.stage < 3 or saved.ranks >= ranks
        if current().elastic is not False:
            fits &= (saved.stage < 3 or stage == 3) and (saved.stage > 0 or stage < 3)
    if fits:
        return False
    if load.is_on_own_disks:
        why = "Nodes have disks of their own: copy the files of all of them into one folder."
    elif current().elastic is False:
        why = "patch(elastic=False) or DS_FROZEN_PATCH_ELASTIC=0 forbids to reshard it automatically."
    else:
        return True
    precision = _precision(engine)
    options = f"--stage {stage} --ranks {ranks}" + (f" --precision {precision}" if precision != "fp16" else "")
    raise CheckpointMismatchError(
        f"The checkpoint was saved {before}, and DeepSpeed cannot load it {now}. {why} To reshard it by hand:"
        f" ds-frozen-patch reshard {load.source} NEW {options}, then load NEW."
    )


def _format(stage: int, ranks: int, is_plain: bool, masters: str, is_bf16: bool, has_gaps: bool) -> str:
    """What decides whether DeepSpeed can load the optimizer, in words."""
    if is_plain:
        return f"in ZeRO stage 0 {_MASTERS[masters]}"
    kind, precision = "3" if stage == 3 else "1 or 2", "bf16" if is_bf16 else "fp16 or fp32"
    gaps = " with zero_optimization.parameter_alignment" if has_gaps else ""
    return f"in ZeRO stage {kind} at world size {ranks} in {precision}{gaps}"


def _precision(engine: Any) -> str:
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def _target(engine: Any) -> dict[str, Any]:
    """What an engine loads, for `target_for`."""
    from deepspeed import __version__

    served = attached(engine)
    assert served is not None
    is_plain = has_plain_optimizer(engine)
    stage = 0 if is_plain else served.topology.stage or 1  # DeepSpeed's BF16_Optimizer is as ZeRO-1 in stage 0
    in_masters = masters_key(vars(engine.optimizer)) if is_plain else ""
    return {
        "ranks": served.topology.ranks,
        "stage": stage,
        "precision": _precision(engine),
        "sub_group_size": engine.zero_sub_group_size(),
        "round_robin": bool(engine.zero_round_robin_gradients()) and not ignores_round_robin(__version__, stage),
        "has_state": not current().restart_optimizer,
        "like": {**engine.optimizer.state_dict(), BASE_STATE[3]: None, in_masters: None} if in_masters else {},
    }

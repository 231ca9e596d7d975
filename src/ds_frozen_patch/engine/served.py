"""The engines that are patched, who made each, and what is known of it; others are left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import process
from ..ranks import rank
from ..settings import FLAG
from .topology import Topology, has_all_ranks, topology_of


@dataclass(frozen=True)
class Owner:
    """Whoever made an engine, on one rank. It must hold neither the engine nor what holds that.

    Attributes:
        rank: of all ranks.
        local_rank: of the node's ranks.
        device: where the process group's backend can reach a tensor, a `torch.device`.
        logger: ours, as a child of the framework's, so that its settings count.
        config: DeepSpeed's configuration as the program gave it; an engine for tests may have less of it.
        names_each_save: whether each save has a folder of its own, and not only a tag in a folder of many.
        leaves_out: returns whether saves leave frozen parameters out, if the call does not say.
        after_load: called on every rank after the optimizer has been restored. It gets the engine; the checkpoint's own
            state, reduced to `load.elastic.NEEDED`; and what the framework restores itself from, which it may change.
            It raises CheckpointMismatchError if the framework cannot resume at this world size.
        unserved: why a framework is left as it is, and its engines too; empty if it is not.
    """

    rank: int
    local_rank: int
    device: Any
    logger: logging.Logger
    config: Mapping[str, Any]
    names_each_save: bool
    leaves_out: Callable[[], bool]
    after_load: Callable[[Owner, Any, Mapping[str, Any], dict[str, Any]], None]
    unserved: str = ""

    def excludes(self, requested: bool | None) -> bool:
        """Whether a save leaves frozen parameters out.

        Args:
            requested: `exclude_frozen_parameters` of `engine.save_checkpoint`; None if it was not given.
        """
        if process.state.full_requests:
            return False
        return self.leaves_out() if requested is None else requested


def is_first(owner: Owner) -> bool:
    """Whether this is rank 0."""
    return owner.rank == 0


def warn(owner: Owner, message: str) -> None:
    """Log a warning, on rank 0 only."""
    if is_first(owner):
        owner.logger.warning(message)


@dataclass
class ServedEngine:
    """What is known of an engine.

    Attributes:
        owner: that made it.
        topology: what kind of engine it is.
        comparisons: how often its base has been compared since all of it was, see `base`.
        compared_rows: how many rows it had then, see `fingerprint.Content`.
        begin: called with the engine when training begins, or adapters are merged before; then None.
        undoes_merges: whether saves leave out what adapters are merged into at present.
        loss_factor: what each loss is multiplied by, see `engine.batch.scale_loss`.
        scales_loss: whether the engine multiplies its losses.
        publishes: whether this rank has published the last checkpoint on its disk.
        recorder: of saves that training does not wait for (`save.writer.Recorder`), once there was one.
        load: that a strategy has begun (`load.running.Load`), while the engine loads for it.
        single_file: that `Trainer.save_checkpoint` has begun, while the strategy saves for it.
        logged: the messages already logged once.
        undo: what `unpatch()` calls with the engine, to take off what was put on it.
    """

    owner: Owner
    topology: Topology
    comparisons: int = 0
    compared_rows: int = 0
    begin: Callable[[Any], None] | None = None
    undoes_merges: bool = False
    loss_factor: float = 1.0
    scales_loss: bool = False
    publishes: bool = False
    recorder: Any = None
    load: Any = None
    single_file: Any = None
    logged: set[str] = field(default_factory=set)
    undo: list[Callable[[Any], object]] = field(default_factory=list)

    def warn_once(self, message: str) -> None:
        """Log a warning on rank 0, the first time."""
        self.log_once(message, message)

    def log_once(self, kind: str, message: str) -> None:
        """Log a warning on rank 0, the first of its kind."""
        if self.is_first_time(kind):
            warn(self.owner, message)

    def is_first_time(self, what: str) -> bool:
        """Whether this is the first call with this text."""
        is_new = what not in self.logged
        self.logged.add(what)
        return is_new


UNKNOWN = (
    "ds_frozen_patch did not see this engine being created, so its checkpoints contain frozen parameters too, and loads"
    " do not verify them. Call ds_frozen_patch.patch() before deepspeed.initialize(), or ds_frozen_patch.serve(engine)"
    " on every rank after it. To save full checkpoints on purpose, pass"
    " engine.save_checkpoint(..., exclude_frozen_parameters=False)."
)


def attach(engine: Any, owner: Owner) -> ServedEngine | None:
    """Patch an engine from now on; what is known of one that is attached already is kept.

    Every rank must call it. It returns None, the first time with a warning, for a kind of engine that is not supported.
    """
    engines = process.state.engines
    if engine not in engines:
        topology = topology_of(engine)
        reason = owner.unserved or topology.unserved
        engines[engine] = None if reason else ServedEngine(owner, topology)
        if reason and (owner.rank == 0 or not has_all_ranks(engine)):
            owner.logger.warning(
                f"ds_frozen_patch does not support {reason}. Checkpoints of this engine contain frozen"
                " parameters too, and loads do not verify them, as without patch().",
            )
    return engines[engine]


def attached(engine: Any | None, find_owner: Callable[[], Owner] | None = None) -> ServedEngine | None:
    """What is known of an engine; None if it is not patched.

    Args:
        engine: if there is one.
        find_owner: returns who has made it, to attach one that is not known; then every rank must call it.
    """
    if engine is not None and find_owner is not None and engine not in process.state.engines:
        return attach(engine, find_owner())
    return process.state.engines.get(engine) if engine is not None else None


def attached_at_save(engine: Any, arguments: Mapping[str, Any]) -> ServedEngine | None:
    """The same, with a warning, once, if a save by these arguments is whole because the engine is older than `patch()`.

    Without a word are full checkpoints that were asked for, and those of engines with nothing frozen.
    """
    state = process.state
    is_known = engine in state.engines or engine in state.warned or FLAG in arguments or state.full_requests > 0
    if not is_known and not all(parameter.requires_grad for parameter in engine.module.parameters()):
        state.warned.add(engine)
        if rank() == 0:
            logging.getLogger("ds_frozen_patch").warning(UNKNOWN)
    return process.state.engines.get(engine)


def begin_those_with(inner: Any) -> None:
    """Call `begin` of the engines with a module that contains this one."""
    for engine, served in list(process.state.engines.items()):
        if served is not None and served.begin is not None and any(inner is other for other in engine.module.modules()):
            served.begin(engine)


def release_all() -> None:
    """Take off every engine what was put on it."""
    for engine, served in list(process.state.engines.items()):
        while served is not None and served.undo:
            served.undo.pop()(engine)

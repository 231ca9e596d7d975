"""What happens around a load by another number of ranks than have saved: the checkpoint is resharded, the run goes on.

Lightning divides the loss by `accumulate_grad_batches`, and DeepSpeed does so again. As long as that number stays the
same, the two cancel out in an optimizer such as Adam; where it changes, the gradients' scale would.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from ..checkpoint.tools.reshard import reshard_inside
from ..checkpoint.zero.repartition import KEY as KEY
from ..common.collectives import gather
from ..common.disks import find_disks
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..save.save import WORK
from ..save.saving import has_plain_optimizer, logger_of, warn
from ..settings import current
from .load import Load, Look, Saved
from .trust import runs_nothing

_loss_factors: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

TO_REMEMBER = (KEY, "ds_config", "dp_world_size")
"""What `carry_on` needs of the checkpoint's state."""


def resharded(load: Load, look: Look) -> str | None:
    """The folder that is made, if `patch()` says so, where this number of ranks cannot load a checkpoint; else None.

    Every rank must call it.

    Raises:
        CheckpointMismatchError: it cannot be loaded, or the ZeRO stages do not go together.
        CheckpointError: the folder cannot be made.
    """
    engine, saved = load.engine, look.saved
    if engine.load_universal_checkpoint():
        raise CheckpointMismatchError(
            'With "load_universal", DeepSpeed loads neither buffers nor frozen parameters, and the base cannot be'
            " verified. Take it out of the configuration, and load the checkpoint that the universal one was made of:"
            " with patch(elastic=True), any number of ranks can."
        )
    if saved is None:
        return None  # what is wrong with it is said where it is checked
    stage, ranks = int(engine.zero_optimization_stage()), int(engine.dp_world_size)
    if load.restores_optimizer and not has_plain_optimizer(engine):
        _check_stages(saved, stage)
        fits = saved.ranks == ranks
    else:
        # Without an optimizer every rank reads all parts, but DeepSpeed looks for one of its own.
        fits = stage < 3 or saved.stage < 3 or saved.ranks >= ranks
    if fits:
        return None
    if load.is_on_own_disks:
        raise CheckpointMismatchError(
            f"The checkpoint was saved by {saved.ranks} ranks on disks of their own, and {ranks} cannot load it. Copy"
            f" the files of all nodes into one folder, and reshard that: ds-frozen-patch reshard FOLDER NEW --ranks"
            f" {ranks}"
        )
    if not current().elastic:
        raise CheckpointMismatchError(_offer(load.source, saved, ranks))
    return _reshard(load, saved, ranks)


def _check_stages(saved: Saved, stage: int) -> None:
    if saved.in_parts and (saved.stage == 3) == (stage == 3):
        return
    raise CheckpointMismatchError(
        f"The checkpoint was saved in ZeRO stage {saved.stage}, and a run in stage {stage} cannot take up its"
        f" optimizer: that works from 1 to 2 and from 2 to 1 only. Resume in stage {saved.stage}, or start anew with"
        " its weights: ds_frozen_patch.load_trainable(module, path)."
    )


def _offer(load_dir: str, saved: Saved, ranks: int) -> str:
    offer = " Pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1, and it is resharded by itself."
    return (
        f"The checkpoint was saved by {saved.ranks} ranks, and DeepSpeed cannot load it with {ranks}."
        + (offer if current().elastic is None else "")
        + f" To do it by hand: ds-frozen-patch reshard {load_dir} NEW --ranks {ranks}, and load NEW. For the same steps"
        " as before, keep ranks x batch size x accumulate_grad_batches."
    )


def _reshard(load: Load, saved: Saved, ranks: int) -> str:
    """Have it done once on each disk, and every rank raise what went wrong on one."""
    strategy, source = load.strategy, Path(load.source)
    made, failed = "", ""
    work = source.with_name(f"{WORK}{gather(uuid4().hex[:12])[0]}")
    disks = find_disks(strategy, None, work)
    if disks.publishers[strategy.global_rank] == strategy.global_rank:
        shutil.rmtree(work, ignore_errors=True)
        try:
            quiet, trust = not strategy.is_global_zero, not runs_nothing()
            made = reshard_inside(source, load.tag, ranks=ranks, quiet=quiet, trust=trust)
        except Exception as error:  # else the other ranks would wait for ever
            failed = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}."
    everyone = gather((made, failed))
    if texts := [text for _, text in everyone if text]:
        raise CheckpointError(
            f"{texts[0]} It was to be resharded from {saved.ranks} ranks to {ranks}, into a folder of its own"
            f" directory. To do it elsewhere: ds-frozen-patch reshard {source} NEW --ranks {ranks}"
        )
    folder: str = everyone[0][0]
    if strategy.is_global_zero:
        logger_of(strategy).info(
            "The checkpoint was saved by %d ranks; %d load it from %s/%s.", saved.ranks, ranks, source, folder
        )
    return folder


def carry_on(strategy: Any, engine: Any, loaded: Mapping[str, Any], client_state: Mapping[str, Any]) -> None:
    """Have Trainer go on as the ranks that saved would have: its count of batches, and the gradients' scale.

    Args:
        strategy: that loads.
        engine: its engine.
        loaded: of the checkpoint's state, `TO_REMEMBER`.
        client_state: what Lightning restores its loops from. Their count of batches is changed.

    Raises:
        CheckpointMismatchError: the checkpoint is from the midst of an epoch, and its place in the data cannot be told.
    """
    record = loaded[KEY] or {}
    before, ranks = record.get("world_size") or loaded["dp_world_size"], int(engine.dp_world_size)
    if getattr(strategy, "lightning_module", None) is None or (before == ranks and "loss_factor" not in record):
        return  # with Fabric, the program divides the loss and counts its batches
    config = loaded["ds_config"] or {}
    accumulated = int(config.get("gradient_accumulation_steps") or 1)
    now = int(engine.gradient_accumulation_steps())
    _scale_loss(engine, record.get("loss_factor", 1.0) * now / accumulated)
    if before == ranks:
        return
    of_a_step = before * int(config.get("train_micro_batch_size_per_gpu") or 1)
    of_a_step_now = ranks * int(engine.train_micro_batch_size_per_gpu())
    _count_batches(client_state, Fraction(of_a_step, of_a_step_now))
    if of_a_step * accumulated != of_a_step_now * now:
        warn(
            strategy,
            f"For each step of the optimizer the run had {of_a_step * accumulated} samples ({before} ranks x batch size"
            f" {of_a_step // before} x accumulate_grad_batches {accumulated}), and now it has {of_a_step_now * now}. To"
            " go on as it was, keep their product.",
        )


def _scale_loss(engine: Any, factor: float) -> None:
    if factor == 1 and engine not in _loss_factors:
        return
    if engine not in _loss_factors:
        backward = engine.backward
        engine.backward = lambda loss, *args, **kwargs: backward(loss * _loss_factors[engine], *args, **kwargs)
    _loss_factors[engine] = factor


def to_save(engine: Any) -> dict[str, Any]:
    """What a checkpoint must say for the gradients to keep their scale when it is loaded."""
    factor = _loss_factors.get(engine, 1.0)
    return {} if factor == 1 else {KEY: {"loss_factor": factor}}


def _count_batches(client_state: Mapping[str, Any], scale: Fraction) -> None:
    """Let Lightning's count of this epoch's batches be in the batches of the ranks that load."""
    loop = (client_state.get("loops") or {}).get("fit_loop") or {}
    progress = loop.get("epoch_loop.batch_progress") or {}
    current_ = progress.get("current")
    if not current_ or scale == 1:
        return
    ready = current_["ready"] * scale
    if not progress.get("is_last_batch") and ready:
        if ready.denominator != 1:
            raise CheckpointMismatchError(
                f"The checkpoint was saved in the midst of an epoch, after {current_['ready']} batches on each rank,"
                f" and that is {float(ready):g} of this run's. Resume with a number of ranks or a batch size that makes"
                " it whole, or from a checkpoint of an epoch's end."
            )
        if (loop.get("state_dict") or {}).get("combined_loader"):
            raise CheckpointMismatchError(
                "The checkpoint was saved in the midst of an epoch, and each rank's dataloader has a state of its own."
                " Resume with the same number of ranks and batch size, or from a checkpoint of an epoch's end."
            )
    shift = ceil(ready) - current_["ready"]
    for name, count in current_.items():
        current_[name] = count + shift

"""A load in another ZeRO stage, precision or world size than the save's: the checkpoint is resharded for it first.

So it is for other trained parameters (see `changed_parameters`).

The resharded files are in a temporary folder, and are removed after the load; the checkpoint stays as it is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from ..checkpoint.zero.labels import ELASTIC_KEY
from ..checkpoint.zero.states import FLAT_MASTERS, masters_key
from ..common.collectives import gather
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.owner import is_first
from ..engine.served import attached
from ..settings import current
from ..workarounds.for_deepspeed import has_plain_optimizer
from ..workarounds.old_deepspeed import ignores_round_robin
from . import changed_parameters
from .agreement import list_files
from .changed_parameters import Change
from .listing import Listing, Saved
from .running import Load

if TYPE_CHECKING:
    from ..checkpoint.zero.repartition import Target

NEEDED = (ELASTIC_KEY, "ds_config", "dp_world_size")
"""What `Owner.after_load` needs of the checkpoint's own state."""
_PRECISIONS = ("in bf16", "in fp16 or fp32")
_MASTERS = {"": "in fp32", "fp32_groups": "in 16 bits", FLAT_MASTERS: "in 16 bits with FusedAdam"}


@contextmanager
def resharded(load: Load, listing: Listing) -> Iterator[Listing]:
    """While this lasts, `load` is of a checkpoint that the engine can load: resharded, if need be.

    Every rank must call it.

    Yields:
        The listing of that checkpoint.

    Raises:
        CheckpointMismatchError: it cannot be loaded, or not without `patch(elastic=True)`.
        CheckpointError: the resharding failed.
    """
    is_needed = _needs_resharding(load, listing)
    # Rank 0's settings decide for all ranks; that they agree is checked afterwards.
    change = changed_parameters.find_change(load, listing, is_needed) if listing.trained else None
    if not is_needed and change is None:
        try:
            yield listing
        except (CheckpointError, CheckpointMismatchError):
            raise
        except Exception as error:
            served = attached(load.engine)
            if served is None or not (served.topology.is_divided and load.restores_optimizer and current().elastic):
                raise
            raise CheckpointMismatchError(
                f"{load.source} could not be loaded ({error}). With tensor parallelism, or experts of deepspeed.moe,"
                " patch(elastic=True) changes neither the world size nor the ZeRO stage. Resume with those of the save."
            ) from error
        return
    source, tag, scaling = load.source, load.tag, _loss_scaling(load.engine)
    folder, is_made_here = _reshard(load, listing, change)
    try:
        if change is not None:
            changed_parameters.begin(load, change)
        load.source, load.tag = str(folder), listing.tag
        yield list_files(load)
        gather(())  # no rank reads the files any more
    finally:
        load.source, load.tag = source, tag
        if is_made_here:
            shutil.rmtree(folder, ignore_errors=True)
    _keep_loss_scaling(load.engine, scaling)
    if change is not None:
        changed_parameters.finish(load, change)


def _needs_resharding(load: Load, listing: Listing) -> bool:
    engine, served, saved = load.engine, attached(load.engine), listing.saved
    if saved is None or served is None:
        return False  # `agreement.check` reports what is wrong
    stage, ranks = served.topology.stage, served.topology.ranks
    if not load.restores_optimizer:
        # Without an optimizer every rank reads all files, but DeepSpeed looks for one of its own.
        fits = stage < 3 or saved.stage < 3 or saved.ranks >= ranks
        if current().elastic:
            fits &= (saved.stage < 3 or stage == 3) and (saved.stage > 0 or stage < 3)
        before, now = [f"at world size {saved.ranks}"], [f"at {ranks}"]
    else:
        before, now = _differences(engine, saved, listing, stage, ranks)
        fits = not before
    if fits:
        return False
    if load.is_on_own_disks:
        raise CheckpointMismatchError(
            f"The checkpoint was saved {' '.join(before)} on disks of their own, and cannot be loaded {' '.join(now)}."
            " Copy the files of all nodes into one folder, and reshard that:"
            f" ds-frozen-patch reshard FOLDER NEW --stage {stage} --ranks {ranks}"
        )
    if not current().elastic:
        raise CheckpointMismatchError(_offer(load, saved, stage, ranks, before, now))
    return True


def _differences(engine: Any, saved: Saved, listing: Listing, stage: int, ranks: int) -> tuple[list[str], list[str]]:
    """In what the save and this run differ so that DeepSpeed cannot load the optimizer: then, and now."""
    is_plain = has_plain_optimizer(engine)
    if is_plain and not saved.in_parts:
        in_masters = masters_key(vars(engine.optimizer))
        if listing.masters in (None, in_masters):
            return [], []
        return [_MASTERS[listing.masters]], [_MASTERS[in_masters]]
    kinds = [
        3 if at == 3 else 0 if plain else 1 for at, plain in ((saved.stage, not saved.in_parts), (stage, is_plain))
    ]
    before, now = [], []
    if saved.ranks != ranks and not is_plain:
        before.append(f"at world size {saved.ranks}")
        now.append(f"at {ranks}")
    if kinds[0] != kinds[1]:
        before.append(f"in ZeRO stage {saved.stage}")
        now.append(f"in stage {stage}")
    has_gaps = any(map(any, getattr(engine.optimizer, "round_robin_bit16_padding", ())))
    if kinds == [1, 1] and listing.has_gaps != has_gaps:
        words = "without zero_optimization.parameter_alignment", "with it"
        before.append(words[listing.has_gaps])
        now.append(words[has_gaps])
    if kinds[0] and kinds[1] and listing.optimizer[0].startswith("bf16_") != engine.bfloat16_enabled():
        before.append(_PRECISIONS[engine.bfloat16_enabled()])
        now.append(_PRECISIONS[not engine.bfloat16_enabled()])
    return before, now


def _offer(load: Load, saved: Saved, stage: int, ranks: int, before: list[str], now: list[str]) -> str:
    offer = " Pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1 to reshard it automatically."
    options = f"--ranks {ranks}" if saved.stage == stage else f"--stage {stage} --ranks {ranks}"
    precision = _precision(load.engine) if now[-1] in _PRECISIONS else None
    if precision is not None:
        options += f" --precision {precision}"
    by_hand = f" To reshard it by hand: ds-frozen-patch reshard {load.source} NEW {options}, then load NEW."
    return (
        f"The checkpoint was saved {' '.join(before)}, and DeepSpeed cannot load it {' '.join(now)}."
        + (offer if current().elastic is None else "")
        + (by_hand if precision != "fp16" else "")  # which `reshard` does not write
        + (
            " For the same optimizer steps as before, keep world size x batch size x accumulate_grad_batches."
            if saved.ranks != ranks
            else ""
        )
    )


def _precision(engine: Any) -> str:
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def _target(engine: Any, stage: int, ranks: int, change: Change | None) -> Target:
    """What an engine loads."""
    from deepspeed import __version__

    from ..checkpoint.zero.repartition import Target
    from ..checkpoint.zero.trained import BASE_STATE

    is_plain = has_plain_optimizer(engine)
    stage = 0 if is_plain else stage or 1  # DeepSpeed's BF16_Optimizer is as ZeRO-1 in stage 0
    in_masters = masters_key(vars(engine.optimizer)) if is_plain else ""
    optimizer = {**engine.optimizer.state_dict(), BASE_STATE[3]: None, in_masters: None} if in_masters else {}
    round_robin = bool(engine.zero_round_robin_gradients()) and not ignores_round_robin(__version__, stage)
    has_state = not current().restart_optimizer
    selection = None if change is None else changed_parameters.selection_of(change, engine)
    size = engine.zero_sub_group_size()
    return Target(ranks, stage, _precision(engine), size, round_robin, has_state, selection, optimizer)


def _reshard(load: Load, listing: Listing, change: Change | None) -> tuple[Path, bool]:
    """Reshard once on each disk, and raise an error of one rank on all.

    Returns:
        The folder, and whether this rank has made it.
    """
    from ..tools.reshard import reshard_for_load

    owner, source = load.owner, Path(load.source)
    (name, *_) = gather(f"ds_frozen_patch-{token_hex(8)}")
    folder, error, is_made_here = Path(tempfile.gettempdir(), name), "", False
    served, saved = attached(load.engine), listing.saved
    assert served is not None
    assert saved is not None
    target = _target(load.engine, served.topology.stage, served.topology.ranks, change)
    fresh: Iterator[tuple[str, Any]] = iter(())
    try:
        folder.mkdir(mode=0o700)
        is_made_here = True
    except FileExistsError:  # by another rank with the same disk
        pass
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}."
    if change is not None:
        fresh = changed_parameters.values_of_fresh(change, load.engine, is_made_here)
    try:
        if is_made_here:
            reshard_for_load(source, listing.tag, folder, target, fresh)
    except Exception as failure:  # the other ranks wait for this one
        error = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}."
    for _ in fresh:  # the ranks gather these together, also if one of them has failed
        pass
    if errors := [text for text in gather(error) if text]:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"{errors[0]} The checkpoint was to be resharded from world size {saved.ranks} to {target.ranks}, into a"
            f" folder in {folder.parent}. To use another disk, set TMPDIR."
            + (
                f" To do it once: ds-frozen-patch reshard {source} NEW --stage {target.stage} --ranks {target.ranks}"
                if change is None
                else ""
            )
        )
    if is_first(owner):
        owner.logger.info(
            "The checkpoint was saved in ZeRO stage %d at world size %d; it was resharded for stage %d at %d.",
            saved.stage,
            saved.ranks,
            target.stage,
            target.ranks,
        )
    return folder, is_made_here


def _loss_scaling(engine: Any) -> tuple[Any, Any]:
    return getattr(engine.optimizer, "loss_scaler", None), getattr(engine.optimizer, "dynamic_loss_scale", None)


def _keep_loss_scaling(engine: Any, before: tuple[Any, Any]) -> None:
    """Keep the run's own scaler of losses in fp16, if the checkpoint is of a run that did not scale them."""
    if before[1] and not engine.optimizer.dynamic_loss_scale:
        engine.optimizer.loss_scaler, engine.optimizer.dynamic_loss_scale = before

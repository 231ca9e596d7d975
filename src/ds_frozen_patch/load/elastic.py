"""A load at another world size than the save's: the checkpoint is resharded once, and the run goes on."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.zero.labels import ELASTIC_KEY
from ..common.collectives import gather
from ..common.errors import CheckpointError, CheckpointMismatchError
from ..engine.owner import is_first
from ..engine.served import attached
from ..settings import current
from ..workarounds.for_deepspeed import has_plain_optimizer
from .listing import Listing, Saved
from .running import Load

NEEDED = (ELASTIC_KEY, "ds_config", "dp_world_size")
"""What `Owner.after_load` needs of the checkpoint's own state."""


def resharded(load: Load, listing: Listing) -> str | None:
    """Reshard a checkpoint that cannot be loaded at this world size; every rank must call it.

    Returns:
        The tag of the resharded checkpoint, or None if there is no need.

    Raises:
        CheckpointMismatchError: it cannot be loaded, or not without `patch(elastic=True)`.
        CheckpointError: the resharding failed.
    """
    engine, known, saved = load.engine, attached(load.engine), listing.saved
    if saved is None or known is None:
        return None  # `Load.check` reports what is wrong
    stage, ranks = known.topology.stage, known.topology.ranks
    if load.restores_optimizer and not has_plain_optimizer(engine):
        _check_stages(saved, stage)
        fits = saved.ranks == ranks
    else:
        # Without an optimizer every rank reads all files, but DeepSpeed looks for one of its own.
        fits = stage < 3 or saved.stage < 3 or saved.ranks >= ranks
    if fits:
        return None
    if load.is_on_own_disks:
        raise CheckpointMismatchError(
            f"The checkpoint was saved at world size {saved.ranks} on disks of their own, and cannot be loaded at"
            f" {ranks}. Copy the files of all nodes into one folder, and reshard that:"
            f" ds-frozen-patch reshard FOLDER NEW --ranks {ranks}"
        )
    if not current().elastic:
        raise CheckpointMismatchError(_offer(load.source, saved, ranks))
    return _reshard(load, saved, ranks)


def _check_stages(saved: Saved, stage: int) -> None:
    if saved.in_parts and (saved.stage == 3) == (stage == 3):
        return
    raise CheckpointMismatchError(
        f"The checkpoint was saved in ZeRO stage {saved.stage}, and its optimizer cannot be loaded in stage {stage}:"
        f" that works only between stages 1 and 2. Resume in stage {saved.stage}, or start a new run from its weights:"
        " ds_frozen_patch.load_trainable(module, path)."
    )


def _offer(load_dir: str, saved: Saved, ranks: int) -> str:
    offer = " Pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1 to reshard it automatically."
    return (
        f"The checkpoint was saved at world size {saved.ranks}, and DeepSpeed cannot load it at {ranks}."
        + (offer if current().elastic is None else "")
        + f" To reshard it by hand: ds-frozen-patch reshard {load_dir} NEW --ranks {ranks}, then load NEW. For the same"
        " optimizer steps as before, keep world size x batch size x accumulate_grad_batches."
    )


def _reshard(load: Load, saved: Saved, ranks: int) -> str:
    """Reshard once, and raise an error of rank 0 on all."""
    from ..tools.reshard import reshard_inside

    owner, source = load.owner, Path(load.source)
    folder, error = "", ""
    if is_first(owner):
        try:
            folder = reshard_inside(source, load.tag, ranks=ranks, quiet=False)
        except Exception as failure:  # the other ranks wait for this one
            error = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}."
    everyone = gather((folder, error))
    if errors := [text for _, text in everyone if text]:
        raise CheckpointError(
            f"{errors[0]} The checkpoint was to be resharded from world size {saved.ranks} to {ranks}, into a folder of"
            f" its own directory. To do it elsewhere: ds-frozen-patch reshard {source} NEW --ranks {ranks}"
        )
    made: str = everyone[0][0]
    if is_first(owner):
        owner.logger.info(
            "The checkpoint was saved at world size %d; it is loaded at %d from %s/%s.",
            saved.ranks,
            ranks,
            source,
            made,
        )
    return made

"""Whether the base is the one that a checkpoint was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.errors import CheckpointMismatchError, named
from ..common.files import RECORD
from ..engine.owner import warn
from ..parameters import ModuleTensor
from ..record import KEY, UNKNOWN, LeftOut, Record
from ..settings import current
from .running import Load
from .strictness import check_left_out, left_out_by_others

_FLOATING = {"float64", "float32", "float16", "bfloat16"}
_LOST = (
    "{} has no {} beside its files, so it cannot be verified that they are the ones that were saved, nor that the base"
    " is the one that it was trained on. Copy that file too."
)


def check_base(
    checkpoint: Mapping[str, Any],
    record: Record | None,
    module: Any,
    held: Mapping[str, ModuleTensor],
    load: Load,
    *,
    strict: bool,
    place: object,
) -> frozenset[str]:
    """Check the base of a module; every rank must call it.

    Args:
        checkpoint: has the module's state dict as "module".
        record: of the checkpoint, or None.
        module: that is loaded into.
        held: its contents, by all names.
        load: the running load.
        strict: whether everything that was left out must be there.
        place: of the checkpoint, for messages.

    Returns:
        The names that may be missing from the state dict.

    Raises:
        CheckpointMismatchError: the base is not the one that the checkpoint was saved with.
    """
    if record is None or record.kind == UNKNOWN:
        may_be_missing = left_out_by_others(checkpoint, module)
        if record is None and KEY in checkpoint:
            warn(load.owner, _LOST.format(place, RECORD))
        elif may_be_missing:
            warn(load.owner, f"{place} has no frozen parameters and no record of them: its base cannot be verified.")
        return may_be_missing
    if strict:
        check_left_out(record, held, load)
    how = current().verify_base
    if how == "off" or not record.left_out:
        return record.names
    # By all names, because what was tied at the save need not be tied now. The first of tied names counts.
    pairs = {held[name]: (name, saved) for saved in record.left_out for name in reversed(saved.names) if name in held}
    differ, unread = _compare(pairs, load)
    if unread:
        warn(
            load.owner,
            f"{len(unread)} of {len(pairs)} left-out parameters cannot be compared with the base that the"
            " checkpoint was saved with, because they have another dtype now, are quantized, or are on NVMe:"
            f" {named(unread)}",
        )
    if not differ:
        return record.names
    message = "\n".join(
        [
            f"The base is not the one that the checkpoint was saved with: {len(differ)} of {len(pairs)}"
            " left-out parameters have other fingerprints.",
            *differ[:10],
            *([f"- and {len(differ) - 10} more"] if len(differ) > 10 else []),
            "Usual causes: another base model or revision, another seed, or none where the program draws frozen values"
            " at random; an initialization of PEFT's that rewrites the base (init_lora_weights: pissa, olora, corda,"
            " loftq, lora_ga), a merged adapter, a re-initialised layer, other quantization settings, weights that"
            " the program changed after building them. Build the base as in the run that saved"
            ' the checkpoint, or continue anyway with patch(verify_base="warn") or DS_FROZEN_PATCH_VERIFY_BASE=warn.',
        ]
    )
    if how == "error":
        raise CheckpointMismatchError(message)
    warn(load.owner, message)
    return record.names


def _compare(pairs: Mapping[ModuleTensor, tuple[str, LeftOut]], load: Load) -> tuple[list[str], list[str]]:
    """One line for each parameter that differs, and the names of those that cannot be compared.

    Args:
        pairs: by what the module holds: its name, and what was left out under that name.
        load: the running load.
    """
    comparable = [entry for entry, (_, saved) in pairs.items() if saved.fingerprint and saved.dtype == entry.dtype]
    prints = load.base.fingerprints_now(comparable, load.base_is_known and not load.starts_fresh)
    print_of = dict(zip(comparable, prints, strict=True))
    differ, unread = [], []
    for entry, (name, saved) in pairs.items():
        now = print_of.get(entry)
        if saved.dtype != entry.dtype and not {saved.dtype, entry.dtype} <= _FLOATING:  # else it may be rounded
            differ.append(f"- {name}: saved as {saved.dtype}, now {entry.dtype}")
        elif now is None:
            unread.append(name)
        elif now != saved.fingerprint:
            differ.append(f"- {name}: saved {saved.fingerprint}, now {now}")
    return differ, unread

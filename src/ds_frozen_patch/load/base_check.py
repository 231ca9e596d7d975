"""Whether the base is the one that a checkpoint was saved with."""

from __future__ import annotations

from collections.abc import Mapping

from ..common.errors import CheckpointMismatchError, named
from ..engine.owner import warn
from ..fingerprint import fingerprints, process_memory
from ..manifest import LeftOut, Manifest
from ..parameters import Held
from ..settings import current
from .load import Load

_FLOATING = ("float64", "float32", "float16", "bfloat16")


def verify_base(manifest: Manifest, held: Mapping[str, Held], load: Load) -> None:
    """What was left out must have the content that it had at the save, as the fingerprints tell.

    Args:
        manifest: says what was left out.
        held: what the module holds now, by all names.
        load: that this is done for.
    """
    how = current().verify_base
    if how == "off":
        return
    # By all names, because what was tied at the save need not be tied now; of tied ones the first name counts.
    pairs = {held[name]: (name, saved) for saved in manifest.left_out for name in reversed(saved.names) if name in held}
    comparable = [one for one, (_, saved) in pairs.items() if saved.fingerprint and saved.dtype == one.dtype]
    engine = load.engine
    prints = fingerprints(
        [one.tensor for one in comparable], engine.device, process_memory(), all_known=load.base_is_known
    )
    found = dict(zip(comparable, prints, strict=True))
    differ = [
        f"- {pairs[one][0]}: saved {pairs[one][1].fingerprint}, now {content}"
        for one, content in found.items()
        if content and content != pairs[one][1].fingerprint
    ]
    differ += [
        f"- {name}: saved as {saved.dtype}, now {one.dtype}"
        for one, (name, saved) in pairs.items()
        if saved.dtype != one.dtype and not _is_rounded(saved, one)
    ]
    unread = [
        name
        for one, (name, saved) in pairs.items()
        if found.get(one) is None and (saved.dtype == one.dtype or _is_rounded(saved, one))
    ]
    if unread:
        warn(
            load.owner,
            f"{len(unread)} of {len(pairs)} left-out parameters cannot be compared with the base that the"
            f" checkpoint was saved with, for they are of another dtype now, quantized, or on NVMe: {named(unread)}",
        )
    if not differ:
        return
    message = "\n".join(
        [
            f"The base is not the one that the checkpoint was saved with: {len(differ)} of {len(pairs)}"
            " left-out parameters have another content (by fingerprint).",
            *differ[:10],
            *([f"- and {len(differ) - 10} more"] if len(differ) > 10 else []),
            "What usually causes it: another base model or revision, another seed, a layer that was initialised anew,"
            " other settings of quantization, weights that the program changed after it had built them. Build the base"
            ' as the run that saved did, or go on all the same with patch(verify_base="warn") or'
            " DS_FROZEN_PATCH_VERIFY_BASE=warn.",
        ]
    )
    if how == "error":
        raise CheckpointMismatchError(message)
    warn(load.owner, message)


def _is_rounded(saved: LeftOut, now: Held) -> bool:
    """Whether a base may be the one that was saved with, in another precision."""
    return saved.dtype in _FLOATING and now.dtype in _FLOATING

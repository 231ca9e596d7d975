"""What a checkpoint may lack: what was left out of it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checkpoint.zero.partitions import SUB_GROUP_SIZE
from ..checkpoint.zero.states import masters_key, zero_config
from ..common.errors import CheckpointMismatchError, named
from ..common.files import RECORD
from ..engine.served import warn
from ..internals import groups_to_save, has_experts, has_plain_optimizer
from ..parameters import PARAMETER, PART, ModuleTensor, plain, with_adapters
from ..record import KEY, UNKNOWN, LeftOut, Record
from ..settings import current
from .running import Load


def _offer(load: Load) -> str:
    """What an error suggests, if the load restores the optimizer and the program does not forbid it."""
    if not load.restores_optimizer or current().elastic is not None:
        return ""
    return (
        " Pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1 to resume with other trained parameters: what was"
        " trained is restored by name, and the others start with a fresh optimizer state."
    )


LISTED = "excluded_parameters"
"""Where a Lightning with our patches lists, in a checkpoint, the frozen parameters that it has left out."""


def check_left_out(load: Load, record: Record) -> None:
    """Check that the module has everything that was left out: frozen, and in the same shape.

    Raises:
        CheckpointMismatchError: it does not.
    """
    held, gone, quantized = load.held, list[str](), list[str]()
    trained, reshaped = [], []
    for entry in record.left_out:
        for name in entry.names:
            now = held.get(name)
            if now is None:
                (quantized if entry.kind == PART else gone).append(name)
            elif entry.kind == PARAMETER and not now.is_frozen and now.name not in load.starts_fresh:
                trained.append(name)
            elif now.shape != entry.shape:
                reshaped.append(f"{name}: saved {list(entry.shape)}, now {list(now.shape)}")
    problems = []
    if gone:
        problems.append(
            f"The checkpoint left out parameters that the model does not have: {named(gone)}."
            " Build the model as in the run that saved it."
            + (_offer(load) if any(with_adapters(name, held) in held for name in gone) else "")
        )
    if quantized and not gone:
        problems.append(
            f"The base is not quantized as it was at the save: the model has no {named(quantized)}."
            " Quantize it as in the run that saved the checkpoint."
        )
    if trained:
        problems.append(
            f"The checkpoint left out parameters that the model now trains: {named(trained)}. Their values are in no"
            " checkpoint: freeze them again, or resume from a checkpoint saved while they were trainable."
            + _offer(load)
        )
    if reshaped:
        problems.append(
            f"Left-out parameters have another shape now: {named(reshaped)}."
            " Build the model as in the run that saved it."
        )
    if problems:
        raise CheckpointMismatchError("\n".join(problems))


def left_out_by_others(load: Load, checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """The names that may be missing from a checkpoint without a record: all frozen ones if all of them are, or none.

    A Lightning with our patches lists them. DeepSpeed's own flag does not leave out the alias of a tied parameter, so
    the first name counts. A save of ours, whose record is lost, leaves out parts and buffers too, and keeps what no
    program builds again.
    """
    saved, now = {plain(name) for name in checkpoint["module"]}, load.base
    if KEY in checkpoint:
        return frozenset(name for entry in now.frozen for name in entry.names) - saved
    names_of_frozen = [names for parameter, names in now.contents.names.items() if not parameter.requires_grad]
    if isinstance(listed := checkpoint.get(LISTED), list):
        return frozenset(name for names in names_of_frozen for name in names).intersection(map(plain, listed))
    if checkpoint.get("frozen_param_shapes") is not None:
        return frozenset()  # it is full, with or without frozen parameters; DeepSpeed says so from ZeRO-2 on
    if any(names[0] in saved for names in names_of_frozen):
        return frozenset()
    return frozenset(name for names in names_of_frozen for name in names)


def saved_elsewhere(load: Load, checkpoint: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a module's own `state_dict` leaves out: those among the fragments, and in partitions alone."""
    in_state = frozenset(map(plain, checkpoint["module"]))
    fragments = frozenset(map(plain, checkpoint.get("frozen_param_fragments") or {})) - in_state
    is_partitioned = checkpoint.get("optimizer") is None  # else all of the optimizer is here, as in stage 0
    groups = (is_partitioned and checkpoint.get("param_shapes")) or ()
    partitioned = frozenset(plain(name) for group in groups for name in group) - in_state - fragments
    if not partitioned:
        return fragments, partitioned  # as a rule
    now = load.base.contents
    in_state_now = now.names_in_state
    lacking = [names for parameter, names in now.names.items() if parameter not in in_state_now]
    return fragments, partitioned.intersection(name for names in lacking for name in names)


@contextmanager
def forgiving(load: Load, missing: frozenset[str], parts: Mapping[str, Any]) -> Iterator[None]:
    """While this lasts, a strict load accepts these missing keys and these unexpected keys (`parts`), and no others.

    A quantized layer may save parts that it does not load, and may save its weight under another name.
    """
    contents = load.base.contents
    frozen = [names for parameter, names in contents.names.items() if not parameter.requires_grad]
    missing = missing | {name for names in frozen for name in names if name not in contents.state}

    def forgive(_: Any, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if plain(name) not in missing]
        incompatible.unexpected_keys[:] = [name for name in incompatible.unexpected_keys if plain(name) not in parts]

    handle = load.engine.module.register_load_state_dict_post_hook(forgive)
    try:
        yield
    finally:
        handle.remove()


def check_optimizer(load: Load, checkpoint: Mapping[str, Any]) -> None:
    """Check that the optimizer's state is there, and of the parameters that the optimizer has now.

    DeepSpeed compares only the total size of ZeRO's flat partitions, and torch the number of parameters; in ZeRO-3 the
    module's state dict has placeholders. So parameters of other shapes would silently get the wrong values.

    Raises:
        CheckpointMismatchError: it is not.
    """
    engine = load.engine
    is_plain, saved_optimizer = has_plain_optimizer(engine), checkpoint.get("optimizer")
    # With experts, it is in files of its own, of each rank that has some.
    if not load.restarts and is_plain and saved_optimizer is None and not has_experts(engine):
        raise CheckpointMismatchError(
            f"The checkpoint, saved with deepspeed {checkpoint.get('ds_version', '(unknown)')}, has no state for the"
            " optimizer of this run: in bf16 with ZeRO stage 0, some releases of DeepSpeed save none, or one of another"
            " kind. Resume with the release that saved it, if it was saved under patch(), or start a new run in ZeRO"
            " stage 1."
        )
    if is_plain and saved_optimizer and masters_key(saved_optimizer) != masters_key(vars(engine.optimizer)):
        raise CheckpointMismatchError(
            "The checkpoint's optimizer has its fp32 masters in another format than this run's: in ZeRO stage 0, fp32"
            " has none, and 16 bits have others with FusedAdam. Resume with the precision and the optimizer of the run"
            " that saved it."
            + (" Or pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1." if current().elastic is None else "")
        )
    saved_groups = checkpoint.get("param_shapes")
    if not saved_groups or not hasattr(engine.optimizer, "load_state_dict"):
        return
    now_groups = groups_to_save(engine)
    if is_plain and not now_groups:
        return
    saved_groups, now_groups = (
        [{plain(name): tuple(shape) for name, shape in group.items()} for group in groups]
        for groups in (saved_groups, now_groups)
    )
    saved = {name: shape for group in saved_groups for name, shape in group.items()}
    now = {name: shape for group in now_groups for name, shape in group.items()}
    problems = []
    if absent := saved.keys() - now.keys():
        problems.append(f"trained in the checkpoint, but frozen or gone in the model: {named(absent)}")
    if new := now.keys() - saved.keys():
        problems.append(f"trained by the model, but missing from the checkpoint: {named(new)}")
    if reshaped := [
        f"{name}: saved {list(saved[name])}, now {list(now[name])}"
        for name in saved.keys() & now.keys()
        if saved[name] != now[name]
    ]:
        problems.append(f"in another shape: {named(reshaped)}")
    if not problems and [list(group) for group in saved_groups] != [list(group) for group in now_groups]:
        sizes = zero_config(checkpoint).get("sub_group_size", SUB_GROUP_SIZE), engine.zero_sub_group_size()
        problems.append(
            f"in other sub-groups: zero_optimization.sub_group_size was {sizes[0]} at the save, and is {sizes[1]} now"
            if engine.zero_optimization_partition_weights() and sizes[0] != sizes[1]
            else "in another order, or in other parameter groups, than at the save"
        )
    if problems:
        raise CheckpointMismatchError(
            "The checkpoint's trainable parameters are not the model's:\n"
            + "\n".join(f"- {problem}" for problem in problems)
            + "\nBuild the model and its optimizer as in the run that saved it."
            + _offer(load)
        )


_FLOATING = {"float64", "float32", "float16", "bfloat16"}
_LOST = (
    "{} has no {} beside its files, so it cannot be verified that they are the ones that were saved, nor that the base"
    " is the one that it was trained on. Copy that file too."
)


def check_base(load: Load, checkpoint: Mapping[str, Any], strict: bool) -> frozenset[str]:
    """Check the base of the engine's module; every rank must call it.

    Args:
        load: the running load.
        checkpoint: has the module's state dict as "module"; not needed with a record.
        strict: whether everything that was left out must be there.

    Returns:
        The names that may be missing from the state dict.

    Raises:
        CheckpointMismatchError: the base is not the one that the checkpoint was saved with.
    """
    record, held = load.record, load.held
    if record is None or record.kind == UNKNOWN:
        may_be_missing = left_out_by_others(load, checkpoint)
        if record is None and KEY in checkpoint:
            warn(load.owner, _LOST.format(load.source, RECORD))
        elif may_be_missing:
            warn(
                load.owner,
                f"{load.source} has no frozen parameters and no record of them: its base cannot be verified.",
            )
        return may_be_missing
    if strict:
        check_left_out(load, record)
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

"""`save_weights_only=True`: one ordinary Lightning checkpoint, saved from a running engine and loaded into one."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.errors import CheckpointMismatchError, named
from ..engine.gathering import gathered
from ..load.load import Load
from ..load.loading import check_left_out, forget_second_copies, left_out_by_others, verify_base
from ..load.quantized import by_name, check_parts, is_part, without_what_is_there
from ..load.trust import look
from ..manifest import KEY, Manifest
from ..parameters import names_by_parameter, plain
from .save import Save
from .saving import leave_out, logger_of, warn


def is_weights_only(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Trainer has dumped this with `weights_only=True`; else it has the optimizers' states."""
    return "state_dict" in checkpoint and "optimizer_states" not in checkpoint


def save(save: Save, checkpoint: Mapping[str, Any], storage_options: Any = None) -> None:
    """Write the weights of a run, and what Lightning has put beside them, into one file on each disk.

    In ZeRO-3 one parameter after another is gathered, and none that is left out; the ranks that write keep them, on the
    CPU.
    """
    strategy = save.strategy
    module, writer = strategy.lightning_module, strategy.checkpoint_io
    # Writers of other kinds may be remote, or not be done yet when they return.
    save.is_in_place = type(writer).__name__ != "TorchCheckpointIO"
    if not save.is_in_place:
        save.begin()
    writes = save.publishes
    manifest = leave_out(save) if save.left_out is not None else None
    left_out = manifest.names if manifest else frozenset()
    # A module may have a `state_dict` of its own that gives less than all.
    dumped = {name: value for name, value in checkpoint["state_dict"].items() if plain(name) not in left_out}
    parameters = {p: [n for n in names if n in dumped] for p, names in names_by_parameter(module).items()}
    firsts = {names[0]: parameter for parameter, names in parameters.items() if names}
    aliases = {names[0]: names for names in parameters.values() if names}
    for name, value in gathered(firsts, writes):
        dumped.update(dict.fromkeys(aliases[name], value))
    if writes:
        with save.put_off(save.target):
            dumped = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in dumped.items()}
            told = {KEY: manifest.to_state()} if manifest else {}
            content = {**checkpoint, "state_dict": dumped, **told}
            file = save.target if save.is_in_place else save.new
            writer.save_checkpoint(content, file, storage_options=storage_options)
    save.meet() if save.is_in_place else save.publish()


def read(strategy: Any, file: Path, **options: Any) -> dict[str, Any] | None:
    """The content of a single file that Lightning has saved, or None if it is none."""
    if not zipfile.is_zipfile(file):  # as those of torch.save are
        return None
    look(file)
    content = strategy.checkpoint_io.load_checkpoint(file, **options)
    return dict(content) if isinstance(content, Mapping) and "state_dict" in content else None


def load(load: Load, file: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Put the weights of a single file into a running engine, and give Trainer the rest of it.

    A fit starts anew from them: its optimizer, schedulers and loops are as they are without a checkpoint.

    Raises:
        CheckpointMismatchError: the weights, or the base that they were trained on, are not the module's.
    """
    strategy = load.strategy
    module, engine = strategy.lightning_module, strategy.model
    weights = {plain(name): value for name, value in checkpoint.pop("state_dict").items()}
    manifest, held = Manifest.from_checkpoint(checkpoint), by_name(module)
    _check(load, module, weights, manifest, file)
    checkpoint.pop(KEY, None)
    _put(module, without_what_is_there(weights, held, manifest, load))
    forget_second_copies(engine)
    if module.trainer.state.fn != "fit":
        return checkpoint
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
        _put_masters(module, weights)
    checkpoint.pop("loops", None)
    logger_of(strategy).info(
        "Training starts from the weights in %s, which holds nothing else: the optimizer, the schedulers and the count"
        " of steps are new.",
        file,
    )
    return {**checkpoint, "lr_schedulers": [item.scheduler.state_dict() for item in strategy.lr_scheduler_configs]}


def _check(load: Load, module: Any, weights: Mapping[str, Any], manifest: Manifest | None, file: Path) -> None:
    strategy, held = load.strategy, by_name(module)
    strict = getattr(module, "strict_loading", True)  # Lightning 2.0 and 2.1 are always strict
    if manifest is not None:
        if strict:
            check_left_out(manifest, held)
        verify_base(manifest, held, load)
        may_be_missing = manifest.names
    else:
        may_be_missing = left_out_by_others({"module": weights}, module)
        if may_be_missing:
            warn(strategy, f"{file} has no frozen parameters and no manifest: its base cannot be verified.")
    check_parts({name: value for name, value in weights.items() if is_part(held.get(name))}, held, load)
    now = {plain(name) for name in module.state_dict()}
    reshaped = [n for n, value in weights.items() if n in held and tuple(value.shape) != held[n].shape]
    problems = {"has another shape of": reshaped}
    if strict:
        problems["lacks"] = list(now - weights.keys() - may_be_missing)
        problems["has what the module has not:"] = list(weights.keys() - now)
    wrong = [f"it {what} {named(names)}" for what, names in problems.items() if names]
    if wrong:
        raise CheckpointMismatchError(f"{file} does not belong to this module: {'; '.join(wrong)}.")


def _put(module: Any, weights: Mapping[str, Any]) -> None:
    import torch
    from deepspeed import zero

    with torch.no_grad():
        for parameter, names in names_by_parameter(module).items():
            value = next((weights[name] for name in names if name in weights), None)
            if value is not None:
                with zero.GatheredParameters([parameter], modifier_rank=0):
                    if parameter.shape == value.shape:  # else this rank does not gather
                        parameter.copy_(value)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if plain(name) in weights:
                buffer.copy_(weights[plain(name)])


def _put_masters(module: Any, weights: Mapping[str, Any]) -> None:
    """Where a file has more than the model's precision, the optimizer's masters take it all."""
    import torch
    from deepspeed import utils

    put = getattr(utils, "safe_set_full_fp32_param", None)
    for parameter, names in names_by_parameter(module).items():
        value = next((weights[name] for name in names if name in weights), None)
        if put and value is not None and parameter.requires_grad and parameter.dtype != value.dtype == torch.float32:
            put(parameter, value.to(parameter.device))

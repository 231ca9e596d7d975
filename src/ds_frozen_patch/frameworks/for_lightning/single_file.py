"""`save_weights_only=True`: one ordinary Lightning checkpoint, saved from a running engine and loaded into one."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...checkpoint.names import WEIGHTS_FILE, remove_states
from ...common.errors import CheckpointMismatchError, named
from ...core.save import publish
from ...engine.gathering import gathered, put
from ...engine.origins import replacing
from ...engine.owner import is_first, warn
from ...load.base_check import check_base
from ...load.quantized import check_parts, is_part, without_own_values
from ...load.running import Load
from ...load.trust import refuse_unsafe
from ...manifest import KEY, Manifest
from ...parameters import Contents, plain
from ...publish.durable import exchange, sync_folder
from ...publish.ways import Way
from ...publish.work_folder import WORK
from ...save.agreement import agree_on_end
from ...save.leaving_out import describe
from ...save.running import Save
from ...workarounds.for_deepspeed import forget_second_copies


def is_weights_only(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Trainer has dumped this with `weights_only=True`; else it has the optimizers' states."""
    return "state_dict" in checkpoint and "optimizer_states" not in checkpoint


def place_of(path: Path) -> Path:
    """Where to write a single file for a path: in the folder of that name, if there is one, and through links."""
    return path / WEIGHTS_FILE if os.path.isdir(path) else Path(os.path.realpath(path))  # noqa: PTH112  -- it never raises


def file_in(path: Path) -> Path:
    """The single file in a folder, if it is newer than the folder's checkpoint; else the path."""
    return path / WEIGHTS_FILE if not (path / "latest").is_file() and (path / WEIGHTS_FILE).is_file() else path


def make_way(path: Path) -> None:
    """Move a single file that Lightning has saved into a folder of its name, since an engine saves to a folder.

    It stays what is loaded from the path until a checkpoint is there.
    """
    if not path.is_file() or not _is_single_file(path):
        return  # DeepSpeed says what is wrong
    file = Path(os.path.realpath(path))
    folder = file.with_name(f"{WORK}{uuid4().hex[:12]}")
    folder.mkdir()
    try:
        shutil.copy2(file, folder / WEIGHTS_FILE)
        if not exchange(folder, file):
            file.unlink()
            folder.rename(file)
    finally:
        folder.unlink() if folder.is_file() else shutil.rmtree(folder, ignore_errors=True)


def remove_from(folder: Path) -> None:
    """Remove the single file that a checkpoint in a folder has replaced."""
    with suppress(OSError):  # it is not loaded, where `latest` is
        if (folder / WEIGHTS_FILE).is_file() and (folder / "latest").is_file():
            (folder / WEIGHTS_FILE).unlink()


def _is_single_file(path: Path) -> bool:
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(b"pytorch-lightning_version" in archive.read(name) for name in pickles)
    return False


def save(save: Save, strategy: Any, checkpoint: Mapping[str, Any], storage_options: Any = None) -> None:
    """Write the weights of a run, and what Lightning saves beside them, into one file on each disk.

    In ZeRO-3, parameters are gathered one after another, except those that are left out. The ranks that write keep them
    in CPU memory.
    """
    module, writer = strategy.lightning_module, strategy.checkpoint_io
    writes = save.publishes or (save.place.way is Way.UNMANAGED and is_first(save.owner))
    manifest = describe(save) if save.left_out is not None else None
    left_out = manifest.names if manifest else frozenset()
    # A module's own `state_dict` may return only a part, and use other names.
    dumped = {name: value for name, value in checkpoint["state_dict"].items() if plain(name) not in left_out}
    parameters = {p: [n for n in names if n in dumped] for p, names in Contents(module).names_in_state.items()}
    firsts = {names[0]: parameter for parameter, names in parameters.items() if names}
    aliases = {names[0]: names for names in parameters.values() if names}
    for name, value in gathered(firsts, writes):
        dumped.update(dict.fromkeys(aliases[name], value))
    if save.engine.zero_optimization_partition_weights():
        gathered_names = {name for names in aliases.values() for name in names}
        placeholders = [name for name, value in dumped.items() if name not in gathered_names and _is_empty(value)]
        dumped.update(_from_whole_module(module, left_out, placeholders, writes))
    if writes:
        with save.failures.deferred(save.place.target):
            dumped = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in dumped.items()}
            ours = {KEY: manifest.to_state()} if manifest else {}
            content = {**checkpoint, "state_dict": dumped, **ours}
            writer.save_checkpoint(content, save.place.destination, storage_options=storage_options)
    agree_on_end(save) if save.place.way is Way.UNMANAGED else publish(save)
    if writes and save.place.target.name == WEIGHTS_FILE:  # what it replaces
        (save.place.folder / "latest").unlink(missing_ok=True)
        sync_folder(save.place.folder)
        remove_states(save.place.folder / "checkpoint")


def _is_empty(value: Any) -> bool:
    return hasattr(value, "numel") and value.numel() == 0


def _from_whole_module(module: Any, left_out: frozenset[str], names: Collection[str], writes: bool) -> dict[str, Any]:
    """What a `state_dict` of the module's own makes of its parameters, all of which it needs at once."""
    from deepspeed import zero

    if not names:
        return {}
    parameters = [p for p, aliases in Contents(module).names.items() if left_out.isdisjoint(aliases)]
    with zero.GatheredParameters(parameters):
        state = module.state_dict() if writes else {}
        return {name: state[name].detach().to("cpu", copy=True) for name in names if name in state}


def writes_locally(writer: Any) -> bool:
    """Whether this is Lightning's default `CheckpointIO`; others may be remote or asynchronous."""
    default: Any = next((cls for cls in type(writer).__mro__ if cls.__name__ == "TorchCheckpointIO"), None)
    return default is not None and writer.save_checkpoint.__func__ is default.save_checkpoint


def read(strategy: Any, file: Path, **options: Any) -> dict[str, Any] | None:
    """The content of a single file that Lightning has saved; None if it is another kind of file."""
    if not zipfile.is_zipfile(file):  # as those of torch.save are
        return None
    refuse_unsafe(file)
    content = strategy.checkpoint_io.load_checkpoint(file, **options)
    return dict(content) if isinstance(content, Mapping) and "state_dict" in content else None


def load(load: Load, strategy: Any, file: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Load the weights of a single file into a running engine, and return the rest of it for Trainer.

    A fit starts from these weights with a new optimizer, new schedulers and new loops.

    Raises:
        CheckpointMismatchError: the weights, or the base that they were trained on, are not the module's.
    """
    module, engine = strategy.lightning_module, strategy.model
    weights = {plain(name): value for name, value in checkpoint.pop("state_dict").items()}
    manifest, contents = Manifest.from_checkpoint(checkpoint), Contents(module)
    _check(load, contents, weights, manifest, file)
    checkpoint.pop(KEY, None)
    with replacing(engine):
        put(module, without_own_values(weights, contents.by_name, manifest, load))
    forget_second_copies(engine)
    if module.trainer.state.fn != "fit":
        return checkpoint
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()
        _put_masters(module, weights)
    checkpoint.pop("loops", None)
    text = f"Training starts from the weights in {file}: the optimizer, the schedulers and the step count start anew."
    if checkpoint.get("optimizer_states"):
        warn(load.owner, f"{text} The file has their states, but of another strategy, and DeepSpeed cannot load those.")
    else:
        load.owner.logger.info("%s The file has none of them.", text)
    return {**checkpoint, "lr_schedulers": [item.scheduler.state_dict() for item in strategy.lr_scheduler_configs]}


def _check(load: Load, contents: Contents, weights: Mapping[str, Any], manifest: Manifest | None, file: Path) -> None:
    module, by_name = contents.module, contents.by_name
    strict = getattr(module, "strict_loading", True)  # Lightning 2.0 and 2.1 are always strict
    unverifiable = f"{file} has no frozen parameters and no manifest: its base cannot be verified."
    may_be_missing = check_base(
        {"module": weights}, manifest, module, by_name, load, strict=strict, unverifiable=unverifiable
    )
    check_parts({name: value for name, value in weights.items() if is_part(by_name.get(name))}, by_name, load)
    now = contents.state.keys()
    problems = {"other shapes": [n for n, v in weights.items() if n in by_name and tuple(v.shape) != by_name[n].shape]}
    if strict:
        problems["missing keys"] = list(now - weights.keys() - may_be_missing)
        problems["unexpected keys"] = list(weights.keys() - now)
    differences = [f"{what}: {named(names)}" for what, names in problems.items() if names]
    if differences:
        raise CheckpointMismatchError(f"{file} does not fit this module: {'; '.join(differences)}.")


def _put_masters(module: Any, weights: Mapping[str, Any]) -> None:
    """Keep the full precision of a file in the optimizer's masters, where the model has less."""
    import torch
    from deepspeed import utils

    put = getattr(utils, "safe_set_full_fp32_param", None)
    for parameter, names in Contents(module).names.items():
        value = next((weights[name] for name in names if name in weights), None)
        if put and value is not None and parameter.requires_grad and parameter.dtype != value.dtype == torch.float32:
            put(parameter, value.to(parameter.device))

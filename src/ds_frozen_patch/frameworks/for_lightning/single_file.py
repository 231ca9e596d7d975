"""`save_weights_only=True`: one ordinary Lightning checkpoint, saved from a running engine and loaded into one."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...base import replacing
from ...common.errors import CheckpointMismatchError, named
from ...common.files import WEIGHTS_FILE
from ...engine.served import is_first, warn
from ...internals import forget_second_copies, gathered, refresh_masters
from ...load.fitting import put
from ...load.quantized import check_parts, without_own_values
from ...load.running import Load
from ...load.strictness import LISTED, check_base
from ...load.trust import refuse_unsafe
from ...parameters import Contents, plain
from ...publish.durable import sync_folder
from ...publish.journal import remove_states
from ...publish.notes import OURS
from ...record import KEY, Record, carried
from ...save.agreement import explaining_errors
from ...save.contents import describe
from ...save.publishing import publish
from ...save.running import Save
from . import STRATEGY_OF_TRAINER, uses


def place_of(path: Path) -> Path:
    """Where to write a single file for a path: in the folder of that name, if there is one, and through links."""
    return path / WEIGHTS_FILE if os.path.isdir(path) else Path(os.path.realpath(path))  # noqa: PTH112  -- it never raises


def file_in(path: Path) -> Path:
    """The single file in a folder, if it is newer than the folder's checkpoint; else the path."""
    if path.is_file():
        return path
    moved = _moved(Path(os.path.realpath(path)))
    if moved.is_file():  # a process was killed in `make_way`
        with suppress(OSError):
            path.mkdir(exist_ok=True)
            moved.rename(path / WEIGHTS_FILE)
    return path / WEIGHTS_FILE if not (path / "latest").is_file() and (path / WEIGHTS_FILE).is_file() else path


def make_way(path: Path) -> None:
    """Move a single file that Lightning has saved into a folder of its name, since an engine saves to a folder.

    It stays what is loaded from the path until a checkpoint is there.
    """
    if not _is_single_file(path):
        return  # DeepSpeed says what is wrong
    file = Path(os.path.realpath(path))
    moved = _moved(file)
    file.rename(moved)
    file.mkdir()
    moved.rename(file / WEIGHTS_FILE)


def _moved(file: Path) -> Path:
    """Where a single file is while a folder of its name is made."""
    name = sha256(os.fsencode(file.name)).hexdigest()[:12]  # not in clear: Lightning searches for names such as "last"
    return file.with_name(f"{OURS}-moved-{name}")


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


@dataclass
class SingleFile:
    """A save of a run's weights into one file on each disk, with what Lightning saves beside them.

    Attributes:
        save: that has begun.
        module: Lightning's.
    """

    save: Save
    module: Any
    _record: Record | None = None
    _dumped: dict[int, tuple[str, Any]] = field(default_factory=dict)  # by identity: the name and the tensor itself

    @property
    def _writes(self) -> bool:
        place = self.save.place
        return self.save.publishes or (not place.is_managed and is_first(self.save.owner))

    @property
    def _left_out(self) -> frozenset[str]:
        return self._record.names if self._record is not None else frozenset()

    def state(self, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state dict that hooks get, with whole values where they are written; every rank must call it.

        In ZeRO-3, parameters are gathered one after another, except those that are left out, which stay as they are.
        """
        with explaining_errors(self.save.place.shown) as saves:
            saves.append(self.save)
            self._record = describe(self.save) if self.save.base is not None else None
            state = dict(dump())
            if self.save.engine.zero_optimization_partition_weights():
                self._gather_into(state, dump)
        self._dumped = {id(value): (plain(name), value) for name, value in state.items()}
        return state

    def _gather_into(self, state: dict[str, Any], dump: Callable[[], dict[str, Any]]) -> None:
        kept = {plain(name): name for name in state if plain(name) not in self._left_out}
        contents = Contents(self.module)
        # A module's own `state_dict` may return only a part, and use other names.
        aliases = {p: [kept.pop(n) for n in names if n in kept] for p, names in contents.names_in_state.items()}
        firsts = {names[0]: parameter for parameter, names in aliases.items() if names}
        for name, value in gathered(firsts, self._writes):
            if self._writes:
                state.update(dict.fromkeys(aliases[firsts[name]], value))
        if made := [name for name in kept.values() if _is_empty(state[name])]:  # of parameters, by that `state_dict`
            from deepspeed import zero

            parameters = [p for p, names in contents.names.items() if self._left_out.isdisjoint(names)]
            with zero.GatheredParameters(parameters), self.save.ranks.deferred(self.save.place.target):
                whole = dump() if self._writes else state
                state.update({name: whole[name].detach().to("cpu", copy=True) for name in made})

    @uses(STRATEGY_OF_TRAINER, "checkpoint_io")
    def write(self, strategy: Any, checkpoint: Mapping[str, Any], storage_options: Any = None) -> None:
        """Write what Lightning has dumped, once its hooks have changed it; every rank must call it."""
        place = self.save.place
        with explaining_errors(place.shown) as saves:
            saves.append(self.save)
            if self._writes:
                with self.save.ranks.deferred(place.target):
                    ours = {KEY: self._record.to_json()} if self._record else {}
                    state = {"state_dict": self._kept(checkpoint["state_dict"])} if "state_dict" in checkpoint else {}
                    content = {**checkpoint, **state, **ours}
                    file = place.path(place.target.name)
                    strategy.checkpoint_io.save_checkpoint(content, file, storage_options=storage_options)
            publish(self.save) if place.is_managed else self.save.ranks.step("write its file")
        if self._writes and place.target.name == WEIGHTS_FILE:  # what it replaces
            (place.folder / "latest").unlink(missing_ok=True)
            sync_folder(place.folder)
            remove_states(place.folder / "checkpoint")
            with suppress(OSError):  # the program has files there
                (place.folder / "checkpoint").rmdir()

    def _kept(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What is written of a state dict, in CPU memory: without what is left out, whatever a hook has called it.

        In ZeRO-3 only what is left out has no values, so that is what a tensor without any was made of.
        """
        may_be_empty = {plain(name) for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        has_placeholders = bool(self._left_out) and self.save.engine.zero_optimization_partition_weights()
        copies: dict[tuple[Any, ...], Any] = {}
        kept = {}
        for name, value in state.items():
            origin, _ = self._dumped.get(id(value), ("", None))
            is_placeholder = has_placeholders and _is_empty(value) and origin not in may_be_empty
            if not is_placeholder and not {plain(name), origin} & self._left_out:
                kept[name] = _copy(value, copies)
        return kept


def _copy(value: Any, copies: dict[tuple[Any, ...], Any]) -> Any:
    """A value in CPU memory; that of a tensor is a copy, since its storage may be a part of a larger one.

    Args:
        value: of a state dict.
        copies: made so far, so that tied tensors share one.
    """
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.numel() or value.layout is not torch.strided:
        return value.cpu() if hasattr(value, "cpu") else value
    key = value.data_ptr(), value.dtype, value.shape, value.stride()
    if key not in copies:
        copies[key] = value.detach().to("cpu", copy=True)
    return copies[key]


def _is_empty(value: Any) -> bool:
    """Whether this is what ZeRO-3 leaves of a parameter."""
    return hasattr(value, "shape") and tuple(value.shape) == (0,)


def writes_locally(writer: Any) -> bool:
    """Whether this is Lightning's default `CheckpointIO`; others may be remote or asynchronous."""
    default: Any = next((cls for cls in type(writer).__mro__ if cls.__name__ == "TorchCheckpointIO"), None)
    return default is not None and writer.save_checkpoint.__func__ is default.save_checkpoint


@uses(STRATEGY_OF_TRAINER, "checkpoint_io")
def read(strategy: Any, file: Path, **options: Any) -> dict[str, Any] | None:
    """The content of a single file that Lightning has saved; None if it is another kind of file."""
    if not zipfile.is_zipfile(file):  # as those of torch.save are
        return None
    refuse_unsafe(file)
    content = strategy.checkpoint_io.load_checkpoint(file, **options)
    return dict(content) if isinstance(content, Mapping) and "state_dict" in content else None


@uses(STRATEGY_OF_TRAINER, "lightning_module", "lr_scheduler_configs")
def load(load: Load, strategy: Any, file: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Load the weights of a single file into a running engine, and return the rest of it for Trainer.

    A fit starts from these weights with a new optimizer, new schedulers and new loops.

    Raises:
        CheckpointMismatchError: the weights, or the base that they were trained on, are not the module's.
    """
    module, engine = strategy.lightning_module, strategy.model
    weights = {plain(name): value for name, value in checkpoint.pop("state_dict").items()}
    load.source, load.record = str(file), carried(checkpoint, file)
    saved = {"module": weights, LISTED: checkpoint.get(LISTED)}
    _check(load, saved, getattr(module, "strict_loading", True))  # Lightning 2.0 and 2.1 are always strict
    checkpoint.pop(KEY, None)
    with replacing(engine):
        put(module, without_own_values(weights, load))
    forget_second_copies(engine)
    if module.trainer.state.fn != "fit":
        return checkpoint
    if refresh_masters(engine):
        _put_masters(module, weights)
    checkpoint.pop("loops", None)
    text = f"Training starts from the weights in {file}: the optimizer, the schedulers and the step count start anew."
    if checkpoint.get("optimizer_states"):
        warn(load.owner, f"{text} The file has their states, but of another strategy, and DeepSpeed cannot load those.")
    else:
        load.owner.logger.info("%s The file has none of them.", text)
    return {**checkpoint, "lr_schedulers": [item.scheduler.state_dict() for item in strategy.lr_scheduler_configs]}


def _check(load: Load, saved: Mapping[str, Any], strict: bool) -> None:
    weights, by_name, now = saved["module"], load.held, load.base.contents.state.keys()
    may_be_missing = check_base(load, saved, strict)
    check_parts({name: value for name, value in weights.items() if name in load.parts}, by_name, load)
    problems = {"other shapes": [n for n, v in weights.items() if n in by_name and tuple(v.shape) != by_name[n].shape]}
    if strict:
        problems["missing keys"] = list(now - weights.keys() - may_be_missing)
        problems["unexpected keys"] = list(weights.keys() - now)
    differences = [f"{what}: {named(names)}" for what, names in problems.items() if names]
    if differences:
        raise CheckpointMismatchError(f"{load.source} does not fit this module: {'; '.join(differences)}.")


def _put_masters(module: Any, weights: Mapping[str, Any]) -> None:
    """Keep the full precision of a file in the optimizer's masters, where the model has less."""
    import torch
    from deepspeed import utils

    put = getattr(utils, "safe_set_full_fp32_param", None)
    for parameter, names in Contents(module).names.items():
        value = next((weights[name] for name in names if name in weights), None)
        if put and value is not None and parameter.requires_grad and parameter.dtype != value.dtype == torch.float32:
            put(parameter, value.to(parameter.device))

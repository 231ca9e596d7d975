"""Convert a checkpoint to DeepSpeed's universal format with DeepSpeed's own converter.

To resume under `ds_frozen_patch` with a different number of ranks, use `reshard`: it supports any optimizer, and keeps
the buffers, Lightning's state and the manifest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ..checkpoint.format.allowed import OF_DEEPSPEED
from ..checkpoint.format.stored import ITEM_SIZES, Size, StandIn, StoredTensor, stand_in
from ..checkpoint.zero.labels import ELASTIC_KEY, LABEL, UNIVERSAL_INFO
from ..checkpoint.zero.repartition import Repartition, Target, plan_repartition
from ..checkpoint.zero.states import States, parameter_groups, read_states
from ..common.errors import CheckpointError
from ..common.text import human_bytes, printable_lines
from ..common.versions import version_of
from ..parameters import is_name
from ..workarounds.old_deepspeed import converter_needed, converter_reads_one_group
from .output import check_output, copy_other_files, new_output

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_LAUNCHER = """
import importlib, os, runpy, sys, torch
converter, *classes = sys.argv.pop(1).split()
if hasattr(torch.serialization, "add_safe_globals"):
    paths = [name.rpartition(".") for name in classes]
    torch.serialization.add_safe_globals([getattr(importlib.import_module(module), name) for module, _, name in paths])
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
runpy.run_module(converter, run_name="__main__", alter_sys=True)
"""


# Before torch 2.4 `weights_only` cannot be extended by classes; there the converter loads as it always does.
@dataclass(frozen=True)
class Universal:
    """What `universal` has written, or would write.

    Attributes:
        source: the path of the checkpoint, as passed.
        target: the path of the universal checkpoint, as passed.
        zero_stage: 1 to 3, of the source.
        deepspeed: the release of the converter.
        size: the size of all files, in bytes; None after a dry run.
    """

    source: str
    target: str
    zero_stage: int
    deepspeed: str
    size: int | None

    def __str__(self) -> str:
        size = f"{human_bytes(self.size)}, " if self.size is not None else ""
        lines = [
            f"{self.target}: {size}ZeRO stage {self.zero_stage}, by deepspeed {self.deepspeed}.",
            'To load it, set "checkpoint": {"load_universal": true} in DeepSpeed\'s configuration.',
        ]
        return printable_lines(lines)


def universal(
    source: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    dry_run: bool = False,
    quiet: bool = True,
) -> Universal:
    """Convert a checkpoint with the converter of the installed DeepSpeed, in a process of its own.

    The converter gets a temporary checkpoint as one rank would have saved it. This avoids the faults that its releases
    have with several ranks, sub-groups and `round_robin_gradients`. It needs disk space for three times the trained
    weights.

    Args:
        source: the directory of a DeepSpeed checkpoint of ZeRO 1 to 3 with Adam. It is not changed.
        target: the directory to create. DeepSpeed loads it with `checkpoint: {"load_universal": true}`, but misplaces
            its contents in a run of several ranks with `round_robin_gradients`.
        tag: the subdirectory to read; by default the one named in `latest`.
        dry_run: write nothing.
        quiet: do not show progress on stderr.

    Returns:
        The release of the converter, and the size of the result.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be converted; the target exists, or cannot be
            written; DeepSpeed is missing, too old, or fails. Nothing is left there.
    """
    states = read_states(source, tag, trust=False)  # DeepSpeed unpickles it
    version = _check_deepspeed(states)
    of_one = plan_repartition(states, Target(1, sub_group_size=inf))
    _check_convertible(states, of_one, version)
    path, root = Path(target), states.layout.root
    sanitized = _sanitize(of_one, root)
    if dry_run:
        check_output(path, root)
        return Universal(str(source), str(target), states.zero_stage, version, None)
    with new_output(path, root) as output:
        folder, tag_ = output.with_name("of one rank"), states.layout.tag
        folder.mkdir()
        output.mkdir()
        sanitized.write(folder, quiet)
        _run_converter(folder, output / tag_, version, quiet)
        models = {name: _final_model_state(state) for name, state in of_one.files.items() if "module" in state}
        Repartition(models, of_one.tensors).write(output / tag_, quiet)
        copy_other_files(states.layout, output)
        (output / "latest").unlink()
        (output / "latest_universal").write_text(tag_, encoding="utf-8")
        size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    return Universal(str(source), str(target), states.zero_stage, version, size)


def _check_deepspeed(states: States) -> str:
    version = version_of("deepspeed")
    if not states.layout.optimizer:
        raise CheckpointError(
            f"{states.layout.root} cannot be converted: DeepSpeed's converter reads only checkpoints of ZeRO 1 to 3."
            " First convert it to another stage: ds-frozen-patch reshard --stage 1"
        )
    if not version:
        raise CheckpointError("This command needs DeepSpeed's converter: pip install deepspeed")
    if since := converter_needed(states.zero_stage):
        raise CheckpointError(
            f"The converter of deepspeed {version} does not support ZeRO stage {states.zero_stage}. Install"
            f" deepspeed>={since}, or use ds-frozen-patch reshard instead."
        )
    return version


def _check_convertible(states: States, of_one: Repartition, version: str) -> None:
    root = states.layout.root
    (optimizer,) = (state["optimizer_state_dict"] for state in of_one.files.values() if "module" not in state)
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    if any(not {"exp_avg", "exp_avg_sq"} <= set(kept) for kept in base["state"].values()) or not base["state"]:
        raise CheckpointError(
            f"{root} cannot be converted: DeepSpeed's converter supports only the state of Adam. To resume with a"
            " different number of ranks, use ds-frozen-patch reshard."
        )
    if len(base["param_groups"]) > 1 and converter_reads_one_group(states.zero_stage):
        raise CheckpointError(
            f"{root} cannot be converted: it has {len(parameter_groups(states.models[0]))} parameter groups in ZeRO-3,"
            f" and the converter of deepspeed {version} reads only the first. Install deepspeed>=0.18.0, or use"
            " ds-frozen-patch reshard instead."
        )


def _sanitize(of_one: Repartition, root: Path) -> Repartition:
    """A copy of what the converter reads, because it unpickles this and uses parameter names as folder names.

    It does not contain the state of Lightning and the user.
    """
    kept = ("param_shapes", "dp_world_size", "mp_world_size", "ds_version")
    files: dict[str, Any] = {}
    try:
        for name, state in of_one.files.items():
            keys = kept if "module" in state else ("optimizer_state_dict", "ds_version")
            copy = _copy_plain({key: state[key] for key in keys if key in state}, {})
            if "module" in state:
                copy = {"module": {}, **UNIVERSAL_INFO, **copy}
            for groups in (copy.get("param_shapes"), copy.get("optimizer_state_dict", {}).get("param_slice_mappings")):
                _check_folders(groups)
            _check_numbers(copy)
            files[name] = copy
    except _UnexpectedError as error:
        raise CheckpointError(
            f"{root} cannot be converted: {error}, and DeepSpeed's converter would unpickle it. None of DeepSpeed's"
            " optimizers saves that. Nothing was run. To resume with a different number of ranks, use ds-frozen-patch"
            " reshard."
        ) from None
    return Repartition(files, of_one.tensors)


class _UnexpectedError(Exception):
    """A value that must not reach the converter."""


def _copy_plain(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a value that consists of numbers, strings, tensors and DeepSpeed's own classes, without attributes.

    Args:
        value: from an optimizer's state, without cycles.
        copies: those of values so far, by id.

    Raises:
        _UnexpectedError: it contains something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if id(value) not in copies:
        if kind in (list, tuple):
            copies[id(value)] = kind(_copy_plain(item, copies) for item in value)
        elif kind is Size:
            copies[id(value)] = Size(value)
        elif kind in (dict, OrderedDict):
            if odd := [key for key in value if type(key) not in (int, str)]:
                raise _UnexpectedError(f"a key is a {_class_name(odd[0])}")
            copies[id(value)] = kind((key, _copy_plain(item, copies)) for key, item in value.items())
        elif kind is StoredTensor:
            copies[id(value)] = StoredTensor(value.storage, value.dtype, value.offset, value.shape, value.stride)
        elif isinstance(value, StandIn):
            copies[id(value)] = _copy_object(value)
        elif isinstance(value, type) and getattr(value, "stands_for", "").removeprefix("torch.") in ITEM_SIZES:
            return value
        else:
            raise _UnexpectedError(f"its optimizer's state names {_class_name(value)!r}")
    return copies[id(value)]


def _copy_object(value: StandIn) -> StandIn:
    state = value.state if isinstance(value.state, dict) else {}
    values = [*value.arguments, *(_copy_plain(item, {}) for item in state.values())]
    is_known = value.stands_for in OF_DEEPSPEED and all(type(name) is str and name.isidentifier() for name in state)
    is_of_numbers = all(item is None or isinstance(item, bool | int | float | type) for item in values)
    if not is_known or not is_of_numbers or value.items or value.pairs or not isinstance(value.state, dict | None):
        raise _UnexpectedError(f"its optimizer's state names {_class_name(value)!r}")
    copy = stand_in(value.stands_for)(*value.arguments)
    copy.is_called, copy.state = value.is_called, dict(state) or None
    return copy


def _class_name(value: Any) -> str:
    return str(getattr(value, "stands_for", "") or type(value).__name__)


def _check_folders(groups: Any) -> None:
    """Raise _UnexpectedError for parameter names that are not safe as folder names."""
    for group in groups if isinstance(groups, list) else []:
        for name in group if isinstance(group, dict) else ():
            if not is_name(name) or name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
                raise _UnexpectedError(f"a parameter has the name {str(name)[:100]!r}")


def _check_numbers(state: Mapping[str, Any]) -> None:
    for key, kind in (("dp_world_size", int), ("mp_world_size", int), ("ds_version", str)):
        if not isinstance(state.get(key), kind | None):
            raise _UnexpectedError(f"{key} is a {_class_name(state[key])}")


def _final_model_state(state: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in state.items() if key not in (ELASTIC_KEY, LABEL)}
    return {**UNIVERSAL_INFO, **kept}


def _run_converter(folder: Path, output: Path, version: str, quiet: bool) -> None:
    if not quiet:
        print(f"converting by deepspeed {version} ...", file=sys.stderr)
    workers = [f"--num_{what}_workers=1" for what in ("extract", "merge")]
    folders = ["--input_folder", str(folder.resolve()), "--output_folder", str(output.resolve())]
    names = " ".join([CONVERTER, *OF_DEEPSPEED])
    # Nothing is imported from the current folder, which may be someone else's.
    empty = folder.with_name("nothing")
    empty.mkdir()
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    line = [sys.executable, *safe, "-c", _LAUNCHER, names, *folders, *workers]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, cwd=empty, env=_environment())
    if ran.returncode or not (output / "zero").is_dir():
        last = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
        raise CheckpointError(f"The converter of deepspeed {version} failed; its last output was: {last}")


def _environment() -> dict[str, str]:
    """The environment, with absolute import paths and without the current folder."""
    paths = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [str(path) for path in paths if path != Path.cwd()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}

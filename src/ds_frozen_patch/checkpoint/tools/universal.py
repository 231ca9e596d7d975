"""A checkpoint becomes a universal checkpoint of DeepSpeed's, by its own converter, for programs that load these.

To go on under `ds_frozen_patch` with another number of ranks, `reshard` does more: it takes any optimizer, and loses
neither buffers nor what Lightning and the manifest say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

from packaging.version import Version

from ...common.errors import CheckpointError
from ...common.text import human_bytes, printable_lines
from ...parameters import is_name
from ..format.allowed import OF_DEEPSPEED
from ..format.stored import ITEM_SIZES, Size, StandIn, StoredTensor, stand_in
from ..zero.labels import LABEL
from ..zero.repartition import KEY, Plan, plan
from ..zero.states import States, load, names_of_groups
from .output import check_output, copy_other_files, new_output

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
INFO = {"universal_checkpoint_version": 0.2}
"""What the converter asks a checkpoint of ZeRO 1 or 2 for, as `universal_checkpoint_info`."""
_LAUNCHER = """
import importlib, os, runpy, sys, torch
converter, *classes = sys.argv.pop(1).split()
if hasattr(torch.serialization, "add_safe_globals"):
    found = [name.rpartition(".") for name in classes]
    torch.serialization.add_safe_globals([getattr(importlib.import_module(module), name) for module, _, name in found])
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
runpy.run_module(converter, run_name="__main__", alter_sys=True)
"""
# Before torch 2.4 `weights_only` cannot be told of classes; there the converter loads as it does by itself.
_SINCE = {1: "0.11.2", 2: "0.11.2", 3: "0.14.5"}
"""The release of DeepSpeed that has the converter, by ZeRO stage."""


@dataclass(frozen=True)
class Universal:
    """What `universal` has done, or would do.

    Attributes:
        source: the checkpoint's path, as it was given.
        target: the universal checkpoint's path, as it was given.
        zero_stage: 1 to 3, of the source.
        deepspeed: the release whose converter it is.
        size: the bytes of all files; None where nothing was written.
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
    """Convert a checkpoint with the converter of the DeepSpeed that is installed, in a process of its own.

    It is given what one rank would have saved, made beside the target for as long as it takes: so what the releases of
    the converter do wrong with several ranks, sub-groups and `round_robin_gradients` does not come up. It needs room on
    disk for three times what was trained.

    Args:
        source: the directory of a DeepSpeed checkpoint of ZeRO 1 to 3 and of Adam. It stays as it is.
        target: the directory to make. DeepSpeed loads it with `checkpoint: {"load_universal": true}`, but misplaces all
            of it in a run of several ranks with `round_robin_gradients`.
        tag: the folder in the source; without one, what its file `latest` says.
        dry_run: write nothing.
        quiet: show no progress on stderr.

    Returns:
        Which converter made it, and its size.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be converted; there is something at the target
            already, or it cannot be written; DeepSpeed is missing, too old, or fails. Nothing is left there then.
    """
    states = load(source, tag, trust=False)  # DeepSpeed unpickles it
    version = _version(states)
    of_one = plan(states, 1, sub_group_size=inf)
    _check(states, of_one, version)
    path, root = Path(target), states.layout.root
    given = _for_the_converter(of_one, root)
    if dry_run:
        check_output(path, root)
        return Universal(str(source), str(target), states.zero_stage, version, None)
    with new_output(path, root) as made:
        folder, tag_ = made.with_name("of one rank"), states.layout.tag
        folder.mkdir()
        made.mkdir()
        given.write(folder, quiet)
        _convert(folder, made / tag_, version, quiet)
        models = {name: _whole(state) for name, state in of_one.files.items() if "module" in state}
        Plan(models, of_one.made).write(made / tag_, quiet)
        copy_other_files(states.layout, made)
        (made / "latest").unlink()
        (made / "latest_universal").write_text(tag_, encoding="utf-8")
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    return Universal(str(source), str(target), states.zero_stage, version, size)


def _version(states: States) -> str:
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise CheckpointError("This needs DeepSpeed's own converter: pip install deepspeed") from None
    since = _SINCE.get(states.zero_stage, "0")
    if Version(version) < Version(since):
        raise CheckpointError(
            f"The converter of deepspeed {version} does not know ZeRO stage {states.zero_stage}. Install"
            f" deepspeed>={since} for this, or go on without it: ds-frozen-patch reshard."
        )
    return version


def _check(states: States, of_one: Plan, version: str) -> None:
    root = states.layout.root
    (optimizer,) = (state["optimizer_state_dict"] for state in of_one.files.values() if "module" not in state)
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    if any(not {"exp_avg", "exp_avg_sq"} <= set(kept) for kept in base["state"].values()) or not base["state"]:
        raise CheckpointError(
            f"{root} cannot be converted: DeepSpeed's converter knows the state of Adam only. To go on with another"
            " number of ranks: ds-frozen-patch reshard."
        )
    if states.zero_stage == 3 and len(base["param_groups"]) > 1 and Version(version) < Version("0.18.0"):
        raise CheckpointError(
            f"{root} cannot be converted: of its {len(names_of_groups(states.models[0]))} groups of parameters in"
            f" ZeRO-3, the converter of deepspeed {version} reads the first alone. Install deepspeed>=0.18.0 for this,"
            " or go on without it: ds-frozen-patch reshard."
        )


def _for_the_converter(of_one: Plan, root: Path) -> Plan:
    """What the converter looks at, made anew: it unpickles this, and gives folders the names of parameters.

    What Lightning and the user have put there is not in it.
    """
    kept = ("param_shapes", "dp_world_size", "mp_world_size", "ds_version")
    files: dict[str, Any] = {}
    try:
        for name, state in of_one.files.items():
            keys = kept if "module" in state else ("optimizer_state_dict", "ds_version")
            made = _made_anew({key: state[key] for key in keys if key in state}, {})
            if "module" in state:
                made = {"module": {}, "universal_checkpoint_info": INFO, **made}
            for held in (made.get("param_shapes"), made.get("optimizer_state_dict", {}).get("param_slice_mappings")):
                _check_folders(held)
            _check_numbers(made)
            files[name] = made
    except _UnexpectedError as error:
        raise CheckpointError(
            f"{root} cannot be converted: {error}, and DeepSpeed's converter would unpickle it. None of DeepSpeed's"
            " optimizers saves that. Nothing was run. To go on with another number of ranks: ds-frozen-patch reshard."
        ) from None
    return Plan(files, of_one.made)


class _UnexpectedError(Exception):
    """Something that is not for the converter."""


def _made_anew(value: Any, known: dict[int, Any]) -> Any:
    """The same, of numbers, texts, tensors, and DeepSpeed's own classes with numbers; without attributes of any of it.

    Args:
        value: what an optimizer's state holds. None of it holds itself.
        known: what was made of values before, by their address.

    Raises:
        _UnexpectedError: it holds something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if id(value) not in known:
        if kind in (list, tuple):
            known[id(value)] = kind(_made_anew(item, known) for item in value)
        elif kind is Size:
            known[id(value)] = Size(value)
        elif kind in (dict, OrderedDict):
            if odd := [key for key in value if type(key) not in (int, str)]:
                raise _UnexpectedError(f"a key is a {_name(odd[0])}")
            known[id(value)] = kind((key, _made_anew(item, known)) for key, item in value.items())
        elif kind is StoredTensor:
            known[id(value)] = StoredTensor(value.storage, value.dtype, value.offset, value.shape, value.stride)
        elif isinstance(value, StandIn):
            known[id(value)] = _object(value)
        elif isinstance(value, type) and getattr(value, "stands_for", "").removeprefix("torch.") in ITEM_SIZES:
            return value
        else:
            raise _UnexpectedError(f"its optimizer's state names {_name(value)!r}")
    return known[id(value)]


def _object(value: StandIn) -> StandIn:
    state = value.state if isinstance(value.state, dict) else {}
    held = [*value.arguments, *(_made_anew(item, {}) for item in state.values())]
    is_known = value.stands_for in OF_DEEPSPEED and all(type(name) is str and name.isidentifier() for name in state)
    is_of_numbers = all(item is None or isinstance(item, bool | int | float | type) for item in held)
    if not is_known or not is_of_numbers or value.items or value.pairs or not isinstance(value.state, dict | None):
        raise _UnexpectedError(f"its optimizer's state names {_name(value)!r}")
    made = stand_in(value.stands_for)(*value.arguments)
    made.is_called, made.state = value.is_called, dict(state) or None
    return made


def _name(value: Any) -> str:
    return str(getattr(value, "stands_for", "") or type(value).__name__)


def _check_folders(groups: Any) -> None:
    """Raise _UnexpectedError for names of parameters that lead elsewhere as names of folders."""
    for group in groups if isinstance(groups, list) else []:
        for name in group if isinstance(group, dict) else ():
            if not is_name(name) or name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
                raise _UnexpectedError(f"a parameter has the name {str(name)[:100]!r}")


def _check_numbers(state: Mapping[str, Any]) -> None:
    for key, kind in (("dp_world_size", int), ("mp_world_size", int), ("ds_version", str)):
        if not isinstance(state.get(key), kind | None):
            raise _UnexpectedError(f"{key} is a {_name(state[key])}")


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in state.items() if key not in (KEY, LABEL)}
    return {"universal_checkpoint_info": INFO, **kept}


def _convert(folder: Path, made: Path, version: str, quiet: bool) -> None:
    if not quiet:
        print(f"converting by deepspeed {version} ...", file=sys.stderr)
    workers = [f"--num_{what}_workers=1" for what in ("extract", "merge")]
    folders = ["--input_folder", str(folder.resolve()), "--output_folder", str(made.resolve())]
    names = " ".join([CONVERTER, *OF_DEEPSPEED])
    # Of the current folder, which can be a stranger's, nothing is imported.
    own = folder.with_name("nothing")
    own.mkdir()
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    line = [sys.executable, *safe, "-c", _LAUNCHER, names, *folders, *workers]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, cwd=own, env=_environment())
    if ran.returncode or not (made / "zero").is_dir():
        last = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
        raise CheckpointError(f"The converter of deepspeed {version} has failed; it said last: {last}")


def _environment() -> dict[str, str]:
    """The environment, with absolute paths to import from, and without the current folder."""
    paths = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [str(path) for path in paths if path != Path.cwd()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}

"""A checkpoint becomes a universal checkpoint of DeepSpeed's, by its own converter, for programs that load these.

To go on under `ds_frozen_patch` with another number of ranks, `reshard` does more: it takes any optimizer, and loses
neither buffers nor what Lightning and the manifest say.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

from packaging.version import Version

from .._errors import CheckpointError, named
from .._labels import LABEL
from .recutting import KEY, Plan, plan
from .states import States, load, names_of_groups
from .stored import ITEM_SIZES, StandIn, StoredTensor, everything
from .writing import check_output, copy_others, output

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
INFO = {"universal_checkpoint_version": 0.2}
"""What the converter asks a checkpoint of ZeRO 1 or 2 for, as `universal_checkpoint_info`."""
_OF_OPTIMIZERS = frozenset(
    [
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        *(f"torch.{dtype}" for dtype in ITEM_SIZES),
    ]
)
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

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return dict(vars(self))


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
    with output(path, root) as made:
        folder, tag_ = made.with_name("of one rank"), states.layout.tag
        folder.mkdir()
        made.mkdir()
        given.write(folder, quiet)
        _convert(folder, made / tag_, version, quiet)
        models = {name: _whole(state) for name, state in of_one.files.items() if "module" in state}
        Plan(models, of_one.made).write(made / tag_, quiet)
        copy_others(states.layout, made)
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
    """Without all that it does not look at, above all what Lightning and the user have put there.

    It unpickles this: nothing else may be named in it than what an optimizer of DeepSpeed's saves.
    """
    kept = ("param_shapes", "dp_world_size", "mp_world_size", "ds_version")
    files = {
        name: {"module": {}, "universal_checkpoint_info": INFO, **{key: state[key] for key in kept if key in state}}
        if "module" in state
        else {key: state[key] for key in ("optimizer_state_dict", "ds_version") if key in state}
        for name, state in of_one.files.items()
    }
    named_there = {name for state in files.values() for _, item in everything(state) for name in _names(item)}
    if odd := sorted(name for name in named_there if name not in _OF_OPTIMIZERS):
        raise CheckpointError(
            f"{root} cannot be converted: its optimizer's state names {named(odd)}, which DeepSpeed's converter could"
            " run. Nothing was run. To go on with another number of ranks: ds-frozen-patch reshard."
        )
    return Plan(files, of_one.made)


def _names(item: Any) -> list[str]:
    """The classes and functions that a pickle of this names, but for those of plain tensors."""
    if isinstance(item, StoredTensor):
        inner = [
            inner
            for more in (item.more, item.wrapper or ())
            for _, value in everything(more)
            for inner in _names(value)
        ]
        return [item.maker, *inner, *([item.wrapper[0]] if item.wrapper else [])]
    kind = item if isinstance(item, type) else type(item)
    return [kind.stands_for] if issubclass(kind, StandIn) else []


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in state.items() if key not in (KEY, LABEL)}
    return {"universal_checkpoint_info": INFO, **kept}


def _convert(folder: Path, made: Path, version: str, quiet: bool) -> None:
    if not quiet:
        print(f"converting by deepspeed {version} ...", file=sys.stderr)
    workers = [f"--num_{what}_workers=1" for what in ("extract", "merge")]
    line = [sys.executable, "-m", CONVERTER, "--input_folder", str(folder), "--output_folder", str(made), *workers]
    ran = subprocess.run(line, capture_output=True, text=True, check=False)
    if ran.returncode or not (made / "zero").is_dir():
        last = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
        raise CheckpointError(f"The converter of deepspeed {version} has failed; it said last: {last}")

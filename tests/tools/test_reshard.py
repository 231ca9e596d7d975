"""`ds-frozen-patch reshard`: converts a checkpoint into what another world size would have saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import (
    Checkpoints,
    assert_same,
    changed,
    loaded,
    names_of_copy,
    of_any_save,
    raw,
    record_in,
    snapshot,
    weights_of,
)

from ds_frozen_patch import CheckpointError, consolidate, inspect, reshard, verify
from ds_frozen_patch.cli import main
from ds_frozen_patch.parameters import plain

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday]


def files_of(checkpoint: Path) -> dict[str, Any]:
    return {file.name: of_any_save(file) for file in sorted((checkpoint / "checkpoint").glob("*.pt"))}


def without_gaps(states: dict[str, Any]) -> dict[str, Any]:
    """The states but for the list of gaps between parameters, which `reshard` does not write: there are none."""
    for state in states.values():
        state.get("optimizer_state_dict", {}).pop("param_alignment_paddings", None)
    return states


def without_values(state: Any) -> Any:
    """Return the state with zeros in place of trained values: of all floating-point tensors."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state) if state.is_floating_point() else state
    if isinstance(state, dict):
        return type(state)((key, without_values(item)) for key, item in state.items())
    if isinstance(state, list | tuple):
        return type(state)(map(without_values, state))
    return state


def base_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer that ZeRO wraps."""
    inner: dict[str, Any] = state["optimizer_state_dict"]
    found: dict[str, Any] = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
    return found


def steps_of(state: dict[str, Any]) -> set[float]:
    return {float(kept["step"]) for kept in base_of(state)["state"].values()}


@pytest.mark.parametrize("kind", ["small", "full"])
@pytest.mark.parametrize("module", ["lora", "uneven"])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_equals_a_save_at_that_world_size(
    checkpoints: Checkpoints, tmp_path: Path, stage: int, number: int, module: str, kind: str
) -> None:
    source = checkpoints(stage, module=module) / f"{kind}.ckpt"
    theirs = checkpoints(stage, number, module=module) / f"{kind}.ckpt"
    before = snapshot(source)
    done = reshard(source, tmp_path / "out.ckpt", ranks=number)
    assert snapshot(source) == before
    assert sorted(snapshot(tmp_path / "out.ckpt")) == names_of_copy(theirs)
    assert (done.zero_stage, done.ranks_before, done.ranks) == (stage, 2, number)
    assert not verify(tmp_path / "out.ckpt").problems
    assert inspect(tmp_path / "out.ckpt").world_size == number
    record = record_in(tmp_path / "out.ckpt")
    assert (record.world_size, record.trained_world_size) == (number, 2)
    assert record.left_out == record_in(source).left_out
    ours, real = files_of(tmp_path / "out.ckpt"), without_gaps(files_of(theirs))
    for name, state in ours.items():
        if name.endswith("model_states.pt"):
            for one in (state, real[name]):
                one.pop("global_samples")
                assert {"seen"} & set(map(plain, one["module"]))
        else:
            assert steps_of(state) == steps_of(loaded(next(source.rglob("*optim_states.pt"))))
        assert_same(without_values(state), without_values(real[name]), name)


def weights(checkpoint: Path, to: Path) -> dict[str, bytes]:
    consolidate(checkpoint, to)
    found = {name: raw(tensor) for name, tensor in weights_of(to).items()}
    to.unlink()
    return found


def clear_padding(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """ZeRO-3 saves uninitialized memory beyond the partitions of the two uneven parameters; we save zeros.

    Its masters have attributes, by which it finds them in memory.
    """
    cleared = 0
    for flat in theirs["optimizer_state_dict"]["fp32_flat_groups"]:
        vars(flat).clear()
    for one, other in zip(flats_of(theirs), flats_of(ours), strict=True):
        apart = one != other
        cleared += int(apart.sum())
        one[apart & (other == 0)] = 0
    assert cleared <= 2 * 3  # of the masters and of both moments


def flats_of(state: dict[str, Any]) -> list[torch.Tensor]:
    kept = [one[key] for one in base_of(state)["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    return [*(flat.data for flat in state["optimizer_state_dict"]["fp32_flat_groups"]), *kept]


@pytest.mark.parametrize("kind", ["small", "full"])
@pytest.mark.parametrize("number", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_there_and_back(checkpoints: Checkpoints, tmp_path: Path, stage: int, number: int, kind: str) -> None:
    source = checkpoints(stage, module="uneven") / f"{kind}.ckpt"
    there, back = tmp_path / "there.ckpt", tmp_path / "back.ckpt"
    reshard(source, there, ranks=number)
    assert len(list(there.rglob("*optim_states.pt"))) == number
    assert weights(there, tmp_path / "x.ckpt") == weights(source, tmp_path / "x.ckpt")
    reshard(there, back, ranks=2)
    ours, theirs = files_of(back), without_gaps(files_of(source))
    assert record_in(back).trained_world_size == 2
    assert ours.keys() == theirs.keys()
    for name, state in ours.items():
        if stage == 3 and not name.endswith("model_states.pt"):
            clear_padding(theirs[name], state)
        assert_same(state, theirs[name], name)
        # Each has its own: of one count that all share, each optimizer would count the others' steps.
        if not name.endswith("model_states.pt"):
            kept = base_of(state)["state"].values()
            places = [one["step"].data_ptr() for one in kept if isinstance(one["step"], torch.Tensor)]
            assert len(places) == len(set(places))


def in_every(kind: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        for file in path.rglob(f"*{kind}_states.pt"):
            changed(file, change)

    return do


CANNOT: dict[str, tuple[int, Callable[[Path], None]]] = {
    "MiCS": (3, in_every("model", lambda state: state["ds_config"]["zero_optimization"].update(mics_shard_size=2))),
    "elastic_checkpoint": (
        2,
        in_every("optim", lambda state: state["optimizer_state_dict"].update(base_optimizer_state=[])),
    ),
    "'param_alignment_paddings' does not fit": (
        2,
        in_every("optim", lambda state: state["optimizer_state_dict"].update(param_alignment_paddings=[[0, 4]])),
    ),
    "groups of experts": (
        3,
        in_every("optim", lambda state: state["optimizer_state_dict"].update(ds_zero_partition_groups=[0])),
    ),
    "the format of its optimizer's state is unknown": (2, in_every("optim", lambda state: base_of(state).clear())),
    "'absmax'": (2, in_every("optim", lambda state: base_of(state)["state"][0].update(absmax=torch.ones(7)))),
    "a rank's shard of 'exp_avg'": (
        3,
        lambda path: changed(max(path.rglob("*optim_states.pt")), lambda state: shorten(base_of(state)["state"][0])),
    ),
    "are quantized": (3, in_every("model", lambda state: quantize(state["frozen_param_fragments"]))),
    "'model.base_model.model.model.norm.weight'": (
        3,
        in_every("model", lambda state: state["frozen_param_fragments"].popitem()),
    ),
}


def shorten(kept: dict[str, Any]) -> None:
    kept["exp_avg"] = kept["exp_avg"][:-1].clone()


def quantize(fragments: dict[str, Any]) -> None:
    for name, tensor in fragments.items():
        fragments[name] = tensor.to(torch.int8)


@pytest.mark.once
@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_be_resharded(checkpoints: Checkpoints, tmp_path: Path, why: str) -> None:
    stage, change = CANNOT[why]
    shutil.copytree(checkpoints(stage) / "full.ckpt", tmp_path / "in.ckpt")
    change(tmp_path / "in.ckpt")
    with pytest.raises(CheckpointError) as refused:
        reshard(tmp_path / "in.ckpt", tmp_path / "out.ckpt", ranks=3)
    assert why in str(refused.value)
    assert [item.name for item in tmp_path.iterdir()] == ["in.ckpt"]


@pytest.mark.once
def test_nothing_to_do(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for stage, ranks, why in ((0, 3, "can resume from it as it is"), (2, 2, "already is a checkpoint of 2 ranks in")):
        with pytest.raises(CheckpointError, match=why):
            reshard(checkpoints(stage) / "small.ckpt", tmp_path / "out.ckpt", ranks=ranks)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ranks": 0}, "ranks must be 1 or more, not 0"),
        ({"stage": 4}, "stage must be 0, 1, 2 or 3, not 4"),
        ({}, "pass ranks, stage or precision"),
    )
    for options, why in wrong:
        with pytest.raises(ValueError, match=why):
            reshard(checkpoints(2) / "small.ckpt", tmp_path / "out.ckpt", **options)


@pytest.mark.short
@pytest.mark.once
def test_the_command(checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = checkpoints(2) / "small.ckpt", tmp_path / "out.ckpt"
    assert main(["reshard", str(source), str(target), "--ranks", "4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Would write {target}: ")
    assert said.endswith(" ZeRO stage 2, for 4 ranks instead of 2.\n")
    assert not target.exists()
    assert main(["reshard", str(source), str(target), "--ranks", "4"]) == 0
    assert capsys.readouterr().out == said.replace("Would write", "Wrote")
    assert main(["reshard", str(source), str(target), "--ranks", "4"]) == 1
    assert capsys.readouterr().err == (
        f"ds-frozen-patch: {target} already exists. Choose another path for the output, or remove it first.\n"
    )

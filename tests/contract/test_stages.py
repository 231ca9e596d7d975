"""Promise 28: a run goes on in another ZeRO stage and precision, and with another number of ranks.

`ci/measure/stage_pairs.py` has the table of all pairs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from kit import stages
from kit.checkpoints import changed, loaded, snapshot, unmark
from torch.utils.cpp_extension import get_default_build_root

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, consolidate, prune, reshard, verify
from ds_frozen_patch.checkpoint.format.archive import read_archive
from ds_frozen_patch.checkpoint.zero import states as states_of_files
from ds_frozen_patch.checkpoint.zero.groups import BASE_STATE
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.common.overrides import overridden

pytestmark = [pytest.mark.promise(28), pytest.mark.everyday]

COMPILED = {"FusedAdam": "fused_adam", "DeepSpeedCPUAdam": "cpu_adam"}
"""Optimizers of DeepSpeed that it compiles when they are first used, and the names of what it compiles."""


def is_built(name: str) -> bool:
    return any(Path(get_default_build_root()).glob(f"*/{name}/{name}.so"))


needs_fused_adam = pytest.mark.skipif(not is_built("fused_adam"), reason="DeepSpeed has not compiled it yet")
SETTINGS = getattr(DeepSpeedZeroConfig, "model_fields", {})
BF16 = 2.0**-8  # the rounding of one value, relative


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`saved(number, stage=2)`: the folder of a run on so many ranks, what it held, and its losses after the save."""
    made: dict[str, Any] = {}

    def get(number: int, **options: Any) -> tuple[Path, stages.State, list[float]]:
        key = repr((number, options))
        if key not in made:
            out = tmp_path_factory.mktemp("stages")
            made[key] = (out, *ranks(number, stages.train_and_save, out=str(out), **options)[0])
        found: tuple[Path, stages.State, list[float]] = made[key]
        return found

    return get


def resume_in(scratch: str, **options: Any) -> list[tuple[stages.State, list[float], int]]:
    """Resume with a temporary folder that no other process uses."""
    tempfile.tempdir = scratch
    try:
        return stages.resume_from(**options)
    finally:
        tempfile.tempdir = None


def assert_goes_on(
    ranks: Any,
    number: int,
    sources: list[tuple[Path, stages.State, list[float]]],
    within: float = 1e-6,
    kinds: tuple[str, ...] = ("small", "full"),
    **options: Any,
) -> None:
    """Assert that a run holds what the others held, bit for bit, and that its losses go on as theirs did."""
    paths = [str(source / name) for source, _, _ in sources for name in kinds]
    before = {path: snapshot(Path(path)) for path in paths}
    with tempfile.TemporaryDirectory() as scratch:
        found = ranks(number, resume_in, scratch=scratch, paths=paths, **options)[0]
        assert not list(Path(scratch).iterdir())
    expected = [source for source in sources for _ in kinds]
    for path, (state, losses, seen), (_, there, continued) in zip(paths, found, expected, strict=True):
        assert stages.difference(state, there) == 0, path
        assert stages.apart(losses, continued) <= within, path
        assert seen == stages.STEPS + stages.NEXT
    assert {path: snapshot(Path(path)) for path in paths} == before


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        pytest.param(0, 1, marks=pytest.mark.once),
        pytest.param(1, 3, marks=pytest.mark.once),
        (2, 3),
        pytest.param(3, 3, marks=pytest.mark.short),
        pytest.param(0, 2, marks=pytest.mark.short),
    ],
)
def test_another_stage(ranks: Any, saved: Any, stage: int, number: int) -> None:
    """From each stage, trainable-only and full."""
    sources = [saved(2, stage=before) for before in range(4)]
    assert_goes_on(ranks, number, sources, stage=stage)


@pytest.mark.once
@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_checkpoint_onto_another_base(ranks: Any, saved: Any, stage: int) -> None:
    sources = [saved(2, stage=before) for before in range(4)]
    assert_goes_on(ranks, 2, sources, kinds=("full",), stage=stage, seed=7)


def pickles_read(paths: list[str]) -> list[set[str]]:
    """The files whose pickles a load reads to reshard them."""
    ds_frozen_patch.patch()
    found: list[set[str]] = []

    def read(file: Path) -> Any:
        found[-1].add(file.name)
        return read_archive(file)

    for path in paths:
        engine = stages.begin(3)
        found.append(set())
        with overridden([(states_of_files, "read_archive", read)]):
            engine.load_checkpoint(path)
    return found


@pytest.mark.once
def test_a_rank_reads_no_model_states_of_others(ranks: Any, saved: Any) -> None:
    """In ZeRO-3 they are large and alike, unless they have shards of frozen parameters."""
    source = saved(3, stage=3)[0]
    everything = {file.name for file in (source / "small" / "a").glob("*_states.pt")}
    for rank, (small, full) in enumerate(ranks(2, pickles_read, paths=[str(source / "small"), str(source / "full")])):
        names = {f"zero_pp_rank_{index}_mp_rank_00_model_states.pt" for index in {0, rank}}
        assert small == names | {name for name in everything if name.endswith("optim_states.pt")}
        assert full == everything


class Reticent(stages.Net):
    """Its own `state_dict` leaves a frozen parameter out."""

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        del state[f"{prefix}base.weight"]
        return state


def frozen_values(paths: list[str], stage: int, loads: bool) -> list[Any]:
    """That parameter after each load onto another base, or at a full save."""
    ds_frozen_patch.patch()
    found = []
    for path in paths:
        with overridden([(stages, "Net", Reticent)]):
            engine = stages.begin(stage, seed=7 if loads else 1)
        stages.go_on(engine, 1)
        if loads:
            engine.load_checkpoint(path)
        else:
            with ds_frozen_patch.full_checkpoint():
                engine.save_checkpoint(path, tag="a")
        with zero.GatheredParameters([engine.module.base.weight]):
            found.append(engine.module.base.weight.tolist())
    return found


@pytest.mark.once
@pytest.mark.parametrize(("stage", "number"), [(0, 1), (2, 3), (3, 3)])
def test_tensors_that_are_not_contiguous(ranks: Any, saved: Any, stage: int, number: int) -> None:
    sources = [saved(2, stage=before, strided=True) for before in (0, 2, 3)]
    assert_goes_on(ranks, number, sources, stage=stage, strided=True)


@pytest.mark.once
def test_what_the_own_state_dict_of_a_module_leaves_out(ranks: Any, tmp_path: Path) -> None:
    """From ZeRO-2 on, DeepSpeed saves it beside the state dict."""
    paths = [str(tmp_path / str(stage)) for stage in (2, 3)]
    values = [ranks(2, frozen_values, paths=[path], stage=int(path[-1]), loads=False)[0][0] for path in paths]
    assert values == [stages.Net().base.weight.tolist()] * 2
    for stage in range(4):
        assert ranks(1, frozen_values, paths=paths, stage=stage, loads=True)[0] == values, stage


@pytest.mark.once
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_round_robin_gradients(ranks: Any, saved: Any, stage: int) -> None:
    sources = [saved(2, stage=before, round_robin=True) for before in (1, 2)] + [saved(2, stage=2), saved(2, stage=3)]
    for round_robin in (True, False):
        assert_goes_on(ranks, 3, sources, kinds=("small",), stage=stage, round_robin=round_robin)


@pytest.mark.short
def test_many_parameters(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """More in a group than a tensor can have dimensions: a list of sizes is not a shape."""
    options: dict[str, Any] = {"adapters": tuple(f"adapter_{index}" for index in range(130))}
    options["names"] = (*stages.NAMES, "adapters")
    run = saved(2, stage=2, **options)
    assert_goes_on(ranks, 2, [run], kinds=("small",), stage=3, **options)
    source, state, _ = run
    prune(source / "full", tmp_path / "pruned")
    for number, checkpoint in enumerate((source / "small", source / "full", tmp_path / "pruned")):
        consolidate(checkpoint, tmp_path / f"{number}.pt")
        weights = loaded(tmp_path / f"{number}.pt")
        weights = weights.get("state_dict", weights)
        assert all(torch.equal(weights[name], values["master"]) for name, values in state.items())


@pytest.mark.skipif("parameter_alignment" not in SETTINGS, reason="this DeepSpeed has no parameter_alignment")
def test_parameter_alignment(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """Gaps between the parameters, since DeepSpeed 0.19.8: a run goes on with them or without."""
    bf16: dict[str, Any] = {"precision": "bf16", "round_robin": True}
    aligned = [saved(2, stage=2, aligned=True), saved(2, stage=1, aligned=True, **bf16)]
    sources = [*aligned, saved(2, stage=2), saved(2, stage=3)]
    for number, is_aligned in ((2, True), (2, False), (3, True)):
        assert_goes_on(ranks, number, sources, within=2 * BF16, stage=2, aligned=is_aligned)
    assert_goes_on(ranks, 3, aligned, within=2 * BF16, stage=3)
    assert_goes_on(ranks, 2, sources[:1], within=2 * BF16, stage=1, aligned=True, **bf16)
    source, state, _ = aligned[0]
    file = next((source / "small" / "a").glob("*_0_*optim_states.pt"))
    assert any(map(any, loaded(file)["optimizer_state_dict"]["param_alignment_paddings"]))
    consolidate(source / "small", tmp_path / "weights.pt")
    weights = loaded(tmp_path / "weights.pt")
    weights = weights.get("state_dict", weights)
    assert all(torch.equal(weights[name], values["master"]) for name, values in state.items())


@pytest.mark.short
@pytest.mark.once
def test_another_sub_group_size(ranks: Any, saved: Any) -> None:
    """ZeRO-3's sub-groups then have other parameters: flat tensors of the same total size."""
    source = saved(2, stage=3)
    for size in (50, 10**9):
        assert_goes_on(ranks, 2, [source], within=0, stage=3, sub_group_size=size)
    for elastic in (None, False):
        options: dict[str, Any] = {"stage": 3, "sub_group_size": 50, "elastic": elastic}
        for kind, said in ranks(2, stages.refusal_of, path=str(source[0] / "small"), **options):
            assert kind == "CheckpointMismatchError"
            assert "in other sub-groups: zero_optimization.sub_group_size was 20 at the save, and is 50 now" in said
            assert ("patch(elastic=True)" in said) == (elastic is None)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "bf16"),
        pytest.param(3, "bf16", marks=pytest.mark.short),
        pytest.param(0, "fp32", marks=pytest.mark.once),
        pytest.param(2, "fp32", marks=pytest.mark.short),
    ],
)
def test_another_precision(ranks: Any, saved: Any, stage: int, precision: str) -> None:
    """The masters and moments stay as they are; the losses differ by the rounding of the weights in bf16."""
    before = [saved(2, stage=0)] if precision == "bf16" else []
    before += [saved(2, stage=at, precision=p) for at in (2, 3) for p in ("bf16", "fp32")]
    assert_goes_on(ranks, 2, before, within=2 * BF16, stage=stage, precision=precision)


HALF: dict[str, Any] = {"stage": 0, "precision": "bf16"}


@pytest.mark.once
@stages.trains_in_half
@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("FusedAdam", marks=needs_fused_adam)])
def test_stage_0_in_bf16(ranks: Any, saved: Any, tmp_path: Path, optimizer: str) -> None:
    """It has fp32 masters: one for each parameter, or with FusedAdam a flat one for each group."""
    sources = [
        saved(2, stage=stage, precision=precision, optimizer=optimizer)
        for stage, precision in ((0, "bf16"), (0, "fp32"), (2, "fp32"), (3, "bf16"))
    ]
    assert_goes_on(ranks, 3, sources, within=4 * BF16, optimizer=optimizer, **HALF)
    for stage, precision in ((0, "fp32"), (1, "bf16"), (3, "bf16")):
        options: dict[str, Any] = {"stage": stage, "precision": precision, "optimizer": optimizer}
        assert_goes_on(ranks, 3, sources[:1], within=4 * BF16, **options)
    source, state, _ = sources[0]
    reshard(source / "small", tmp_path / "out", stage=2)
    options = {"paths": [str(tmp_path / "out")], "stage": 2, "precision": "bf16", "elastic": None}
    ((resumed, _, _),) = ranks(2, stages.resume_from, optimizer=optimizer, **options)[0]
    assert stages.difference(resumed, state) == 0


@pytest.mark.short
@pytest.mark.once
@stages.trains_in_half
def test_stage_0_in_another_format(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """Without masters, or with none at all, a load or `reshard` says so; nothing is loaded half."""
    source = saved(2, **HALF)[0] / "small"
    for path, options in ((source, {"stage": 0}), (saved(2, stage=0)[0] / "small", HALF)):
        for elastic in (None, False):
            for kind, said in ranks(2, stages.refusal_of, path=str(path), elastic=elastic, **options):
                assert kind == "CheckpointMismatchError"
                assert said.startswith("The checkpoint's optimizer has its fp32 masters in another format")
                assert ("patch(elastic=True)" in said) == (elastic is None)
    shutil.copytree(source, tmp_path / "in")
    for file in (tmp_path / "in" / "a").glob("*_states.pt"):
        changed(file, lambda state: state.update(optimizer=None))
    unmark(tmp_path / "in")
    with pytest.raises(CheckpointError, match="no optimizer state with fp32 masters"):
        reshard(tmp_path / "in", tmp_path / "out", stage=2)


@pytest.mark.once
@stages.trains_in_half
def test_gradients_in_fp32(ranks: Any, saved: Any) -> None:
    """In bf16 with `grad_accum_dtype` fp32: which of its optimizers stage 1 has depends on DeepSpeed's release."""
    options: dict[str, Any] = {"stage": 1, "precision": "bf16", "accumulates": "fp32"}
    source = saved(2, **options)
    for stage, number in ((1, 3), (3, 2)):
        assert_goes_on(ranks, number, [source], within=2 * BF16, stage=stage, precision="bf16")
    others = [source, saved(2, **HALF), saved(2, stage=3, precision="bf16")]
    assert_goes_on(ranks, 3, others, within=2 * BF16, **options)


def in_fp16(source: Path, to: Path) -> Path:
    """A copy of a bf16 checkpoint as a run in fp16 would have saved it; the CPU cannot train in fp16."""

    def convert(state: dict[str, Any]) -> None:
        state["ds_config"].pop("bf16")
        state["ds_config"]["fp16"] = {"enabled": True}
        if "module" in state:
            state["module"] = {n: v.half() if v.is_floating_point() else v for n, v in state["module"].items()}
        else:
            kept = state["optimizer_state_dict"]
            kept["loss_scaler"], kept["dynamic_loss_scale"] = (
                DynamicLossScaler(2**12, 1000, 1.0, 2, False, True, torch.float16),
                True,
            )

    shutil.copytree(source, to)
    for file in (to / "a").glob("*_states.pt"):
        changed(file, convert)
        file.rename(file.with_name(file.name.removeprefix("bf16_")))
    (to / "a" / RECORD).unlink()
    return to


@pytest.mark.once
@stages.trains_in_half
@pytest.mark.parametrize("stage", [2])
def test_fp16_to_bf16(ranks: Any, saved: Any, tmp_path: Path, stage: int) -> None:
    given = []
    for before in (0, 2):
        source, state, losses = saved(2, stage=before, precision="bf16")
        in_fp16(source / "small", tmp_path / f"{before}" / "small")
        given.append((tmp_path / f"{before}", state, losses))
    assert_goes_on(ranks, 3, given, within=2 * BF16, kinds=("small",), stage=stage, precision="bf16")
    reshard(tmp_path / "2" / "small", tmp_path / "out", ranks=1)
    (kept,) = (loaded(file) for file in (tmp_path / "out" / "a").glob("zero_pp_rank_0_*optim_states.pt"))
    assert kept["optimizer_state_dict"]["loss_scaler"].dynamic  # it is still of fp16


def loss_scaling(path: str, stage: int, precision: str) -> list[Any]:
    """Whether an engine scales losses dynamically, and its scale, before and after a load."""
    ds_frozen_patch.patch()
    with overridden([(get_accelerator(), "is_fp16_supported", lambda: True)]):
        engine = stages.begin(stage, precision=precision)
    found = []
    for load in (None, engine.load_checkpoint):
        if load is not None:
            load(path)
        found.append((engine.optimizer.dynamic_loss_scale, float(engine.optimizer.loss_scale)))
    return found


@pytest.mark.once
@stages.trains_in_half
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_begins_with_its_own_loss_scale(ranks: Any, saved: Any, tmp_path: Path, stage: int) -> None:
    """DeepSpeed loads fp16 and fp32 into each other as they are."""
    fp16 = in_fp16(saved(2, stage=stage, precision="bf16")[0] / "small", tmp_path / "small")
    for path, precision in ((fp16, "fp32"), (saved(2, stage=stage)[0] / "small", "fp16")):
        before, after = ranks(2, loss_scaling, path=str(path), stage=stage, precision=precision)[0]
        assert before == after
        assert before[0] == (precision == "fp16")
    before, after = ranks(2, loss_scaling, path=str(fp16), stage=stage, precision="fp16")[0]
    assert before != after  # its own precision: as it was saved


@pytest.mark.once
@pytest.mark.parametrize("optimizer", ["Adagrad", "Lion", *COMPILED])
def test_other_optimizers(ranks: Any, saved: Any, optimizer: str) -> None:
    if optimizer in COMPILED and not is_built(COMPILED[optimizer]):
        pytest.skip(f"DeepSpeed's {optimizer} is not compiled yet, and that takes minutes")
    sources = [saved(2, stage=before, optimizer=optimizer) for before in (0, 2, 3)]
    for stage in (0, 2, 3):
        assert_goes_on(ranks, 3, sources, kinds=("small",), stage=stage, optimizer=optimizer)


@pytest.mark.once
def test_steps_that_are_counted_once_for_each_group(saved: Any, tmp_path: Path) -> None:
    """As FusedAdam does in stage 0, whether it is compiled here or not."""

    def count_for_the_last(state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        last = [group["params"][-1] for group in optimizer["param_groups"]]
        for index, kept in optimizer["state"].items():
            kept["step"] = stages.STEPS if index in last else 0

    shutil.copytree(saved(2, stage=0)[0] / "small", tmp_path / "in")
    for file in (tmp_path / "in" / "a").glob("*_states.pt"):
        changed(file, count_for_the_last)
    for stage in (2, 3):
        reshard(tmp_path / "in", out := tmp_path / str(stage), stage=stage, ranks=3)
        files = list((out / "a").glob("*optim_states.pt"))
        inner = [loaded(file)["optimizer_state_dict"][BASE_STATE[stage]]["state"] for file in files]
        assert len(files) == 3
        assert {kept["step"] for state in inner for kept in state.values()} == {stages.STEPS}


@pytest.mark.once
def test_muon_needs_a_fresh_optimizer(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """In DeepSpeed each rank keeps the momentum of whole matrices, also of those that two ranks share."""
    source, state, _ = saved(1, stage=2, optimizer="Muon")
    with pytest.raises(CheckpointError, match=r"the momentum of whole parameters\. .* patch\(restart_optimizer=True\)"):
        reshard(source / "small", tmp_path / "out", ranks=2)
    options = {"paths": [str(source / "small")], "optimizer": "Muon", "restart": True}
    ((resumed, _, _),) = ranks(2, stages.resume_from, stage=2, **options)[0]
    assert stages.difference(masters(resumed), masters(state)) == 0


def masters(state: stages.State) -> stages.State:
    return {name: {"master": values["master"]} for name, values in state.items()}


@pytest.mark.once
@pytest.mark.parametrize(("stage", "number"), [(0, 3), (1, 2), pytest.param(3, 2, marks=pytest.mark.short), (3, 3)])
def test_a_fresh_optimizer(ranks: Any, saved: Any, tmp_path: Path, stage: int, number: int) -> None:
    """Of another kind than the one that was saved: its moments are zero, and its masters those of the checkpoint."""
    sources = [saved(2, stage=before, optimizer="SGD") for before in (0, 2, 3)]
    paths = [str(source / "small") for source, _, _ in sources]
    found = ranks(number, stages.resume_from, paths=paths, stage=stage, restart=True)[0]
    for index, (source, before, _) in enumerate(sources):
        state, losses, _ = found[index]
        assert stages.difference(masters(state), masters(before)) == 0
        assert all(not values[key].any() for values in state.values() for key in values.keys() - {"master", "step"})
        assert stages.apart(losses, found[0][1]) <= 1e-6
        made = tmp_path / str(index)
        reshard(source / "small", made, stage=stage, ranks=number, restart_optimizer=True)
        size = 20 if index == 2 else 10**9  # as in the configuration that saved it, or DeepSpeed's default
        options = {"stage": stage, "optimizer": "SGD", "elastic": None, "sub_group_size": size}
        ((state, _, _),) = ranks(number, stages.resume_from, paths=[str(made)], **options)[0]
        assert stages.difference(masters(state), masters(before)) == 0


@pytest.mark.once
def test_blocks_need_a_fresh_optimizer(ranks: Any, saved: Any, tmp_path: Path) -> None:
    """As 8-bit optimizers have them: a scale for each block of elements."""
    source, state, _ = saved(2, stage=2)
    shutil.copytree(source / "small", tmp_path / "in")
    for file in (tmp_path / "in" / "a").glob("*optim_states.pt"):
        changed(
            file,
            lambda kept: kept["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(absmax=torch.ones(5)),
        )
    with pytest.raises(CheckpointError, match=r"'absmax' .* patch\(restart_optimizer=True\)"):
        reshard(tmp_path / "in", tmp_path / "out", ranks=3)
    found = ranks(3, stages.resume_from, paths=[str(tmp_path / "in")], stage=3, restart=True)[0]
    assert stages.difference(masters(found[0][0]), masters(state)) == 0


@pytest.mark.short
@pytest.mark.once
def test_it_can_be_forbidden(ranks: Any, saved: Any) -> None:
    path = saved(2, stage=2)[0] / "small"
    bf16 = saved(2, stage=2, precision="bf16")[0] / "small"
    why = "patch(elastic=False) or DS_FROZEN_PATCH_ELASTIC=0 forbids to reshard it automatically."
    of_stage_2 = "in ZeRO stage 1 or 2 at world size 2 in"
    for number, source, options, before, now in (
        (2, path, {"stage": 3}, f"{of_stage_2} fp16 or fp32", "in ZeRO stage 3 at world size 2 in fp16 or fp32"),
        (2, path, {"stage": 0}, f"{of_stage_2} fp16 or fp32", "in ZeRO stage 0 in fp32"),
        (3, path, {"stage": 2}, f"{of_stage_2} fp16 or fp32", "in ZeRO stage 1 or 2 at world size 3 in fp16 or fp32"),
        (2, bf16, {"stage": 2}, f"{of_stage_2} bf16", f"{of_stage_2} fp16 or fp32"),
        (2, path, {"stage": 2, "precision": "bf16"}, f"{of_stage_2} fp16 or fp32", f"{of_stage_2} bf16"),
    ):
        for kind, message in ranks(number, stages.refusal_of, path=str(source), elastic=False, **options):
            assert kind == "CheckpointMismatchError"
            assert message.startswith(
                f"The checkpoint was saved {before}, and DeepSpeed cannot load it {now}. {why} To reshard it by hand:"
            ), message


@pytest.mark.short
@pytest.mark.once
@pytest.mark.parametrize("before", [0, 2, 3])
def test_by_hand(ranks: Any, saved: Any, tmp_path: Path, before: int) -> None:
    """`reshard` writes what such a run loads without any option."""
    source, state, losses = saved(2, stage=before)
    for name in ("small", "full"):
        paths = []
        for stage in {0, 1, 2, 3} - {before}:
            out = tmp_path / f"{name}{stage}"
            done = reshard(source / name, out, stage=stage, ranks=3 if stage else None)
            assert (done.zero_stage_before, done.zero_stage, done.ranks_before) == (before, stage, 2)
            assert not verify(out).problems
            paths.append((stage, out))
        for stage, out in paths:
            found = ranks(3, stages.resume_from, paths=[str(out)], stage=stage, elastic=None, sub_group_size=10**9)[0]
            assert stages.difference(found[0][0], state) == 0
            assert stages.apart(found[0][1], losses) <= 1e-6


@pytest.mark.once
@pytest.mark.parametrize(("before", "precision"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_another_precision_by_hand(ranks: Any, saved: Any, tmp_path: Path, before: Any, precision: Any) -> None:
    for stage in (2, 3):
        source, state, losses = saved(2, stage=stage, precision=before)
        for name in ("small", "full"):
            reshard(source / name, out := tmp_path / f"{name}{stage}", precision=precision)
            assert not verify(out).problems
            options = {"paths": [str(out)], "stage": stage, "precision": precision, "elastic": None}
            ((resumed, after, _),) = ranks(2, stages.resume_from, **options)[0]
            assert stages.difference(resumed, state) == 0
            assert stages.apart(after, losses) <= 2 * BF16
        with pytest.raises(CheckpointError, match=f"already is a checkpoint of 2 ranks in ZeRO stage {stage}, and in"):
            reshard(source / "small", tmp_path / "same", precision=before)
    with pytest.raises(CheckpointError, match="for bf16 in stage 0, which keeps"):
        reshard(source / "small", tmp_path / "none", stage=0, precision="bf16")
    with pytest.raises(ValueError, match="precision must be 'bf16' or 'fp32', not 'fp16'"):
        reshard(source / "small", tmp_path / "none", precision="fp16")  # type: ignore[arg-type]
    assert not (tmp_path / "none").exists()


def save_by_deepspeed(out: str, stage: int) -> stages.State:
    ds_frozen_patch.patch()
    engine = stages.begin(stage)
    stages.go_on(engine, 1)
    ds_frozen_patch.unpatch()
    engine.save_checkpoint(out, tag="a", exclude_frozen_parameters=True)
    return stages.state_of(engine)


@pytest.mark.promise(6)
@pytest.mark.once
@pytest.mark.parametrize("stage", [2, 3])
def test_what_deepspeed_has_left_out(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Nobody has recorded it, so the base cannot be verified."""
    state = ranks(2, save_by_deepspeed, out=str(tmp_path / "in"), stage=stage)[0]
    reshard(tmp_path / "in", tmp_path / "one", ranks=1)
    for path, elastic in ((tmp_path / "in", True), (tmp_path / "one", None)):
        ((resumed, _, _),) = ranks(1, stages.resume_from, paths=[str(path)], elastic=elastic, stage=stage)[0]
        assert stages.difference(resumed, state) == 0


@pytest.mark.once
def test_without_names(saved: Any, tmp_path: Path) -> None:
    """DeepSpeed does not say in stage 0 what the optimizer's states belong to; nobody guesses."""
    shutil.copytree(saved(2, stage=0)[0] / "full", tmp_path / "in")
    for file in (tmp_path / "in" / "a").glob("*_states.pt"):
        changed(file, lambda state: state.pop("param_shapes"))
    with pytest.raises(
        CheckpointError, match="DeepSpeed does not save which parameter each optimizer state belongs to"
    ):
        reshard(tmp_path / "in", tmp_path / "out", stage=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.once
def test_the_scaler_of_losses(saved: Any, tmp_path: Path) -> None:
    """Stage 0 in fp32 has none; a checkpoint of ZeRO needs one."""
    reshard(saved(2, stage=0)[0] / "small", tmp_path / "out", stage=3)
    for file in (tmp_path / "out" / "a").glob("*optim_states.pt"):
        kept = loaded(file)["optimizer_state_dict"]
        assert kept["loss_scaler"].loss_scale == 1
        assert not kept["dynamic_loss_scale"]
        assert all(isinstance(flat, torch.Tensor) for flat in kept["fp32_flat_groups"])

"""Promise 5: loading onto a different base raises an error at load, by name, before a step is taken."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from kit import runs
from kit.cell import CELL, PRECISION, Callback, DeepSpeedStrategy, ModelCheckpoint
from kit.checkpoints import left_out_of, model_states, record_in
from peft import LoraConfig, get_peft_model

import ds_frozen_patch
from ds_frozen_patch import fingerprint

pytestmark = pytest.mark.promise(5)

EMBEDDING = "model.base_model.model.model.embed_tokens.weight"
NORM = "model.base_model.model.model.norm.weight"
MLP = "model.base_model.model.model.layers.1.mlp.{}_proj.weight"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=(pytest.mark.everyday, pytest.mark.once))


class Changed(runs.LoraRun):
    """The run's model on a base that differs in one way."""

    def __init__(self, change: str, **options: Any) -> None:
        super().__init__(seed=2 if change == "another seed" else 1, **options)
        parameters = dict(self.named_parameters())
        embedding = parameters[EMBEDDING].data
        if change == "one element":
            embedding[-1, -1] = torch.nextafter(embedding[-1, -1].bfloat16(), torch.tensor(9.0).bfloat16()).float()
        elif change == "swapped rows":
            embedding[[3, 40]] = embedding[[40, 3]]
        elif change == "swapped tensors":
            gate, up = (parameters[MLP.format(name)].data for name in ("gate", "up"))
            gate[:], up[:] = up.clone(), gate.clone()
        elif change == "untied":
            head = self.model.base_model.model.lm_head
            head.weight = torch.nn.Parameter(torch.randn_like(head.weight), requires_grad=False)
        elif change == "new layer":
            parameters[MLP.format("down")].data.normal_()


def save(out: str, world_size: int, stage: int, **options: Any) -> None:
    ds_frozen_patch.patch()
    runs.trainer(out, world_size, stage, epochs=1, **options).fit(runs.LoraRun(), runs.batches(world_size))


Outcome = tuple[str | None, list[str], list[float]]


def load(out: str, world_size: int, stage: int, change: str, evaluate: bool, **patch: Any) -> Outcome:
    """Return what is raised, the messages logged, and the losses computed."""
    ds_frozen_patch.patch(**patch)
    module = Changed(change)
    trainer = runs.trainer(f"{out}/again", world_size, stage)
    run = trainer.test if evaluate else trainer.fit
    raised = None
    with runs.heard() as messages:
        try:
            run(module, runs.batches(world_size), ckpt_path=f"{out}/epoch=0.ckpt")
        except ds_frozen_patch.CheckpointMismatchError as error:
            raised = str(error)
    return raised, [m for m in messages if m.startswith("WARNING")], module.losses


@pytest.mark.parametrize(("stage", "world_size"), [*((stage, 2) for stage in range(4)), slow(1, 1), slow(3, 3)])
def test_one_element_of_the_last_row(ranks: Any, run_once: Any, tmp_path: Path, stage: int, world_size: int) -> None:
    run_once(tmp_path, world_size, save, world_size=world_size, stage=stage)
    for evaluate in (False, True):
        arguments = {"out": str(tmp_path), "world_size": world_size, "stage": stage, "evaluate": evaluate}
        for raised, warned, losses in ranks(world_size, load, **arguments, change="one element"):
            assert f"- {EMBEDDING}: saved " in raised
            assert "1 of 20 left-out parameters" in raised
            assert warned == []
            assert losses == []
        for raised, warned, _ in ranks(world_size, load, **arguments, change="nothing"):
            assert raised is None
            assert warned == []


@pytest.mark.everyday
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (3, 1)])
def test_at_another_world_size(ranks: Any, tmp_path: Path, stage: int, world_size: int) -> None:
    """Saved at world size 3, tested from at smaller ones."""
    ranks(3, save, out=str(tmp_path), world_size=3, stage=stage)
    arguments = {"out": str(tmp_path), "world_size": world_size, "stage": stage, "evaluate": True}
    for raised, warned, _ in ranks(world_size, load, **arguments, change="nothing"):
        assert (raised, warned) == (None, [])
    for raised, _, _ in ranks(world_size, load, **arguments, change="one element"):
        assert f"- {EMBEDDING}: saved " in raised


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("another seed", [EMBEDDING, "and 5 more"]),  # 15 random matrices; norms are ones under every seed
        ("swapped rows", [EMBEDDING]),
        ("swapped tensors", [MLP.format("gate"), MLP.format("up")]),
        ("new layer", [MLP.format("down")]),
        ("untied", ["model.base_model.model.lm_head.weight"]),
    ],
)
def test_other_bases(ranks: Any, run_once: Any, tmp_path: Path, change: str, names: list[str]) -> None:
    run_once(tmp_path, 2, save, world_size=2, stage=3)
    for raised, _, losses in ranks(2, load, out=str(tmp_path), world_size=2, stage=3, change=change, evaluate=False):
        assert all(f"- {name}" in raised for name in names)
        assert losses == []


def test_verify_base_warn_and_off(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    run_once(tmp_path, 2, save, world_size=2, stage=2)
    arguments = {"out": str(tmp_path), "world_size": 2, "stage": 2, "change": "one element", "evaluate": False}
    first, second = ranks(2, load, **arguments, verify_base="warn")
    assert first[0] is None
    assert len(first[1]) == 1
    assert EMBEDDING in first[1][0]
    assert second[1] == []
    assert len(first[2]) == runs.BATCHES
    for raised, warned, losses in ranks(2, load, **arguments, verify_base="off"):
        assert (raised, warned) == (None, [])
        assert len(losses) == runs.BATCHES
    assert [raised for raised, *_ in ranks(2, load_by_environment, **arguments)] == [None, None]


def load_by_environment(**arguments: Any) -> Any:
    os.environ["DS_FROZEN_PATCH_VERIFY_BASE"] = "off"
    try:
        return load(**arguments)
    finally:
        del os.environ["DS_FROZEN_PATCH_VERIFY_BASE"]


def prints(out: str, epoch: int = 0) -> dict[str, str]:
    left_out = record_in(Path(out, f"epoch={epoch}.ckpt")).left_out
    return {entry.name: entry.fingerprint or "" for entry in left_out}


@pytest.mark.everyday
def test_same_fingerprints_in_every_stage_and_world_size(ranks: Any, tmp_path: Path) -> None:
    found = []
    for world_size, stage in ((1, 0), (1, 3), (2, 1), (2, 3), (3, 2), (3, 3)):
        out = str(tmp_path / f"{world_size}-{stage}")
        ranks(world_size, save, out=out, world_size=world_size, stage=stage, precision=PRECISION)
        found.append(prints(out))
    assert len(found[0]) == 20
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in found[0].values())
    assert len(set(found[0].values())) == 16  # the norms are all alike
    assert all(other == found[0] for other in found)


def save_with(out: str, zero: dict[str, Any]) -> None:
    ds_frozen_patch.patch()
    strategy = DeepSpeedStrategy(config=runs.config(3, **zero))
    runs.trainer(out, 2, strategy=strategy, epochs=1).fit(runs.LoraRun(), runs.batches(2))


@pytest.mark.everyday
@pytest.mark.once
def test_same_fingerprints_with_offload_and_any_persistence(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save, out=str(tmp_path / "plain"), world_size=2, stage=2)
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    others: dict[str, Any] = {
        "none": {"stage3_param_persistence_threshold": 0},
        "hpz": {"zero_hpz_partition_size": 2},
    }
    for name, zero in ({"offload": offload} | others).items():
        ranks(2, save_with, alone=name == "hpz", out=str(tmp_path / name), zero=zero)
        assert prints(str(tmp_path / name)) == prints(str(tmp_path / "plain"))


def another_precision(out: str) -> tuple[Any, list[str]]:
    ds_frozen_patch.patch()
    trainer = runs.trainer(f"{out}/again", 2, 2, precision="32-true")
    with runs.heard() as messages:
        trainer.test(runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
    return None, [m for m in messages if m.startswith("WARNING")]


def test_a_base_in_another_precision_cannot_be_compared(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    run_once(tmp_path, 2, save, world_size=2, stage=2)
    first, second = ranks(2, another_precision, out=str(tmp_path))
    assert len(first[1]) == 1
    assert "20 of 20 left-out parameters cannot be compared" in first[1][0]
    assert second[1] == []


class Counts(Callback):
    """Counts the elements that are read for fingerprints, per epoch."""

    def __init__(self) -> None:
        self.read = [0]
        self.original = fingerprint.row_sums

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def counted(piece: torch.Tensor, offset: int) -> tuple[int, torch.Tensor]:
            self.read[-1] += len(piece)
            return self.original(piece, offset)

        fingerprint.row_sums = counted

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.read.append(0)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        fingerprint.row_sums = self.original


def saves_and_resumes(out: str, stage: int) -> tuple[list[int], list[int], int]:
    ds_frozen_patch.patch()
    counts = []
    for again in (False, True):
        counter = Counts()
        checkpoints = ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
        trainer = runs.trainer(out, 2, stage, epochs=3 + again, callbacks=[checkpoints, counter])
        module = runs.LoraRun(hidden=128, vocabulary=8192)
        trainer.fit(module, runs.batches(2), ckpt_path=f"{out}/epoch=2.ckpt" if again else None)
        counts.append(counter.read)
    frozen = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters() if not p.requires_grad)
    return counts[0], counts[1], frozen


@pytest.mark.parametrize("stage", [2, 3])
def test_the_pass_is_split_between_ranks(ranks: Any, tmp_path: Path, stage: int) -> None:
    first, second = ranks(2, saves_and_resumes, out=str(tmp_path), stage=stage)
    frozen = first[2]
    (_, *whole), resumed = ([a + b for a, b in zip(first[run], second[run], strict=True)] for run in (0, 1))
    # Training begins with a pass, and the first save compares all. A later save compares a sixteenth of the rows. A
    # resume reads the base before training.
    assert 2 * frozen <= whole[0] < 2.1 * frozen  # and some values to find copies
    assert all(frozen / 20 < share < frozen / 12 for share in whole[1:])
    assert resumed[0] == frozen <= resumed[1] < 1.1 * frozen
    assert 0.4 < first[0][1] / whole[0] < 0.6


class ChangesBase(Callback):
    """Changes a frozen parameter in place during the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        parameter = dict(pl_module.named_parameters())[NORM]
        if trainer.current_epoch == 1:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.mul_(2)


def changes_its_base(out: str, stage: int) -> tuple[list[str], list[float], list[float]]:
    ds_frozen_patch.patch()
    checkpoints = ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
    data, module = runs.batches(2), runs.LoraRun()
    with runs.heard() as messages:
        trainer = runs.trainer(out, 2, stage, epochs=3, callbacks=[checkpoints, ChangesBase()])
        trainer.fit(module, data)
    again = runs.LoraRun()
    runs.trainer(f"{out}/again", 2, stage, epochs=3).fit(again, data, ckpt_path=f"{out}/epoch=1.ckpt")
    return [m for m in messages if m.startswith("WARNING")], module.losses[2 * runs.BATCHES :], again.losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_base_changed_by_the_run(ranks: Any, tmp_path: Path, stage: int) -> None:
    (warned, *first), (silent, *second) = ranks(2, changes_its_base, out=str(tmp_path), stage=stage)
    assert len(warned) == 1
    assert f"because training has changed them or a checkpoint has replaced them: '{NORM}'. " in warned[0]
    assert silent == []
    before, after = (prints(str(tmp_path), epoch) for epoch in (0, 1))
    assert before.keys() - after.keys() == {NORM}  # from then on it is in the checkpoint
    assert all(whole == resumed for whole, resumed in (first, second))


def keeps(out: str, stage: int, **zero: Any) -> Any:
    """Save frozen parameters nevertheless: what the program builds for them does not matter."""
    ds_frozen_patch.patch(keep=["*.norm.weight", "*embed_tokens*"])

    def new_trainer(folder: str) -> Any:
        return runs.trainer(folder, 2, stage, strategy=DeepSpeedStrategy(config=runs.config(stage, **zero)))

    results = []
    for change, resume_from in (("nothing", None), ("one element", f"{out}/epoch=0.ckpt")):
        trainer = new_trainer(out if resume_from is None else f"{out}/again")
        module = Changed(change)
        trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
        results.append((module.losses[-runs.BATCHES :], runs.trained_state(module)))
    tested = []
    for change in ("nothing", "one element"):
        trainer = new_trainer(out)
        tested.append(trainer.test(Changed(change), runs.batches(2), f"{out}/epoch=1.ckpt", verbose=False))
    return results, tested


HPZ = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, {}), (2, {}), (3, {}), slow(3, HPZ)])
def test_keep(ranks: Any, tmp_path: Path, stage: int, zero: dict[str, Any]) -> None:
    results = ranks(2, keeps, alone=bool(zero), out=str(tmp_path), stage=stage, **zero)
    for (whole, resumed), (before, after) in results:
        assert resumed == whole
        assert after == before
    saved = model_states(tmp_path / "epoch=0.ckpt")[0]
    left_out = left_out_of(tmp_path / "epoch=0.ckpt")
    assert {NORM, EMBEDDING, "model.base_model.model.lm_head.weight"} <= saved["module"].keys()
    assert not left_out & {NORM, EMBEDDING, "model.base_model.model.lm_head.weight"}
    assert len(left_out) == 18


def keep_nothing(out: str) -> list[str]:
    ds_frozen_patch.patch(keep=["no.such.*"])
    with runs.heard() as messages:
        runs.trainer(out, 2, 2, epochs=1, enable_checkpointing=False).fit(runs.LoraRun(), runs.batches(2))
    return [m for m in messages if m.startswith("WARNING")]


def test_keep_without_a_match(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, keep_nothing, out=str(tmp_path))
    assert len(first) == 1
    assert "'no.such.*'" in first[0]
    assert second == []


def keep_with_its_entries(out: str) -> list[tuple[str, str]]:
    ds_frozen_patch.patch(keep=["base.weight"])
    runs.trainer(out, 2, 2, epochs=1).fit(runs.OnQuantized(), runs.batches(2))
    fits = [(runs.trainer(f"{out}/again", 2, 2).fit, runs.OnQuantized(value)) for value in (1.0, 2.0)]
    return [runs.outcome(fit, module, runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt") for fit, module in fits]


@pytest.mark.everyday
@pytest.mark.short
def test_entries_of_a_kept_parameter_are_saved_and_compared_with_it(ranks: Any, tmp_path: Path) -> None:
    for same, (kind, text) in ranks(2, keep_with_its_entries, out=str(tmp_path)):
        assert same == ("", "")
        assert kind == "CheckpointMismatchError"
        assert "base.weight.absmax" in text
    module = model_states(tmp_path / "epoch=0.ckpt")[0]["module"]
    names = {"base.weight", "base.weight.absmax", "base.weight.quant_state.bitsandbytes__nf4"}
    assert {name for name in module if name.startswith("base.")} == names


class FreezesLater(Callback):
    """Freezes a parameter that the optimizer holds after the first epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch >= 1:
            next(p for n, p in pl_module.named_parameters() if "lora_B" in n).requires_grad_(False)


def frozen_in_the_optimizer(out: str, stage: int) -> Any:
    ds_frozen_patch.patch()
    results = []
    for resume_from in (None, f"{out}/epoch=1.ckpt"):
        folder = out if resume_from is None else f"{out}/again"
        checkpoints = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = runs.trainer(out, 2, stage, epochs=3, callbacks=[checkpoints, FreezesLater()])
        module = runs.LoraRun()
        trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
        results.append((module.losses[-runs.BATCHES :], runs.trained_state(module)))
    return results


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_in_the_optimizer(ranks: Any, tmp_path: Path, stage: int) -> None:
    for whole, resumed in ranks(2, frozen_in_the_optimizer, out=str(tmp_path), stage=stage):
        assert resumed == whole
    saved = model_states(tmp_path / "epoch=1.ckpt")[0]
    assert sum("lora_B" in name for name in saved["module"]) == 4
    assert len(record_in(tmp_path / "epoch=1.ckpt").left_out) == 20


class Variant(runs.LoraRun):
    """What PEFT and frozen layers can make of a model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        llama = self.model.unload()
        if kind == "modules_to_save":
            lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["o_proj"], init_lora_weights=False)
            self.model = get_peft_model(llama, lora)
        elif kind == "several adapters":
            lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
            self.model = get_peft_model(llama, lora, adapter_name="one")
            self.model.add_adapter("two", lora)
            self.model.set_adapter("two")
        else:
            self.model = llama.requires_grad_(False)
            self.model.lm_head = torch.nn.Sequential(
                torch.nn.BatchNorm1d(8).requires_grad_(False), torch.nn.Linear(32, runs.VOCABULARY)
            )


def vary(out: str, stage: int, kind: str, resume_from: str | None) -> Any:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, stage, precision="32-true")
    torch.manual_seed(0)
    module = Variant(kind)
    trainer.fit(module, runs.batches(2), ckpt_path=resume_from)
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return (module.losses[-runs.BATCHES :], runs.trained_state(module)), frozen


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["modules_to_save", "several adapters", "batch norm"])
def test_variants(ranks: Any, tmp_path: Path, stage: int, kind: str) -> None:
    # Old releases of DeepSpeed leave zero.Init on for some classes, such as batch norms, once it was used in a process.
    alone = kind == "batch norm" and "deepspeed-on-cpu" in CELL.needs
    first, again = (
        ranks(2, vary, alone=alone, out=str(tmp_path / out), stage=stage, kind=kind, resume_from=resume_from)
        for out, resume_from in (("first", None), ("again", f"{tmp_path}/first/epoch=0.ckpt"))
    )
    for rank, ((whole, frozen), (resumed, _)) in enumerate(zip(first, again, strict=True)):
        saved = model_states(tmp_path / "first" / "epoch=0.ckpt")[0]["module"].keys()
        assert not [name for name in saved & frozen if ".one." not in name and ".modules_to_save." not in name]
        if kind == "several adapters":  # no base has the one that is not trained
            assert any(".one.weight" in name for name in frozen)
            assert any(".one.weight" in name for name in saved)
        elif kind == "modules_to_save":
            assert any("o_proj.modules_to_save.default.weight" in name for name in saved)
            assert any("o_proj.original_module.weight" in name for name in frozen)
        else:
            assert "model.lm_head.0.running_mean" in saved
            assert "model.lm_head.0.weight" in frozen
        if kind != "batch norm" or rank == 0:  # in ZeRO 0 to 2 DeepSpeed saves the buffers of rank 0 only
            assert resumed == whole

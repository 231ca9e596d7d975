"""Promise 28: a run goes on with other trained parameters: what was trained is restored by name, the rest is fresh."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from kit import owners, runs, stages
from kit.cell import LambdaCallback
from kit.checkpoints import left_out_of
from peft import LoraConfig

import ds_frozen_patch
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.load import elastic

pytestmark = [pytest.mark.promise(28), pytest.mark.everyday, pytest.mark.once]

BEFORE: dict[str, Any] = {"names": ("first", "second", "scale", "odd")}
NOW: dict[str, Any] = {"names": ("first", "odd", "last", "adapters"), "adapters": ("more",)}
FRESH = {"last.weight", "last.bias", "adapters.more.weight"}
FROZEN = {"second.weight", "scale"}


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`saved(stage)`: the folder of a run on two ranks, and what it held of its trained parameters."""
    made: dict[str, Any] = {}

    def get(stage: int, **options: Any) -> tuple[Path, stages.State]:
        key = repr((stage, options))
        if key not in made:
            out = tmp_path_factory.mktemp("changed")
            made[key] = out, ranks(2, stages.train_and_save, out=str(out), stage=stage, **BEFORE, **options)[0][0]
        found: tuple[Path, stages.State] = made[key]
        return found

    return get


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def go_on(paths: list[str], out: str, stage: int, seeds: dict[str, int] | None = None, **options: Any) -> Any:
    """What an engine holds after each load, what was said, its losses, and the same after a save and a plain load."""
    found = []
    for index, path in enumerate(paths):
        ds_frozen_patch.patch(elastic=True)
        engine = stages.begin(stage, seed=(seeds or {}).get(path, 1), **{**NOW, **options})
        with runs.heard() as said:
            engine.load_checkpoint(path)
        state, values = stages.state_of(engine), values_of(engine)
        engine.save_checkpoint(f"{out}/{index}", tag="checkpoint")
        losses = stages.go_on(engine, stages.NEXT)
        ds_frozen_patch.unpatch()
        ds_frozen_patch.patch()
        engine = stages.begin(stage, **{**NOW, **options})
        engine.load_checkpoint(f"{out}/{index}")
        again = stages.difference(stages.state_of(engine), state), stages.go_on(engine, stages.NEXT)
        found.append((state, values, losses, again, [line for line in said if "elastic" in line]))
        ds_frozen_patch.unpatch()
    return found


@pytest.mark.parametrize(
    ("before", "stage", "number", "precision"),
    [
        (0, 0, 2, "fp32"),
        pytest.param(0, 0, 2, "bf16", marks=stages.trains_in_half),
        (1, 3, 1, "fp32"),
        pytest.param(2, 2, 2, "bf16", marks=pytest.mark.short),
        pytest.param(3, 3, 2, "fp32", marks=pytest.mark.short),
        (3, 1, 3, "bf16"),
        (3, 1, 3, "bf16 to fp32"),
        pytest.param(1, 2, 2, "bf16 to fp32", marks=pytest.mark.short),
        (2, 3, 2, "bf16 to fp32"),
        (2, 0, 2, "bf16 to fp32"),
    ],
)
def test_restored_by_name(
    ranks: Any, saved: Any, tmp_path: Path, before: int, stage: int, number: int, precision: str
) -> None:
    """Onto the same base, and a full checkpoint onto another one, whose values it replaces."""
    dtypes = [torch.bfloat16 if name == "bf16" else torch.float32 for name in precision.split(" to ")]
    source, state = saved(before, precision=precision.split(" to ")[0])
    paths = [str(source / name) for name in ("small", "full")]
    options = {"stage": stage, "precision": precision.split(" to ")[-1], "seeds": {paths[1]: 7}}
    every_rank = ranks(number, go_on, paths=paths, out=str(tmp_path), **options)
    for (now, values, losses, (again, resumed), said), dtype in zip(
        every_rank[0], (dtypes[-1], dtypes[0]), strict=True
    ):
        # What the checkpoint has not trained is the program's, or rounded as the full checkpoint has it.
        model = {
            name: value.detach().to(dtypes[-1] if "adapters" in name else dtype)
            for name, value in stages.Net(**NOW).named_parameters()
        }
        assert now.keys() == (state.keys() - FROZEN) | FRESH
        kept = state.keys() & now.keys()
        assert stages.difference({n: now[n] for n in kept}, {n: state[n] for n in kept}) == 0
        for name in FRESH:
            assert torch.equal(now[name]["master"], model[name].float())
            assert (now[name].keys() <= {"master", "step"}) == (stage == 0)  # torch makes the state at the first step
            assert not any(now[name][key].any() for key in now[name].keys() - {"master", "step"})
        for name, value in values.items():
            expected = now[name]["master"] if name in now else state[name]["master"] if name in FROZEN else model[name]
            assert torch.equal(value, expected.to(dtypes[-1])), name
        assert again == 0
        assert resumed == losses
        assert stages.apart(losses, every_rank[0][0][2]) <= (1e-6 if dtypes[0] == dtypes[-1] else 2.0**-8)
        (line,) = said
        assert all(f"'{name}'" in line for name in FRESH | FROZEN)
    assert not [said for rank in every_rank[1:] for *_, said in rank if said]
    for index in range(2):
        left_out = left_out_of(tmp_path / str(index))
        assert not FROZEN & left_out
        assert index or sorted(left_out) == ["base.bias", "base.weight"]


def resume(path: str, stage: int, restart: bool = False, **options: Any) -> Any:
    """What an engine holds after a load, and its learning rates; it can train on."""
    ds_frozen_patch.patch(elastic=True, restart_optimizer=restart)
    engine = stages.begin(stage, lr=5e-3, round_robin=True, **options)
    engine.load_checkpoint(path)
    found = stages.state_of(engine), [group["lr"] for group in engine.optimizer.param_groups]
    assert all(loss == loss for loss in stages.go_on(engine, 2))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_other_parameter_groups(ranks: Any, saved: Any, stage: int) -> None:
    """As many as before keep the saved settings, others have the program's. A group can be new as a whole."""
    source, state = saved(stage)
    for number, model, rates in (
        (2, NOW, [1e-2, 1e-3]),
        (6, NOW, [5e-3, *[1e-3] * 5]),
        (3, BEFORE, [5e-3, 1e-3, 1e-3]),
        (2, {"names": BEFORE["names"][:3]}, [1e-2, 1e-3]),
    ):
        now, found = ranks(2, resume, path=str(source / "small"), stage=stage, number=number, **model)[0]
        kept = state.keys() & now.keys()
        assert stages.difference({n: now[n] for n in kept}, {n: state[n] for n in kept}) == 0
        assert found == rates
    options = {"path": str(source / "full"), "stage": stage, "restart": True, **NOW}
    now, _ = ranks(2, resume, **options)[0]
    assert all(torch.equal(now[name]["master"], state[name]["master"]) for name in kept & now.keys())
    assert not any(now[name][key].any() for name in now for key in ("exp_avg", "exp_avg_sq") if key in now[name])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_scheduler_with_a_setting_for_each_group(ranks: Any, saved: Any, number: int) -> None:
    """It goes on from its step, with the program's settings if there are more or fewer groups than before."""
    source, _ = saved(2, scheduled=True)
    options = {"path": str(source / "small"), "stage": 2, "number": number, "scheduled": True}
    _, rates = ranks(2, resume, **options, **NOW)[0]
    begun = [1e-2, 1e-3] if number == 2 else [5e-3, 1e-3, 1e-3][:number]
    assert rates == pytest.approx([rate / (1 + stages.STEPS) for rate in begun])


def failing_on_one_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*args, **kwargs)

    return fail


def refusals(out: str, small: str, full: str, stage: int) -> list[tuple[str, str]]:
    """What loads raise: without the option, onto another base, and after training."""
    found = [stages.refusal_of(small, stage, **NOW), stages.refusal_of(full, stage, names=("odd",))]
    found += [stages.refusal_of(small, stage, False, **NOW), stages.refusal_of(small, stage, True, **NOW, seed=7)]
    engine = stages.begin(stage, **NOW)
    engine.load_checkpoint(small)
    engine.save_checkpoint(f"{out}/more", tag="a")
    stages.go_on(engine, 1)
    found += [runs.refusal(engine.load_checkpoint, small), stages.refusal_of(f"{out}/more", stage, True, **BEFORE)]
    tempfile.tempdir = f"{out}/nowhere"  # nothing is written
    try:
        stages.begin(stage, **NOW).load_checkpoint(small)
    finally:
        tempfile.tempdir = None
    for name in ("read_states", "write_archive"):
        with overridden([(elastic, name, failing_on_one_rank(getattr(elastic, name)))]):
            found += [stages.refusal_of(small, stage, True, **NOW)]
    return found


@pytest.mark.short
def test_what_is_refused(ranks: Any, saved: Any, tmp_path: Path) -> None:
    source, _ = saved(3)
    offer = " Pass patch(elastic=True) or set DS_FROZEN_PATCH_ELASTIC=1 to resume with other trained parameters"
    options = {"out": str(tmp_path), "small": str(source / "small"), "full": str(source / "full"), "stage": 3}
    for found in ranks(2, refusals, **options):
        unfrozen, frozen, forbidden, base, trained, gone, *broken = found
        left_out = "The checkpoint left out parameters that the model now trains: 'last.bias', 'last.weight'."
        for (kind, said), begin in ((unfrozen, left_out), (frozen, "The checkpoint's trainable parameters are not")):
            assert kind == "CheckpointMismatchError"
            assert said.startswith(begin)
            assert offer in said
        assert forbidden[1].startswith(left_out)
        assert offer not in forbidden[1]
        assert "- last.weight: saved" in base[1]
        assert "- base.weight: saved" in base[1]
        assert "2 of 4 left-out parameters have other fingerprints.\n- last.weight: saved" in trained[1]
        assert "and not in the model, or under another name there: 'adapters.more.weight'" in gone[1]
        assert "Their trained values would be lost." in gone[1]
        assert [kind for kind, _ in broken] == ["CheckpointError"] * 2
        assert all("Input/output error" in said for _, said in broken)


def refusals_of_others(small: str, full: str, stage: int) -> list[tuple[str, str]]:
    return [stages.refusal_of(small, stage, **NOW), stages.refusal_of(full, stage, names=("odd",))]


@pytest.mark.short
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_refused_at_another_world_size(ranks: Any, saved: Any, stage: int) -> None:
    """Resharding is the default, but not for other trained parameters."""
    source, _ = saved(2)
    options = {"small": str(source / "small"), "full": str(source / "full"), "stage": stage}
    for unfrozen, frozen in ranks(1, refusals_of_others, **options):
        assert unfrozen[1].startswith("The checkpoint left out parameters that the model now trains: 'last.bias'")
        assert frozen[1].startswith("The checkpoint's trainable parameters are not the model's:")
        assert all("patch(elastic=True)" in said for _, said in (unfrozen, frozen))


class Rows(torch.nn.Module):
    """An embedding of which training changes one row, and a layer."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.layer = torch.nn.Embedding(200, 4), torch.nn.Linear(4, 1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(self.rows(index)).square().mean()
        return loss


def generations(out: str, stage: int) -> list[Any]:
    """The changed row after each load, the first of which freezes it, and what each save but the first leaves out."""
    ds_frozen_patch.patch(elastic=True)
    found = []
    for index, trained in enumerate(("rows", "layer", "layer", "layer")):
        module = Rows(trained)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        config = {**runs.config(stage), "train_micro_batch_size_per_gpu": 1}
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=True)[0]
        ds_frozen_patch.serve(engine)
        if index:
            engine.load_checkpoint(f"{out}/{index - 1}")
        engine.backward(engine(torch.tensor([1])))
        engine.step()
        with nullcontext() if index else ds_frozen_patch.full_checkpoint():
            engine.save_checkpoint(f"{out}/{index}", tag="checkpoint")
        found.append((values_of(engine)["rows.weight"][1].tolist(), left_out_of(f"{out}/{index}") if index else None))
    return found


@pytest.mark.short
def test_a_row_that_was_trained_is_kept(ranks: Any, tmp_path: Path) -> None:
    """Also where a sample of the parameter's values does not show it."""
    first, *others = ranks(1, generations, out=str(tmp_path), stage=2)[0]
    assert first[0] != Rows("rows").rows.weight[1].tolist()
    assert [row for row, _ in others] == [first[0]] * 3
    assert [left_out for _, left_out in others] == [set()] * 3


class Wider(runs.LoraRun):
    """Has an adapter more, in layers that had none, and trains the first one in its last layer alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
        self.model.base_model.set_adapter(["default", "second"])
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("second" in name or "layers.1.self_attn.v_proj.lora" in name)


def fit(out: str, module: type[runs.LoraRun], world_size: int, stage: int, resume: str | None = None) -> Any:
    """What the module holds when training begins, and when it has ended."""
    ds_frozen_patch.patch(elastic=None if resume is None else True)
    begun: dict[str, str] = {}
    run = module()
    note = LambdaCallback(on_train_start=lambda *_: begun.update(runs.trained_state(run)))
    trainer = runs.trainer(out, world_size, stage, epochs=1 if resume is None else 2, callbacks=[note])
    trainer.fit(run, runs.batches(world_size), ckpt_path=resume)
    trainer.save_checkpoint(f"{out}/run.ckpt")
    return begun, runs.trained_state(run)


@pytest.mark.short
@pytest.mark.parametrize(("stage", "number"), [(2, 2), (3, 1)])
def test_an_adapter_more(ranks: Any, tmp_path: Path, stage: int, number: int) -> None:
    """PEFT renames the base's parameters where it adds one."""
    _, state = ranks(2, fit, out=str(tmp_path / "first"), module=runs.LoraRun, world_size=2, stage=stage)[0]
    resume = str(tmp_path / "first" / "run.ckpt")
    out = str(tmp_path / "second")
    begun, after = ranks(number, fit, out=out, module=Wider, world_size=number, stage=stage, resume=resume)[0]
    for name, value in state.items():
        assert begun[name.replace("k_proj.", "k_proj.base_layer.")] == value
    moved = {name for name, value in after.items() if begun[name] != value}
    assert moved == {name for name in after if "second" in name or "layers.1.self_attn.v_proj.lora" in name} | {"seen"}
    kept = left_out_of(out + "/run.ckpt")
    assert kept
    assert not [name for name in kept if "lora_" in name]


def wrapped_by_peft(path: str, stage: int) -> Any:
    ds_frozen_patch.patch(elastic=True)
    engine = stages.begin(stage, peft=True)
    engine.load_checkpoint(path)
    return stages.state_of(engine), values_of(engine)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_peft_has_wrapped_since(ranks: Any, saved: Any, stage: int) -> None:
    """What was trained without PEFT is frozen under a name with PEFT's own prefix, and keeps its values."""
    source, state = saved(2)
    now, values = ranks(2, wrapped_by_peft, path=str(source / "small"), stage=stage)[0]
    assert all("lora_" in name for name in now)
    for name, kept in state.items():
        layer = name.replace("first.", "first.base_layer.")
        assert torch.equal(values[f"base_model.model.{layer}"], kept["master"])


def by_owner(by: str, out: str, stage: int) -> Any:
    """What an engine holds after an epoch, and after a resume that trains a layer more; the losses of both runs."""
    found: list[tuple[stages.State, list[float]]] = []
    for is_elastic, passes in ((None, owners.STEPS), (True, 0)):
        module = owners.model(owners.BY_HAND, 1)
        for name, parameter in module.named_parameters():
            parameter.requires_grad |= bool(is_elastic) and MORE in name
        with owners.served(elastic=is_elastic):
            run = owners.Run(by, out if is_elastic is None else f"{out}/again", 2, stage, module=module)
            seen = remember_before(run, passes)
            run.train(run.at(0, out) if is_elastic else None)
        found.append((seen[0], module.losses))
    return found


def remember_before(run: owners.Run, number: int) -> list[stages.State]:
    """A list that gets what the engine holds before a forward pass, counted from 0."""
    found: list[stages.State] = []
    calls = count()

    def remember(*_: Any) -> None:
        if next(calls) == number:
            found.append(stages.state_of(run.engine or run.trainer.model_wrapped))

    run.module.register_forward_pre_hook(remember)
    return found


MORE = "layers.0.mlp.up_proj"


@pytest.mark.parametrize(("by", "stage"), [("accelerate", 3), ("trainer", 2)])
def test_by_other_owners(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    for (saved, losses), (resumed, again) in ranks(2, by_owner, by=by, out=str(tmp_path), stage=stage):
        (fresh,) = resumed.keys() - saved.keys()
        assert MORE in fresh
        assert not any(resumed[fresh][key].any() for key in ("exp_avg", "exp_avg_sq"))
        assert stages.difference({name: resumed[name] for name in saved}, saved) == 0
        assert again[0] == losses[owners.STEPS]
        assert len(again) == owners.STEPS

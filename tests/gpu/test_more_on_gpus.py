"""More on GPUs: saves after a fit and in the background, Fabric, the owners beside Lightning, ops that DeepSpeed
compiles, and a resume with another number of GPUs, or on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import owners, runs, settings
from kit.cell import Fabric, FabricDeepSpeed
from kit.checkpoints import model_states
from kit.gpus import OFFLOAD, PARTITIONED, PLACES, Looks, Place, fit, on, skip_without, strategy
from kit.owners import OWNERS, Run
from safetensors.torch import load_file

import ds_frozen_patch

pytestmark = pytest.mark.gpu


CHANGES = [(PLACES[1], PLACES[0]), (PLACES[0], PLACES[1]), (PLACES[0], Place("cpu", 2)), (Place("cpu", 2), PLACES[0])]


def save_after_a_fit(place: Place, out: str, stage: int) -> Any:
    """Save after a fit, as many programs do.

    Lightning has moved the model to the CPU by then, and NCCL handles only GPUs.
    """
    ds_frozen_patch.patch(export="safetensors")
    looks = Looks()
    trainer = place.trainer(out, strategy(stage, PARTITIONED), looks, epochs=1)
    trainer.fit(runs.LoraRun(), place.data())
    trainer.save_checkpoint(f"{out}/small.ckpt")
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    return {name: looks.state[name] for name in (*looks.masters, "seen")}


@pytest.mark.promise(8)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_saves_after_a_fit(ranks: Any, tmp_path: Path, place: Place, stage: int) -> None:
    trained, *_ = on(ranks, place, save_after_a_fit, out=str(tmp_path), stage=stage)
    found = ds_frozen_patch.verify(tmp_path / "small.ckpt")
    assert (found.problems, found.trained, found.left_out) == ((), 8, 20)
    content = torch.load(tmp_path / "weights.ckpt", map_location="cpu", weights_only=False)
    weights, exported = content["state_dict"], load_file(tmp_path / "small.ckpt" / "trainable.safetensors")
    assert {name: runs.digest(value) for name, value in weights.items()} == trained
    assert {name: runs.digest(value.to(weights[name].dtype)) for name, value in exported.items()} == trained


def be_deterministic() -> None:
    """Do what Trainer's `deterministic` does."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def with_fabric(place: Place, out: str, stage: int) -> list[Any]:
    ds_frozen_patch.patch()
    be_deterministic()
    found: list[Any] = []
    for again in (False, True):
        chosen = FabricDeepSpeed(stage=stage, reduce_bucket_size=5_000_000)
        made = Fabric(accelerator=place.accelerator, devices=place.ranks, precision="bf16-mixed", strategy=chosen)
        made.launch()
        model, optimizer = runs.fabric_setup(made)
        state = {"model": model, "optimizer": optimizer}
        if again:
            made.load(f"{out}/small.ckpt", state)
        else:
            runs.fabric_epoch(made, model, optimizer)
            made.save(f"{out}/small.ckpt", state)
        found.append((runs.fabric_epoch(made, model, optimizer), runs.trained_state(model)))
    return found


@pytest.mark.promise(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_fabric(ranks: Any, tmp_path: Path, place: Place, stage: int) -> None:
    for whole, resumed in on(ranks, place, with_fabric, out=str(tmp_path), stage=stage):
        assert resumed == whole
        assert len(set(whole[0])) == runs.BATCHES
    for saved in model_states(tmp_path / "small.ckpt"):
        assert all("lora_" in name or name == "seen" for name in saved["module"])


def with_another_owner(place: Place, by: str, out: str, stage: int, **settings: Any) -> Any:
    be_deterministic()
    with owners.served(**settings):
        whole = Run(by, out, place.ranks, stage)
        losses, state = whole.train()
        return (losses[owners.STEPS :], state), Run(by, f"{out}/again", place.ranks, stage).train(whole.at(0))


@pytest.mark.promise(2)
@pytest.mark.parametrize("in_background", [False, True], ids=["", "async"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("by", OWNERS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_other_owners(ranks: Any, tmp_path: Path, place: Place, by: str, stage: int, in_background: bool) -> None:
    run = {"by": by, "out": str(tmp_path), "stage": stage, "async_save": in_background}
    for whole, resumed in on(ranks, place, with_another_owner, **run):
        assert resumed == whole
    saved = [torch.load(file, weights_only=False)["module"] for file in owners.model_files(tmp_path)]
    assert saved
    assert all("lora_" in name or name.endswith("count") for module in saved for name in module)


class Fused(runs.LoraRun):
    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(settings.trainable(self), lr=1e-2)


class Larger(runs.LoraRun):
    """DeepSpeed stores on NVMe only what has at least 1 MiB per rank."""

    def __init__(self) -> None:
        super().__init__(hidden=256, vocabulary=8192)


def train_and_resume(
    place: Place, out: str, stage: int, zero: dict[str, Any], model: Any, ours: bool = True, **settings: Any
) -> Any:
    if ours:
        ds_frozen_patch.patch(**settings)
    whole = fit(place, out, strategy(stage, zero), model())
    return whole, fit(place, f"{out}/again", strategy(stage, zero), model(), resume=f"{out}/epoch=0.ckpt")


def build(place: Place, op: str) -> None:
    """Have DeepSpeed compile an op, which takes minutes, or skip with what is missing for that."""
    program = "import setuptools; from deepspeed.accelerator import get_accelerator as get;"
    program += f"get().create_op_builder('{op}Builder').load()"
    environment = {**os.environ, **({"DS_ACCELERATOR": "cpu"} if place.accelerator == "cpu" else {})}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=500)
    if done.returncode:
        pytest.skip(f"DeepSpeed's {op} cannot be built here: {done.stderr.splitlines()[-1]}")


@pytest.mark.promise(2)
@pytest.mark.parametrize(
    ("op", "stage", "model"),
    [("FusedAdam", 2, Fused), ("FusedAdam", 3, Fused), ("CPUAdam", 2, settings.OnCpu), ("AsyncIO", 3, Larger)],
)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_ops_of_deepspeed(ranks: Any, tmp_path: Path, place: Place, op: str, stage: int, model: Any) -> None:
    """Ops that DeepSpeed compiles: optimizers, and those that read and write parameters on NVMe."""
    skip_without(place)
    build(place, op)
    nvme = {"offload_param": {**settings.NVME_PARAMETERS, "nvme_path": str(tmp_path / "nvme")}, **PARTITIONED}
    zero = {"CPUAdam": OFFLOAD, "AsyncIO": nvme}.get(op, {})
    run = {"alone": op == "AsyncIO", "stage": stage, "zero": zero, "model": model}
    found = on(ranks, place, train_and_resume, out=str(tmp_path), **run)
    if op == "CPUAdam":  # which may round differently after a load, see `settings.Setting.has_cpu_adam`
        assert found == on(ranks, place, train_and_resume, out=str(tmp_path / "plain"), ours=False, **run)
    else:
        assert all(whole == resumed for whole, resumed in found)
    for saved in model_states(tmp_path / "epoch=1.ckpt"):
        assert all("lora_" in name or name == "seen" for name in saved["module"])
    assert op != "AsyncIO" or any(file.stat().st_size > 2**20 for file in tmp_path.glob("nvme/**/*.swp"))


@pytest.mark.promise(20)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_saves_in_the_background(ranks: Any, tmp_path: Path, place: Place, stage: int) -> None:
    arguments = {"out": str(tmp_path), "stage": stage, "zero": PARTITIONED, "model": runs.LoraRun, "async_save": True}
    for whole, resumed in on(ranks, place, train_and_resume, **arguments):
        assert resumed == whole
    assert ds_frozen_patch.verify(tmp_path / "epoch=1.ckpt").problems == ()


def go_on(place: Place, out: str, stage: int, resume: str | None = None) -> list[float]:
    ds_frozen_patch.patch(elastic=True)
    module = runs.LoraRun()
    trainer = place.trainer(out, strategy(stage, {}), precision="32-true")
    trainer.fit(module, place.data(), ckpt_path=resume)
    return module.losses


@pytest.mark.promise(10)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
def test_the_loss_curve_continues(ranks: Any, tmp_path: Path, before: Place, after: Place, stage: int) -> None:
    skip_without(before)
    skip_without(after)
    whole = torch.tensor(on(ranks, before, go_on, out=str(tmp_path), stage=stage)).mean(0)
    path = str(tmp_path / "epoch=0.ckpt")
    resumed = torch.tensor(on(ranks, after, go_on, out=str(tmp_path / "again"), stage=stage, resume=path)).mean(0)
    torch.testing.assert_close(resumed, whole[runs.BATCHES :], rtol=1e-4, atol=0)  # without Adam's points: 1e-3

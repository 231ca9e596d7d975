"""Promises 1 to 3 with every DeepSpeed setting: saved, resumed and tested from; `kit/settings.py` lists them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import CELL, PRECISION, DeepSpeedStrategy
from kit.checkpoints import model_states
from kit.settings import CANNOT, SETTINGS, Cannot, Setting
from safetensors.torch import load_file

import ds_frozen_patch

pytestmark = [pytest.mark.promise(2), pytest.mark.everyday, pytest.mark.once, pytest.mark.settings]
ROUNDED = "on this CPU, DeepSpeed's own Adam rounds differently after a resume, from a full checkpoint as well"
BY_NAME = {setting.name: setting for setting in SETTINGS}
CANNOT_HERE = {(item.name, stage): item for item in CANNOT if CELL.name in item.cells for stage in item.stages}
# Settings that change what is saved, and how, are tests like others in their highest stage; `-m settings` runs all.
ALWAYS = (
    "bf16-true",
    "16-mixed",
    "several parameter groups",
    "`optimizer`: torch's AdamW, and `scheduler`",
    "`optimizer`: Muon",
    "accumulate_grad_batches=2",
    "`activation_checkpointing`",
    "`offload_param` and `offload_optimizer`: cpu",
    "`round_robin_gradients`, several parameter groups",
    "`stage3_param_persistence_threshold`: 1e9",
    "`sub_group_size`: several sub-groups, several parameter groups",
    "`mics_shard_size`: 1",
    "`compression_training`",
    "`load_from_fp32_weights`: false, bf16",
    "`elastic_checkpoint`",
)
ALL = pytest.mark.settings("all")
ROWS = [
    pytest.param(item.name, stage, marks=() if item.name in ALWAYS and stage == max(item.stages) else ALL)
    for item in SETTINGS
    for stage in item.stages
]


def or_says(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return what a run returns, or the error, if all ranks raise the same one and can go on afterwards."""

    @wraps(run)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return run(**arguments)
        except Exception as error:
            return {"says": f"{type(error).__name__}: {error}"}

    return answer


@or_says
def train(name: str, stage: int, out: str, ours: bool = True, **options: Any) -> dict[str, Any]:
    """Train without interruption, save, save the weights alone at the end; return what the model in memory returns."""
    if ours:
        cell.trainable_only()
    setting = BY_NAME[name]
    trainer, module = trainer_for(setting, stage, out, **options), setting.module()
    trainer.fit(module, runs.batches(2))
    if ours:
        trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    return {
        "run": (module.losses[-runs.BATCHES :], runs.trained_state(module), trainer.global_step),
        "learns": len(set(module.losses)) > runs.BATCHES,
        "is set": setting.is_set(trainer.strategy.deepspeed_engine),
        "dtypes": {parameter: str(p.dtype).removeprefix("torch.") for parameter, p in module.named_parameters()},
        "tested": trainer.test(module, runs.batches(2), verbose=False),
    }


@or_says
def resume(name: str, stage: int, out: str, ours: bool = True) -> dict[str, Any]:
    """Resume from the first checkpoint in a new run, and test from the last one."""
    if ours:
        cell.trainable_only()
    setting = BY_NAME[name]
    trainer, module = trainer_for(setting, stage, f"{out}/again"), setting.module()
    with runs.heard() as messages:
        trainer.fit(module, runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    fresh = trainer_for(setting, stage, out, enable_checkpointing=False)
    last = f"{out}/epoch=1.ckpt"
    return {
        "run": (module.losses, runs.trained_state(module), trainer.global_step),
        "tested": fresh.test(setting.module(), runs.batches(2), ckpt_path=last, verbose=False) if ours else None,
        "warns": [message for message in messages if message.startswith("WARNING")],
    }


def trainer_for(setting: Setting, stage: int, out: str, **options: Any) -> Any:
    _lend_to_cpu()
    # In stage 0 releases differ in what they make of bf16.
    options = {"precision": PRECISION if stage else "32-true", **setting.options, **options}
    return runs.trainer(out, 2, strategy=DeepSpeedStrategy(config=setting.config_for(stage)), **options)


def _lend_to_cpu() -> None:
    """Add what DeepSpeed needs on a CPU: fast fp16 instructions, and streams."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    type(accelerator).Stream = staticmethod(lambda device=None: None)


@pytest.mark.parametrize(("name", "stage"), ROWS)
def test_saves_resumes_and_tests(
    ranks: Any, tmp_path: Path, request: Any, record_property: Any, name: str, stage: int
) -> None:
    record_property("setting", name)
    record_property("stage", stage)
    setting = BY_NAME[name]
    if setting.uses_nvme:
        request.getfixturevalue("async_io")
    run = partial(ranks, 2, alone=setting.alone, name=name, stage=stage)
    if cannot := CANNOT_HERE.get((name, stage)):
        record_property("note", cannot.says)
        check_that_it_cannot(run, tmp_path, cannot)
        if setting.uses_nvme:  # and the way out that the error names works
            answers = run(train, out=str(tmp_path), enable_checkpointing=False)
            check_weights(torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"], answers[0])
        return
    whole, resumed = (run(part, out=str(tmp_path)) for part in (train, resume))
    assert not [answer["says"] for answer in (*whole, *resumed) if "says" in answer]
    for answer, again in zip(whole, resumed, strict=True):
        assert answer["learns"]
        assert answer["is set"]
        assert again["tested"] == answer["tested"] or setting.unlike[0] == "tested"
    is_exact = [again["run"] for again in resumed] == [answer["run"] for answer in whole]
    if why := setting.inexact or (setting.has_cpu_adam and not is_exact and ROUNDED):
        record_property("note", why)
        assert bool(resumed[0]["warns"]) == setting.uses_nvme
        run(train, out=str(tmp_path / "full"), ours=False)
        from_full = run(resume, out=str(tmp_path / "full"), ours=False)
        assert [again["run"] for again in resumed] == [again["run"] for again in from_full]
        assert not is_exact
    else:
        record_property("note", setting.unlike[1])
        assert is_exact
        assert not resumed[0]["warns"]
    for epoch in (0, 1):
        for state in model_states(tmp_path / f"epoch={epoch}.ckpt"):
            assert not [name for name in state["module"] if not ("lora_" in name or name == "seen")]
            assert not state.get("frozen_param_fragments")
    check_weights(torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"], whole[0])
    if not setting.uses_nvme and setting.unlike[0] != "consolidated":  # its masters are where no tool reads them
        ds_frozen_patch.consolidate(tmp_path / "epoch=1.ckpt", tmp_path / "weights.safetensors")
        check_weights(load_file(tmp_path / "weights.safetensors"), whole[0])


def check_that_it_cannot(run: Any, out: Path, cannot: Cannot) -> None:
    """DeepSpeed raises its own error with plain Lightning too; where it would not, we do."""
    for ours in (True,) if cannot.ours else (False, True):
        answers = run(train, out=str(out / str(ours)), ours=ours)
        if not any("says" in answer for answer in answers):
            answers = run(resume, out=str(out / str(ours)), ours=ours)
        for answer in answers:
            assert cannot.says in answer.get("says", "")


def check_weights(weights: dict[str, torch.Tensor], trained: dict[str, Any]) -> None:
    """They equal the trained weights bit for bit, and so does the buffer."""
    _, state, _ = trained["run"]
    assert weights.keys() == {name for name in state if "lora_" in name or name == "seen"}
    for name, value in weights.items():
        assert runs.digest(value.to(getattr(torch, trained["dtypes"].get(name, "int64")))) == state[name]


@pytest.fixture(scope="session")
def async_io() -> None:
    """DeepSpeed's op for NVMe, built here because that takes minutes."""
    build = "import setuptools; from deepspeed.ops.op_builder import AsyncIOBuilder as op; op().load()"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"DeepSpeed's async_io cannot be built; it needs libaio-dev: {done.stderr.splitlines()[-1]}")

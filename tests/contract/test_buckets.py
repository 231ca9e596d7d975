"""Promise 21: a checkpoint in a bucket is as one on a disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import buckets, cell, owners, runs
from kit.cell import PRECISION, ModelCheckpoint
from safetensors.torch import load

import ds_frozen_patch
from ds_frozen_patch.frameworks.for_lightning.checkpoints import find_requeued

pytest.importorskip("moto")
pytest.importorskip("s3fs")

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday]


PARTITION = "bf16_zero_pp_rank" if PRECISION == "bf16-mixed" else "zero_pp_rank"


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """The arguments of what runs on ranks: an address, and how the bucket and the scratch folder are found."""
    return {
        "at": f"s3://bucket/{tmp_path.name}",
        "variables": {**server, "DS_FROZEN_PATCH_SCRATCH": str(tmp_path)},
        "out": str(tmp_path),
    }


def kept(at: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(at, filename="{epoch}", save_top_k=2, monitor="epoch", mode="max", **options)


def left(out: str) -> list[Path]:
    """What is in the folder of all ranks' scratch folders, once every rank has removed its own."""
    torch.distributed.barrier()
    return [*Path(out).iterdir()]


def fit_and_resume(at: str, variables: dict[str, str], out: str, stage: int) -> dict[str, Any]:
    """Train three epochs, with Lightning's own retention; resume after the second, from the best and the last."""
    os.environ.update(variables)
    cell.trainable_only()
    callback, module = kept(at, save_last=True), runs.LoraRun()
    runs.trainer(out, 2, stage, epochs=3, callbacks=[callback]).fit(module, runs.batches(2))
    said: dict[str, Any] = {"whole": (module.losses[2 * runs.BATCHES :], runs.trained_state(module))}
    said["paths"] = callback.best_model_path, callback.last_model_path
    resumed = runs.LoraRun()
    again = runs.trainer(out, 2, stage, epochs=3, enable_checkpointing=False)
    again.fit(resumed, runs.batches(2), ckpt_path=f"{at}/epoch=1.ckpt")
    said["resumed"] = resumed.losses, runs.trained_state(resumed)
    (said["tested"],) = again.test(resumed, runs.batches(2), verbose=False)
    fresh = runs.trainer(out, 2, stage, enable_checkpointing=False)
    (said["of last"],) = fresh.test(runs.LoraRun(), runs.batches(2), ckpt_path=callback.last_model_path, verbose=False)
    (said["of best"],) = fresh.test(runs.LoraRun(), runs.batches(2), ckpt_path=callback.best_model_path, verbose=False)
    last = runs.LoraRun()
    trainer = runs.trainer(out, 2, stage, epochs=4, callbacks=[kept(at, save_last=True)])
    trainer.fit(last, runs.batches(2), ckpt_path="last")
    return {**said, "steps": (len(last.losses), trainer.global_step), "scratch": left(out)}


@pytest.mark.short
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_resumes_and_keeps_some(ranks: Any, bucket: dict[str, Any], stage: int) -> None:
    at = bucket["at"]
    for said in ranks(2, fit_and_resume, stage=stage, **bucket):
        assert said["resumed"] == said["whole"]
        assert said["of last"] == said["of best"] == said["tested"]
        assert said["paths"] == (f"{at}/epoch=2.ckpt", f"{at}/last.ckpt")
        assert said["steps"] == (runs.BATCHES, 4 * runs.BATCHES)
        assert not said["scratch"]
    names = {name for name in buckets.objects(at) if not name.endswith("zero_to_torch.py")}  # of newer releases
    assert {name.partition("/")[0] for name in names} == {"epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}
    model = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(2)] if stage == 3 else ["mp_rank_00"]
    expected = {"latest", "zero_to_fp32.py", "checkpoint/ds_frozen_patch.json"}
    expected |= {f"checkpoint/{name}_model_states.pt" for name in model}
    expected |= {f"checkpoint/{PARTITION}_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    for checkpoint in ("epoch=2.ckpt", "last.ckpt"):  # the second was saved over
        assert {name.partition("/")[2] for name in names if name.startswith(f"{checkpoint}/")} == expected


def by_fabric(at: str, variables: dict[str, str], out: str, stage: int) -> dict[str, Any]:
    os.environ.update(variables)
    cell.trainable_only()
    made = runs.fabric(2, stage)
    model, optimizer = runs.fabric_setup(made)
    runs.fabric_epoch(made, model, optimizer)
    for step in (3, 4):  # the second time over the first
        made.save(f"{at}/small.ckpt", {"model": model, "optimizer": optimizer, "mine": {"step": step}})
    whole = (runs.fabric_epoch(made, model, optimizer), runs.trained_state(model))
    made = runs.fabric(2, stage)
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer, "mine": {"step": 0}}
    made.load(f"{at}/small.ckpt", state)
    resumed = (runs.fabric_epoch(made, model, optimizer), runs.trained_state(model))
    return {"whole": whole, "resumed": resumed, "mine": state["mine"], "scratch": left(out)}


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric(ranks: Any, bucket: dict[str, Any], stage: int) -> None:
    for said in ranks(2, by_fabric, stage=stage, **bucket):
        assert said["resumed"] == said["whole"]
        assert said["mine"] == {"step": 4}
        assert not said["scratch"]


def weights_alone(at: str, variables: dict[str, str], out: str, stage: int) -> dict[str, Any]:
    """Save weights alone, then a checkpoint over them, and weights over that; test each.

    In ZeRO-2 their name is also a pattern, which another checkpoint's matches; in ZeRO-3 DeepSpeed takes it for one.
    """
    os.environ.update(variables)
    cell.trainable_only()
    module, name = runs.LoraRun(), "w[1]" if stage == 2 else "w"
    trainer = runs.trainer(at, 2, stage, epochs=1, callbacks=[ModelCheckpoint(filename=name, save_weights_only=True)])
    trainer.fit(module, runs.batches(2))
    path = f"{at}/checkpoints/{name}.ckpt"
    if trainer.is_global_zero:
        buckets.file_system().pipe(f"{at}/checkpoints/w1.ckpt/latest", b"checkpoint")
    found: list[Any] = [isfile(path)]
    for weights_only in (False, True):
        fresh = runs.trainer(out, 2, stage, enable_checkpointing=False)
        found += fresh.test(runs.LoraRun(), runs.batches(2), ckpt_path=path, verbose=False)
        trainer.save_checkpoint(path, weights_only=weights_only)
        found.append(isfile(path))
    found += trainer.test(module, runs.batches(2), ckpt_path="best", verbose=False)
    return {"found": found, "scratch": left(out), "local": os.path.lexists("s3:")}


def isfile(path: str) -> bool:
    torch.distributed.barrier()
    return bool(buckets.file_system().isfile(path))


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_alone_in_the_root_folder(ranks: Any, bucket: dict[str, Any], stage: int) -> None:
    for said in ranks(2, weights_alone, stage=stage, **bucket):
        first, of_file, second, of_folder, third, best = said["found"]
        assert [first, second, third] == [True, False, True]
        assert of_file == of_folder == best
        assert not said["scratch"]
        assert not said["local"]
    name = "w[1]" if stage == 2 else "w"
    assert set(buckets.objects(bucket["at"])) == {f"checkpoints/{name}.ckpt", "checkpoints/w1.ckpt/latest"}


def by_an_engine(at: str, variables: dict[str, str], out: str) -> Any:
    os.environ.update(variables)
    with owners.served(export="peft"):
        whole = owners.Run("deepspeed", at, 2, 2)
        losses, state = whole.train()
        again = owners.Run("deepspeed", f"{at}/again", 2, 2)
        return again.train(whole.at(0)) == (losses[owners.STEPS :], state), left(out)


def test_an_engine_that_exports(ranks: Any, bucket: dict[str, Any]) -> None:
    """Its tags are side by side in one folder."""
    assert ranks(2, by_an_engine, **bucket) == [(True, [])] * 2
    names = {name for name in buckets.objects(bucket["at"]) if not name.startswith("again/")}
    tags = {name.partition("/")[0] for name in names if name.endswith("ds_frozen_patch.json")}
    assert len(tags) == 2
    assert {f"{tag}/adapter/adapter_model.safetensors" for tag in tags} <= names
    with file_of(next(iter(sorted(tags))), bucket["at"]) as file:
        assert len(load(file.read())) == 8
    assert not [name for name in names if name.rpartition("/")[2].startswith(".")]


def file_of(tag: str, at: str) -> Any:
    return buckets.file_system().open(f"{at}/{tag}/adapter/adapter_model.safetensors")


def test_the_newest_of_slurm_is_whole(bucket: dict[str, Any]) -> None:
    """Lightning gives the highest number, but that save can have been killed."""
    at, fs = bucket["at"], buckets.file_system()
    for name in ("hpc_ckpt_1.ckpt/latest", "hpc_ckpt_2.ckpt/latest", "hpc_ckpt_3.ckpt/checkpoint/ds_frozen_patch.json"):
        fs.pipe(f"{at}/{name}", b"checkpoint")
    assert find_requeued(lambda *_: 3, None, (at, "hpc_ckpt_"), {}) == 2
    assert find_requeued(lambda *_: 0, None, (at, "hpc_ckpt_"), {}) is None


def later(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    os.environ.update(variables)
    ds_frozen_patch.patch(async_save=True)
    callback, module = kept(at, save_last=True), runs.LoraRun()
    runs.trainer(out, 2, 2, epochs=4, callbacks=[callback]).fit(module, runs.batches(2))
    resumed = runs.LoraRun()
    again = runs.trainer(out, 2, 2, epochs=4, enable_checkpointing=False)
    again.fit(resumed, runs.batches(2), ckpt_path=f"{at}/epoch=2.ckpt")
    whole = module.losses[3 * runs.BATCHES :], runs.trained_state(module)
    fabric = runs.fabric(2, 2, "32-true")
    model, optimizer = runs.fabric_setup(fabric)
    said = runs.outcome(fabric.save, "s3://nowhere/a.ckpt", {"model": model, "optimizer": optimizer})
    said = said if said[0] else runs.outcome(ds_frozen_patch.wait)
    torch.distributed.barrier()  # the other rank has released its scratch folder
    return {
        "whole": whole,
        "resumed": (resumed.losses, runs.trained_state(resumed)),
        "nowhere": said,
        "scratch": left(out),
    }


def test_saves_that_training_does_not_wait_for(ranks: Any, bucket: dict[str, Any]) -> None:
    for said in ranks(2, later, **bucket):
        assert said["resumed"] == said["whole"]
        assert said["nowhere"][0] == "CheckpointError"
        assert "s3://nowhere/a.ckpt was not saved" in said["nowhere"][1]
        assert not said["scratch"]
    names = buckets.objects(bucket["at"])
    assert {name.partition("/")[0] for name in names} == {"epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}
    assert not [name for name in names if name.rpartition("/")[2].startswith(".")]

"""Promise 21 for Hugging Face's Trainer and Accelerate: all that they write is in the bucket, and nothing elsewhere."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import buckets, owners, runs
from transformers import TrainerCallback

import ds_frozen_patch

pytest.importorskip("moto")
pytest.importorskip("s3fs")

pytestmark = [pytest.mark.promise(21), pytest.mark.everyday]

STEPS = owners.STEPS


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """The arguments of what runs on ranks: an address, how the bucket is found, and a folder that stays empty."""
    (tmp_path / "here").mkdir()
    scratch = {"DS_FROZEN_PATCH_SCRATCH": str(tmp_path / "here" / "scratch")}
    return {"at": f"s3://bucket/{tmp_path.name}", "variables": {**server, **scratch}, "out": str(tmp_path)}


@contextmanager
def here(variables: dict[str, str], out: str, **settings: Any) -> Any:
    """Let a rank save under `patch()`, in an empty current folder; gives a function that lists what is left in it."""
    os.environ.update(variables)
    os.chdir(Path(out, "here"))

    def left() -> list[str]:
        torch.distributed.barrier()
        return [str(item) for item in Path().rglob("*") if item.name != "scratch"]

    with owners.served(**settings):
        yield left


class Seeing(TrainerCallback):
    """What a program sees at each save."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        names = buckets.objects(f"{args.output_dir}/checkpoint-{state.global_step}")
        self.seen.append(("trainer_state.json" in names, "latest" in names, state.best_model_checkpoint))


def trainer(at: str, stage: int = 2, **options: Any) -> owners.Run:
    return owners.Run("trainer", at, 2, stage, save_total_limit=2, **{"num_train_epochs": 3, **options})


def by_trainer(at: str, variables: dict[str, str], out: str, stage: int) -> dict[str, Any]:
    """Train three epochs; resume from the second by its address, and from the last by itself."""
    with here(variables, out) as left:
        local = trainer(f"{out}/local", stage)
        said: dict[str, Any] = {"local": local.train(epochs=3)}
        whole, seeing = trainer(at, stage), Seeing()
        whole.trainer.add_callback(seeing)
        said |= {"whole": whole.train(epochs=3), "seen": seeing.seen, "left": left()}
        resumed = trainer(at, stage)
        said["resumed"] = resumed.train(f"{at}/checkpoint-{2 * STEPS}", epochs=3)
        if torch.distributed.get_rank() == 0:  # what a killed save has left
            buckets.file_system().pipe(f"{at}/checkpoint-99/latest", b"global_step99")
        torch.distributed.barrier()
        said["again"] = [trainer(to, stage, num_train_epochs=4).train(True) for to in (at, f"{out}/local")]
        said |= {"left at the end": left(), "names": buckets.objects(at)}
    return said


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.short), 3])
def test_trainer(ranks: Any, bucket: dict[str, Any], stage: int) -> None:
    for said in ranks(2, by_trainer, stage=stage, alone=True, **bucket):
        assert said["whole"] == said["local"]
        assert said["seen"] == [(True, True, None)] * 3
        assert said["resumed"] == (said["whole"][0][2 * STEPS :], said["whole"][1])
        assert said["again"][0] == said["again"][1]
        assert len(said["again"][0][0]) == STEPS
        assert said["left"] == said["left at the end"] == []
    local = {str(item.relative_to(f"{bucket['out']}/local")) for item in Path(bucket["out"], "local").rglob("*.*")}
    assert local == {name for name in said["names"] if "." in name}


def the_best(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    """The first checkpoint is the best: it stays, is still known after a resume, and is what training ends with."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": True}
    options |= {"load_best_model_at_end": True, "save_total_limit": 1}
    said: dict[str, Any] = {}
    with here(variables, out, async_save=True) as left:
        for place in (f"{out}/local", at):
            run = owners.Run("trainer", place, 2, 2, **options)
            run.train(epochs=2)
            said[place] = [runs.trained_state(run.module), run.trainer.state.best_model_checkpoint, names(place)]
        resumed = owners.Run("trainer", at, 2, 2, **{**options, "num_train_epochs": 3})
        resumed.train(True)
        said["resumed"] = [runs.trained_state(resumed.module), resumed.trainer.state.best_model_checkpoint, names(at)]
        said["left"] = left()
    return said


def names(place: str) -> list[str]:
    """The checkpoints at a path or an address, as every rank sees them."""
    torch.distributed.barrier()
    if "://" not in place:
        return sorted(item.name for item in Path(place).iterdir())
    return sorted({name.partition("/")[0] for name in buckets.objects(place)})


def test_the_best_of_trainer(ranks: Any, bucket: dict[str, Any]) -> None:
    at, local = bucket["at"], f"{bucket['out']}/local"
    first = f"checkpoint-{STEPS}"
    for said in ranks(2, the_best, alone=True, **bucket):
        assert said[local] == [said[at][0], f"{local}/{first}", [first]]
        assert said[at] == said["resumed"] == [said[local][0], f"{at}/{first}", [first]]
        assert not said["left"]


def beside(at: str, variables: dict[str, str], out: str, stage: int, gathers: bool) -> dict[str, Any]:
    """What programs call at the end of a training, with an address and, by the same model, with a folder."""
    with here(variables, out) as left:
        said: dict[str, Any] = {}
        for place in (f"{out}/local", at):
            config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": gathers}}
            kind = owners.PEFT if gathers else owners.BY_HAND  # PEFT's are gathered in any case
            run = owners.Run("trainer", place, 2, stage, kind, num_train_epochs=1, config=config)
            run.train()
            hugging, rank = run.trainer, torch.distributed.get_rank()
            hugging.save_model()
            hugging.save_model(f"{place}/final")
            if stage == 2 and rank == 0:  # the others need not take part
                hugging.save_model(f"{place}/of rank 0")
                hugging._save(f"{place}/by hand", state_dict=run.module.state_dict())
            hugging.save_state()
            hugging.save_metrics("train", {"train_loss": 1.5})
            hugging.save_metrics("eval", {"eval_loss": 2.5})
            hugging.create_model_card(model_name="mine")
            hugging.save_model()  # which adds to the model card
        torch.distributed.barrier()
        said["output_dir"] = hugging.args.output_dir
        said["nowhere"] = runs.outcome(hugging.save_model, "s3://nowhere/final")
        refuse = buckets.failing("get_object .*README.md", PermissionError("not yours"))
        with buckets.around_requests(refuse):  # before the ranks gather the weights
            said["forbidden"] = runs.outcome(hugging.save_model)
        said["empty"] = left()
        torch.distributed.barrier()
        Path("s3:/bucket/other").mkdir(parents=True, exist_ok=True)
        Path("s3:/bucket/other/file").touch()
        hugging.args.output_dir = "s3://bucket/other"
        torch.distributed.barrier()
        with runs.heard("transformers") as messages:
            hugging.save_state()
        said["warnings"] = [message for message in messages if "also a folder" in message]
    return said


@pytest.mark.parametrize(("stage", "gathers"), [pytest.param(2, True, marks=pytest.mark.short), (3, True), (3, False)])
def test_what_trainer_writes_beside_checkpoints(ranks: Any, bucket: dict[str, Any], stage: int, gathers: bool) -> None:
    at, local = bucket["at"], Path(bucket["out"], "local")
    first, second = ranks(2, beside, stage=stage, gathers=gathers, alone=True, **bucket)
    assert first["output_dir"] == second["output_dir"] == at
    assert first["empty"] == second["empty"] == []
    assert first["nowhere"][0] == "CheckpointError"
    assert "s3://nowhere/final" in first["nowhere"][1]
    assert first["forbidden"][0] == "CheckpointError"
    assert "not yours" in first["forbidden"][1]
    assert second["forbidden"] == ("", "")
    assert second["nowhere"][0] == ("" if gathers else "CheckpointError")
    assert [len(said["warnings"]) for said in (first, second)] == [1, 0]
    files = {str(item.relative_to(local)): item for item in local.rglob("*") if item.is_file()}
    found = buckets.objects(at)
    assert files.keys() == found.keys()
    own = {name for name in files if not name.startswith("checkpoint-")}
    assert {"trainer_state.json", "all_results.json", "training_args.bin", "README.md", "final/training_args.bin"} < own
    assert gathers == ("final/latest" not in own)
    for name in own:
        content = buckets.file_system().cat(f"{at}/{name}")
        if name.endswith((".safetensors", "results.json", "config.json", "README.md")):
            assert content == files[name].read_bytes(), name
        assert b"ds_frozen_patch-scratch" not in content, name
    assert b"mine" in buckets.file_system().cat(f"{at}/README.md")


def by_accelerate(at: str, variables: dict[str, str], out: str, asynchronous: bool) -> dict[str, Any]:
    """Save to an address, twice to the same; then to numbered folders."""
    with here(variables, out, async_save=asynchronous) as left:
        run, counter = owners.counted()
        said: dict[str, Any] = {}
        for counter.count in (1, 2):
            run.train_epoch()
            said["saved"] = run.accelerator.save_state(f"{at}/one")
        whole = run.seen()[1]
        run, counter = owners.counted()
        run.accelerator.load_state(f"{at}/one")
        said["same"] = run.seen()[1] == whole, counter.count
        said["missing"] = runs.outcome(run.accelerator.load_state, f"{at}/none")
        run, counter = owners.counted(project_dir=f"{at}/project")
        for counter.count in (3, 4, 5):
            run.accelerator.save_state()
        ds_frozen_patch.wait()
        whole = run.seen()[1]
        run, counter = owners.counted(project_dir=f"{at}/project")
        run.accelerator.load_state()
        said["numbered"] = run.seen()[1] == whole, counter.count
        run.accelerator.project_configuration.iteration = 2
        said["again"] = runs.outcome(run.accelerator.save_state)
        run, _ = owners.counted()
        said["nowhere"] = runs.outcome(run.accelerator.save_state, "s3://nowhere/one")
        said["nothing there"] = runs.outcome(run.accelerator.load_state, "s3://nowhere/one")
        return {**said, "left": left()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_accelerate(ranks: Any, bucket: dict[str, Any], asynchronous: bool) -> None:
    at = bucket["at"]
    for said in ranks(2, by_accelerate, asynchronous=asynchronous, alone=True, **bucket):
        assert said["saved"] == f"{at}/one"
        assert said["same"] == (True, 2)
        assert said["numbered"] == (True, 5)
        assert said["missing"] == ("CheckpointError", f"There is no checkpoint at {at}/none.")
        assert said["again"][0] == "CheckpointError"
        assert f"{at}/project/checkpoints/checkpoint_2 exists." in said["again"][1]
        assert said["nowhere"][0] == said["nothing there"][0] == "CheckpointError"
        assert "s3://nowhere/one was not saved" in said["nowhere"][1]
        assert "s3://nowhere/one" in said["nothing there"][1]
        assert not said["left"]
    found = {name for name in buckets.objects(at) if not name.endswith("zero_to_torch.py")}
    assert {name for name in found if name.startswith("one/") and name.count("/") == 1} == {
        "one/custom_checkpoint_0.pkl", "one/latest", "one/random_states_0.pkl", "one/random_states_1.pkl",
        "one/scheduler.bin", "one/zero_to_fp32.py",
    }  # fmt: skip
    numbered = {name.split("/")[2] for name in found if name.startswith("project/")}
    assert numbered == {"checkpoint_1", "checkpoint_2"}
    assert not [name for name in found if name.rpartition("/")[2].startswith(".")]


def exported(at: str, variables: dict[str, str], out: str, by: str) -> dict[str, Any]:
    with here(variables, out, export="peft") as left:
        whole = owners.Run(by, at, 2, 2)
        losses, state = whole.train()
        resumed = owners.Run(by, f"{at}/again", 2, 2).train(whole.at(0))
        return {"same": resumed == (losses[STEPS:], state), "left": left()}


@pytest.mark.parametrize("by", ["accelerate", "trainer"])
def test_exports(ranks: Any, bucket: dict[str, Any], by: str) -> None:
    for said in ranks(2, exported, by=by, alone=True, **bucket):
        assert said["same"]
        assert not said["left"]
    names = set(buckets.objects(bucket["at"]))
    checkpoints = [name.removesuffix("latest") for name in names if name.endswith("/latest")]
    assert len(checkpoints) == 3
    for checkpoint in checkpoints:
        assert [name for name in names if name.startswith(checkpoint) and name.endswith("adapter_model.safetensors")]


def failing(at: str, variables: dict[str, str], out: str) -> dict[str, Any]:
    """Rank 1 cannot upload what Trainer writes, in a first save and over a checkpoint; then there is no bucket."""
    with here(variables, out) as left:
        said, see = dict[str, Any](), buckets.failing("put_object .*rng_state_1.pth", PermissionError("not yours"))
        with buckets.around_requests(see):
            said["first"] = runs.outcome(trainer(at, num_train_epochs=1).train)
        said["names"] = buckets.objects(f"{at}/checkpoint-{STEPS}")
        run = trainer(at, num_train_epochs=1)
        run.train()
        with buckets.around_requests(see):
            said["failed"] = runs.outcome(run.trainer._save_checkpoint, run.trainer.model, None)
        run.trainer._save_checkpoint(run.trainer.model, None)
        nowhere = trainer("s3://nowhere/run", num_train_epochs=1)
        said["nowhere"] = runs.outcome(nowhere.train)
        said["nothing there"] = runs.outcome(nowhere.train, True)
        said["no library"] = runs.outcome(trainer("abfs://bucket/run", num_train_epochs=1).train)
        said["no such"] = runs.outcome(nowhere.train, Path(f"{at}/checkpoint-999"))
        return {**said, "left": left()}


def test_errors_of_trainer(ranks: Any, bucket: dict[str, Any]) -> None:
    for said in ranks(2, failing, alone=True, **bucket):
        assert said["first"][0] == said["failed"][0] == said["nowhere"][0] == "CheckpointError"
        assert "not yours" in said["first"][1]
        assert "not yours" in said["failed"][1]
        assert "latest" in said["names"]
        assert "trainer_state.json" not in said["names"]
        assert "s3://nowhere/run/checkpoint-4" in said["nowhere"][1]
        assert said["nothing there"] == ("CheckpointError", "There is no checkpoint in s3://nowhere/run.")
        assert said["no such"] == ("CheckpointError", f"There is no checkpoint at {bucket['at']}/checkpoint-999.")
        assert said["no library"][0] == "CheckpointError"
        assert said["no library"][1].startswith("abfs://bucket/run cannot be opened: ")
        assert not said["left"]
    assert f"checkpoint-{STEPS}/trainer_state.json" in buckets.objects(bucket["at"])

"""The promises on GPUs: `nox -f ci/noxfile.py -s gpu`, or `pytest -m gpu tests/gpu`.

They are those that `tests/contract/` tests on CPU ranks. One row of the tests here also runs on the CPU, with the
ordinary tests. With the environment variable GPU_TESTS_ON=cpu, everything runs on CPU ranks, so that the tests
themselves can be tested without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from kit import owners, runs, settings
from kit.cell import Callback, DeepSpeedStrategy, Fabric, FabricDeepSpeed, ModelCheckpoint, pl
from kit.checkpoints import EMBEDDING, HEAD, base_model, model_states
from kit.owners import OWNERS, Run
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import ds_frozen_patch
from ds_frozen_patch.record import describe_file
from ds_frozen_patch.save.writer import Recorder, in_place_of_torch, opened

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PARTITIONED: dict[str, Any] = {"stage3_param_persistence_threshold": 0}  # parameters as small as these too


@dataclass(frozen=True)
class Place:
    """Where the ranks of a run execute: each on a GPU of its own, or on the CPU."""

    accelerator: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks}-{self.accelerator}"

    def trainer(self, out: str, strategy: Any, *callbacks: Any, epochs: int = 2, precision: str = "bf16-mixed") -> Any:
        """Return a Trainer as programs build it, plus `deterministic`, without which the order of some sums on a GPU
        varies.

        A bit-for-bit resume needs that, and the same number of GPUs of the same kind, because other GPUs have other
        kernels.
        """
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=self.ranks,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            deterministic="warn",  # True would refuse what has no such kernel
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(out, filename="{epoch}", save_top_k=-1), *callbacks],
            default_root_dir=out,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def data(self) -> DataLoader[Any]:
        """Return data with the same samples for each optimizer step, whatever the world size."""
        tokens = torch.randint(runs.VOCABULARY, (4 * runs.BATCHES, 8), generator=torch.Generator().manual_seed(0))
        return DataLoader(tokens, batch_size=4 // self.ranks)  # type: ignore[arg-type]


def skip_without(place: Place) -> None:
    if place.accelerator == "gpu" and (found := torch.cuda.device_count()) < place.ranks:
        pytest.skip(f"CUDA devices: {place.ranks} needed, and torch {torch.__version__} sees {found}")


def on(ranks: Any, place: Place, function: Any, **arguments: Any) -> list[Any]:
    """Return the results of a function on each rank of a place."""
    skip_without(place)
    return list(ranks(place.ranks, function, accelerator=place.accelerator, place=place, **arguments))


def strategy(stage: int, zero: dict[str, Any]) -> Any:
    """Return a strategy with the constructor's defaults, except its buckets of 400 MB.

    ZeRO-3 engines outlive their runs.
    """
    config = runs.config(stage, **zero) if zero else None
    return DeepSpeedStrategy(config=config) if config else DeepSpeedStrategy(stage=stage, reduce_bucket_size=5_000_000)


class Looks(Callback):
    """Digests of what was trained, taken before Lightning moves it to the CPU at the end of a fit."""

    state: dict[str, str]
    masters: dict[str, str]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: runs.digest(safe_get_full_fp32_param(p)) for name, p in trained.items()}
        self.state = runs.trained_state(module)


def fit(place: Place, out: str, strategy: Any, module: Any, *callbacks: Any, resume: str | None = None) -> Any:
    """Return the losses of the last epoch and digests of the trained state, and then the loss of a validation."""
    looks = Looks()
    trainer = place.trainer(out, strategy, looks, *callbacks)
    trainer.fit(module, place.data(), place.data(), ckpt_path=resume)
    run = (module.losses[-runs.BATCHES :], looks.state, looks.masters, trainer.global_step)
    return run, trainer.callback_metrics["val_loss"].item()


ON = os.environ.get("GPU_TESTS_ON", "gpu")
PLACES = [Place(ON, 1), Place(ON, 2)]


class Saves(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/small.ckpt")
        trainer.save_checkpoint(f"{trainer.default_root_dir}/weights.ckpt", weights_only=True)
        with ds_frozen_patch.full_checkpoint():
            trainer.save_checkpoint(f"{trainer.default_root_dir}/full.ckpt")


def train(place: Place, out: str, stage: int, zero: dict[str, Any]) -> Any:
    ds_frozen_patch.patch(export="safetensors")
    return fit(place, out, strategy(stage, zero), runs.LoraRun(), Saves())


def resume(place: Place, out: str, stage: int, zero: dict[str, Any], ours: bool = True) -> Any:
    if ours:
        ds_frozen_patch.patch()
    module = runs.LoraRun()
    module.strict_loading = ours
    return fit(place, f"{out}/again", strategy(stage, zero), module, resume=f"{out}/epoch=0.ckpt")


def evaluate(place: Place, out: str, stage: int, zero: dict[str, Any]) -> float:
    ds_frozen_patch.patch()
    trainer = place.trainer(out, strategy(stage, zero))
    (found,) = trainer.test(runs.LoraRun(), place.data(), ckpt_path=f"{out}/small.ckpt", verbose=False)
    loss: float = found["test_loss"]
    return loss


class Changed(runs.LoraRun):
    """The run's model, changed in one way after the checkpoint was saved."""

    def __init__(self, change: str) -> None:
        super().__init__(seed=2 if change == "another base" else 1)
        if change == "more to train":
            self.extra = torch.nn.Linear(2, 2)
        elif change == "another buffer":
            self.register_buffer("other", torch.zeros(1))
        elif change == "no buffer":
            del self.seen


def refused(place: Place, out: str, stage: int, zero: dict[str, Any], change: str) -> tuple[str, list[float]]:
    ds_frozen_patch.patch()
    module, trainer = Changed(change), place.trainer(f"{out}/refused", strategy(stage, zero))
    _, said = runs.refusal(trainer.fit, module, place.data(), ckpt_path=f"{out}/small.ckpt")
    return said, module.losses


ZERO: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero{stage}": (stage, {}) for stage in (1, 2, 3)},
    **{f"zero{stage}-offload": (stage, OFFLOAD) for stage in (1, 2)},
    "zero3-partitioned": (3, PARTITIONED),
    "zero3-offload": (3, {**PARTITIONED, **OFFLOAD, "offload_param": {"device": "cpu"}}),
}
ROWS = [pytest.param((place, name), marks=pytest.mark.gpu, id=f"{place}-{name}") for place in PLACES for name in ZERO]
EVERYDAY = (pytest.mark.everyday, pytest.mark.once)
ROWS.append(pytest.param((Place("cpu", 2), "zero3-offload"), marks=EVERYDAY, id="everyday"))


@dataclass(frozen=True)
class Trained:
    """An uninterrupted run: its folder, and its results on each rank."""

    ranks: Any
    out: Path
    arguments: dict[str, Any]
    answers: list[Any]

    def then(self, function: Any, **arguments: Any) -> list[Any]:
        """Return the results of a function on each rank."""
        return on(self.ranks, function=function, **self.arguments, **arguments)

    def has(self, weights: dict[str, torch.Tensor], of: str = "state") -> bool:
        """Whether these weights equal the trained ones bit for bit, with the buffer."""
        _, state, masters, _ = self.answers[0][0]
        expected = {name: state[name] for name in (*masters, "seen")} | (masters if of == "masters" else {})
        return {name: runs.digest(value) for name, value in weights.items()} == expected


@pytest.fixture(scope="module", params=ROWS)
def trained(request: Any, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place, name = request.param
    stage, zero = ZERO[name]
    out = tmp_path_factory.mktemp(name)
    arguments = {"place": place, "out": str(out), "stage": stage, "zero": zero}
    return Trained(ranks, out, arguments, on(ranks, function=train, **arguments))


@pytest.mark.promise(1)
def test_checkpoints_contain_no_frozen_parameters(trained: Trained) -> None:
    frozen = {name for name, p in runs.LoraRun().named_parameters(remove_duplicate=False) if not p.requires_grad}
    assert {EMBEDDING, HEAD} < frozen
    for small, full in zip(*(model_states(trained.out / f"{name}.ckpt") for name in ("small", "full")), strict=True):
        assert full["module"].keys() - small["module"].keys() == frozen
        assert not small.get("frozen_param_fragments")
        assert small["module"]["seen"].item() == 2 * runs.BATCHES
        assert small.keys() == full.keys()
        assert all(torch.equal(value, full["module"][name]) for name, value in small["module"].items())
        for key in ("epoch", "global_step", "loops", "callbacks", "lr_schedulers", "hyper_parameters", "buffer_names"):
            assert small[key] == full[key]
    for shard in (trained.out / "full.ckpt" / "checkpoint").glob("*optim_states.pt"):
        assert (trained.out / "small.ckpt" / "checkpoint" / shard.name).stat().st_size == shard.stat().st_size


@pytest.mark.promise(2)
def test_resumes_bit_for_bit(trained: Trained) -> None:
    assert trained.then(resume) == trained.answers
    (losses, _, _, steps), _ = trained.answers[0]
    assert steps == 2 * runs.BATCHES
    assert len(set(losses)) == runs.BATCHES  # it does learn


@pytest.mark.promise(3)
def test_evaluation_equals_that_in_memory(trained: Trained) -> None:
    assert trained.then(evaluate) == [validated for _, validated in trained.answers]


@pytest.mark.promise(4)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("more to train", "missing from the checkpoint: 'extra.bias', 'extra.weight'"),
        ("another buffer", 'Missing key(s) in state_dict: "other"'),
        ("no buffer", 'Unexpected key(s) in state_dict: "seen"'),
        pytest.param("another base", f"- {EMBEDDING}: saved ", marks=pytest.mark.promise(5)),
    ],
)
def test_another_model_is_refused_by_name(trained: Trained, change: str, says: str) -> None:
    for said, losses in trained.then(refused, change=change):
        assert says in said
        assert losses == []


@pytest.mark.promise(5)
def test_the_base_is_the_same_on_the_cpu(trained: Trained, tmp_path: Path) -> None:
    for seed in (1, 2):
        base_model(seed).bfloat16().save_pretrained(tmp_path / str(seed))
    found = ds_frozen_patch.verify(trained.out / "small.ckpt", base=tmp_path / "1")
    assert (found.problems, found.unverified, found.compared) == ((), (), 20)
    problems = ds_frozen_patch.verify(trained.out / "small.ckpt", base=tmp_path / "2").problems
    assert any(EMBEDDING in problem for problem in problems)


@pytest.mark.promise(6)
def test_plain_lightning_loads_it(trained: Trained) -> None:
    assert trained.then(resume, ours=False) == trained.answers


@pytest.mark.promise(8)
def test_weights_only_and_export(trained: Trained) -> None:
    content = torch.load(trained.out / "weights.ckpt", map_location="cpu", weights_only=False)
    assert trained.has(content["state_dict"])
    assert not content.keys() & {"optimizer_states", "lr_schedulers", "optimizer"}
    assert trained.has(load_file(trained.out / "small.ckpt" / "trainable.safetensors"), of="masters")


@pytest.mark.promise(9)
def test_one_fp32_file(trained: Trained, tmp_path: Path) -> None:
    ds_frozen_patch.consolidate(trained.out / "small.ckpt", tmp_path / "weights.safetensors")
    assert trained.has(load_file(tmp_path / "weights.safetensors"), of="masters")


# Saves after a fit and in the background, Fabric, other owners, compiled ops, and another number of GPUs, or the CPU

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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("is_later", [False, True])
def test_files_have_the_bytes_of_torch(tmp_path: Path, is_later: bool) -> None:
    """Storages of more and of less than a piece are copied from the GPU, beside those of the CPU."""
    skip_without(PLACES[0])
    device = "cuda" if ON == "gpu" else "cpu"
    sizes = (0, 1, 2**22 - 1, 2**22, 3 * 2**22 + 5)
    state: Any = [torch.arange(size, dtype=torch.uint8, device=device) for size in sizes]
    state += [state[-1][100:200], torch.arange(2**21)]
    ours, theirs = tmp_path / "ours" / "x.pt", tmp_path / "x.pt"
    ours.parent.mkdir()
    torch.save(state, theirs)
    noted: dict[Path, Any] = {}
    recorder = Recorder()
    open_at_once = partial(opened, sync=True, note=noted.__setitem__)
    with in_place_of_torch(ours.parent, recorder.opened if is_later else open_at_once):
        torch.save(state, ours)
    state[-1].zero_()  # the copies have been made
    recorder.write(True, noted.__setitem__)
    assert noted == {ours: describe_file(ours)}
    assert ours.read_bytes() == theirs.read_bytes()


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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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

"""The promises on GPUs: `nox -f ci/noxfile.py -s gpu`, or `pytest -m gpu tests/gpu`.

They are those that `tests/contract/` tests on CPU ranks. One row of the tests here also runs on the CPU, with the
ordinary tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import Callback
from kit.checkpoints import EMBEDDING, HEAD, base_model, model_states
from kit.gpus import OFFLOAD, PARTITIONED, PLACES, Place, fit, on, strategy
from safetensors.torch import load_file

import ds_frozen_patch


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
        assert small.keys() - full.keys() == {"ds_frozen_patch"}
        assert full.keys() <= small.keys()
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

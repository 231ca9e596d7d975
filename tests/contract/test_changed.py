"""Promise 23: a parameter that is frozen and still changes is in no base, so it is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import zero
from kit import owners, runs
from kit.checkpoints import left_out_of, model_states

import ds_frozen_patch

pytestmark = [pytest.mark.promise(23), pytest.mark.everyday, pytest.mark.once]


class WithAverage(runs.LoraRun):
    """A frozen copy of a layer: its exponential moving average, written in place or through `.data`."""

    def __init__(self, way: str, seed: int = 1) -> None:
        super().__init__(seed)
        self.head = torch.nn.Linear(4, 4)
        self.average = copy.deepcopy(self.head).requires_grad_(False)
        self.way = way

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, index)
        weight = self.average.weight
        with zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if self.way == "data":
                weight.data = weight.data * 0.5
            elif self.way == "in place":
                weight.mul_(0.5)
        head: torch.Tensor = self.head(torch.ones(1, 4, dtype=self.head.weight.dtype))
        return loss + head.sum()


def average_of(module: Any) -> list[float]:
    with zero.GatheredParameters([module.average.weight]):
        return [float(value) for value in module.average.weight.flatten()]


def save_and_resume(out: str, stage: int, way: str, **options: Any) -> dict[str, Any]:
    ds_frozen_patch.patch(**options)
    found: dict[str, Any] = {}
    data = runs.batches(2)
    with runs.heard() as found["heard"]:
        module = WithAverage(way)
        runs.trainer(out, 2, stage).fit(module, data)
        found["whole"] = module.losses[runs.BATCHES :], average_of(module)
        module = WithAverage(way)
        runs.trainer(f"{out}/again", 2, stage).fit(module, data, ckpt_path=f"{out}/epoch=0.ckpt")
        found["resumed"] = module.losses, average_of(module)
    return found


@pytest.mark.short
@pytest.mark.parametrize(("stage", "way"), [(2, "in place"), (2, "data"), (3, "in place")])
def test_changed_frozen_parameters_are_saved(ranks: Any, tmp_path: Path, stage: int, way: str) -> None:
    for rank, found in enumerate(ranks(2, save_and_resume, out=str(tmp_path), stage=stage, way=way)):
        assert found["resumed"] == found["whole"]
        said = [message for message in found["heard"] if "differ from what the program built" in message]
        assert len(said) == (rank == 0) * 2  # once for each run
        assert all("average.weight" in message and "leave_out" in message for message in said)
    for name in ("epoch=0.ckpt", "epoch=1.ckpt", "again/epoch=1.ckpt"):
        (first, *_) = model_states(tmp_path / name)
        left_out = left_out_of(tmp_path / name)
        assert "average.weight" not in left_out
        assert "average.bias" in left_out  # it has not changed
        if stage == 3:
            assert list(first["frozen_param_fragments"]) == ["average.weight"]
        else:
            assert first["module"]["average.weight"].any()


def left_out_of_both(out: Path) -> tuple[set[str], set[str]]:
    """What the first and the second checkpoint leave out."""
    first, second = (left_out_of(owners.model_files(out / f"epoch{number}")[0].parent) for number in range(2))
    return first, second


def trained_by_its_module(out: str) -> None:
    with owners.served():
        run = owners.Run("deepspeed", out, 2, 2)
        batch = owners.tokens()[torch.distributed.get_rank() :: 2][:4]
        for number in range(2):
            run.engine.backward(run.engine.module(input_ids=batch, labels=batch).loss)
            run.engine.step()
            run.save(run.at(number))
            next(p for p in run.module.parameters() if not p.requires_grad).data.mul_(0.5)


@pytest.mark.short
def test_a_change_after_training_that_did_not_call_the_engine(ranks: Any, tmp_path: Path) -> None:
    """Changes are then noticed from the first save on."""
    ranks(2, trained_by_its_module, out=str(tmp_path))
    first, second = left_out_of_both(tmp_path)
    tied = {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"}
    assert (first - second, second - first) == (tied, set())


def frozen_after_it_was_trained(out: str) -> None:
    with owners.served():
        module = owners.model(owners.PEFT, seed=1)
        weight = module.get_input_embeddings().weight.requires_grad_(True)
        run = owners.Run("deepspeed", out, 2, 2, module=module)
        weight.data.view(-1)[1] += 1  # a value that is not among the samples, as if only its token had been trained
        run.save(run.at(0))
        again = owners.Run("deepspeed", out, 2, 2)
        again.engine.load_checkpoint(out, tag="epoch0", load_module_only=True)
        again.save(again.at(1))


@pytest.mark.short
def test_what_an_earlier_run_has_trained_is_saved_although_this_one_has_it_frozen(ranks: Any, tmp_path: Path) -> None:
    ranks(2, frozen_after_it_was_trained, out=str(tmp_path))
    files = [owners.model_files(tmp_path / f"epoch{number}")[0] for number in range(2)]
    first, second = (torch.load(file, weights_only=False) for file in files)
    name = "base_model.model.model.embed_tokens.weight"
    assert torch.equal(second["module"][name], first["module"][name])


def frozen_since_its_optimizer_was_made(out: str, stage: int) -> None:
    with owners.served(leave_out=["*embed*"]):
        module = owners.model(owners.PEFT, seed=1)
        weight = module.get_input_embeddings().weight.requires_grad_(True)
        run = owners.Run("deepspeed", out, 2, stage, module=module)
        weight.requires_grad_(False)
        run.save(run.at(0))


@pytest.mark.short
@pytest.mark.parametrize("stage", [0, 2])
def test_what_the_optimizer_has_trained_is_saved_although_it_is_frozen_now(
    ranks: Any, tmp_path: Path, stage: int
) -> None:
    ranks(2, frozen_since_its_optimizer_was_made, out=str(tmp_path), stage=stage)
    state = torch.load(owners.model_files(tmp_path / "epoch0")[0], weights_only=False)
    assert "base_model.model.model.embed_tokens.weight" in state["module"]


def from_a_full_checkpoint(out: str, stage: int, has_saved: bool) -> list[Any]:
    with owners.served():
        run = owners.Run("deepspeed", out, 2, stage, module=with_one_value_more())
        with ds_frozen_patch.full_checkpoint():
            run.save(run.at(0))
        other = owners.Run("deepspeed", out, 2, stage)
        for number in (2, 3) if has_saved else ():  # then the next save compares a part of the base alone
            other.save(run.at(number))
        other.load(run.at(0))
        other.save(other.at(1))
        again = owners.Run("deepspeed", out, 2, stage)
        return [runs.outcome(again.load, again.at(1)), *map(runs.trained_state, (again.module, run.module))]


def with_one_value_more() -> Any:
    """A model whose embedding differs from the run's in a value that is not among the samples."""
    module = owners.model(owners.PEFT, seed=1)
    module.get_input_embeddings().weight.data.view(-1)[1] += 1
    return module


@pytest.mark.short
@pytest.mark.parametrize("has_saved", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_full_checkpoint_has_replaced_is_saved(ranks: Any, tmp_path: Path, stage: int, has_saved: bool) -> None:
    for outcome, loaded, saved in ranks(2, from_a_full_checkpoint, out=str(tmp_path), stage=stage, has_saved=has_saved):
        assert outcome == ("", "")
        assert loaded == saved


def test_leave_out_overrides(ranks: Any, tmp_path: Path) -> None:
    found = ranks(2, leaves_out_all_the_same, out=str(tmp_path))[0]
    assert not [message for message in found if "differ from what the program" in message]
    assert "average.weight" not in model_states(tmp_path / "epoch=0.ckpt")[0]["module"]


def leaves_out_all_the_same(out: str) -> list[str]:
    ds_frozen_patch.patch(leave_out=["average.*"])
    with runs.heard() as heard:
        runs.trainer(out, 2, 2, epochs=1).fit(WithAverage("data"), runs.batches(2))
    return heard


class WithBuffers(runs.LoraRun):
    """Buffers of a quantized layer of an unknown library, and one of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.register_buffer("qweight", torch.arange(64))
        self.layer.register_buffer("running", torch.ones(4))


def leaves_out_buffers(out: str) -> list[str]:
    ds_frozen_patch.patch(leave_out=["*.qweight", "*.nothing"])
    data = runs.batches(2)
    with runs.heard() as heard:
        runs.trainer(out, 2, 2, epochs=1).fit(WithBuffers(), data)
        runs.trainer(out, 2, 2).test(WithBuffers(), data, ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
        other = WithBuffers()
        other.layer.get_buffer("qweight")[3] = 7
        said = runs.refusal(runs.trainer(out, 2, 2).test, other, data, ckpt_path=f"{out}/epoch=0.ckpt", verbose=False)
    return [*heard, *said]


@pytest.mark.short
def test_named_buffers_are_left_out(ranks: Any, tmp_path: Path) -> None:
    *heard, kind, text = ranks(2, leaves_out_buffers, out=str(tmp_path))[0]
    module = model_states(tmp_path / "epoch=0.ckpt")[0]["module"]
    assert "layer.qweight" not in module
    assert "layer.running" in module
    assert (kind, "layer.qweight" in text) == ("CheckpointMismatchError", True)
    assert [message for message in heard if "'*.nothing'" in message or "*.nothing" in message]

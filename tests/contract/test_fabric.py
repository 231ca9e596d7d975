"""Fabric keeps promises 1, 2 and 4 as Trainer does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from kit import cell, runs
from kit.cell import CELL, PRECISION, PRECISIONS
from kit.checkpoints import model_states
from packaging.version import Version

pytestmark = [pytest.mark.promise(2), pytest.mark.series]


def whole_and_resumed(out: str, stage: int, precision: str) -> dict[str, Any]:
    cell.trainable_only()
    made = runs.fabric(2, stage, precision)
    model, optimizer = runs.fabric_setup(made)
    runs.fabric_epoch(made, model, optimizer)
    made.save(f"{out}/small.ckpt", {"model": model, "optimizer": optimizer, "mine": {"step": 4}})
    whole = (runs.fabric_epoch(made, model, optimizer), runs.trained_state(model))

    made = runs.fabric(2, stage, precision)
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer, "mine": {"step": 0}}
    remainder = made.load(f"{out}/small.ckpt", state)
    resumed = (runs.fabric_epoch(made, model, optimizer), runs.trained_state(model))
    return {"whole": whole, "resumed": resumed, "mine": state["mine"], "remainder": sorted(remainder)}


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "32-true"), (1, PRECISION), *itertools.product((2, 3), PRECISIONS)]
)
def test_fabric_resumes_bit_for_bit(ranks: Any, tmp_path: Path, stage: int, precision: str) -> None:
    for result in ranks(2, whole_and_resumed, out=str(tmp_path), stage=stage, precision=precision):
        assert result["resumed"] == result["whole"]
        assert len(set(result["whole"][0])) > 1
        assert result["mine"] == {"step": 4}
        assert "ds_frozen_patch" not in result["remainder"]
    for saved in model_states(tmp_path / "small.ckpt"):
        assert all("lora_" in name or name == "seen" for name in saved["module"])


def moments(optimizer: Any) -> float:
    """Return how much state Adam has."""
    states = optimizer.optimizer.optimizer.state.values()
    return float(sum(state["exp_avg"].abs().sum() for state in states if "exp_avg" in state))


def weights_alone(out: str, stage: int) -> tuple[dict[str, str], dict[str, str], list[float]]:
    """Load the model without its optimizer, and then with it."""
    cell.trainable_only()
    made = runs.fabric(2, stage)
    model, optimizer = runs.fabric_setup(made)
    runs.fabric_epoch(made, model, optimizer)
    made.save(f"{out}/small.ckpt", {"model": model, "optimizer": optimizer})
    saved = runs.trained_state(model)

    made = runs.fabric(2, stage)
    model, optimizer = runs.fabric_setup(made)
    made.load(f"{out}/small.ckpt", {"model": model})
    loaded, remembered = runs.trained_state(model), [moments(optimizer)]
    made.load(f"{out}/small.ckpt", {"model": model, "optimizer": optimizer})
    return saved, loaded, [*remembered, moments(optimizer)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric_loads_weights_alone(ranks: Any, tmp_path: Path, stage: int) -> None:
    for saved, loaded, (alone, together) in ranks(2, weights_alone, out=str(tmp_path), stage=stage):
        assert loaded == saved
        assert alone == 0
        assert together > 0


CHOICES = (True, False) if CELL.patches else (True, False, None)  # None is ours, and follows patch()


def constructor_says_no(out: str) -> None:
    cell.trainable_only()
    for choice in CHOICES:
        made = runs.fabric(2, 2, exclude_frozen_parameters=choice)
        model, optimizer = runs.fabric_setup(made)
        runs.fabric_epoch(made, model, optimizer)
        made.save(f"{out}/{choice}.ckpt", {"model": model, "optimizer": optimizer})


def test_explicit_false_wins(ranks: Any, tmp_path: Path) -> None:
    ranks(2, constructor_says_no, out=str(tmp_path))
    for choice in CHOICES:
        (saved,) = model_states(tmp_path / f"{choice}.ckpt")
        assert ("model.base_model.model.lm_head.weight" in saved["module"]) == (choice is False)


def clipped(clipping: float | None) -> tuple[list[str], float]:
    """Return what is heard at setup, and by how much one step of SGD with a learning rate of 1 moves the weights."""
    cell.trainable_only()
    made = runs.fabric(2, 2, "32-true")
    strategy: Any = made.strategy
    strategy.config |= {} if clipping is None else {"gradient_clipping": clipping}
    module = runs.LoraRun()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with runs.heard() as messages:
        model, optimizer = made.setup(module, torch.optim.SGD(trained, lr=1.0))
    before = [parameter.detach().clone() for parameter in trained]
    made.backward(1000 * model(next(iter(made.setup_dataloaders(runs.batches(2))))))
    optimizer.step()
    moved = sum(
        float((parameter.detach() - old).square().sum()) for parameter, old in zip(trained, before, strict=True)
    )
    return [text for text in messages if "clips gradients" in text], moved**0.5


@pytest.mark.short
def test_fabric_says_that_deepspeed_clips_gradients(ranks: Any) -> None:
    clips = Version(deepspeed.__version__) >= Version("0.19.3") and not CELL.patches  # which mend it
    for rank, (messages, moved) in enumerate(ranks(2, clipped, clipping=None)):
        assert (moved < 1.01) == clips
        assert len(messages) == (clips and rank == 0)
    for messages, moved in ranks(2, clipped, clipping=0.0):
        assert not messages
        assert moved > 2

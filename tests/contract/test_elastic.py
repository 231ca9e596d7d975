"""Promise 10: a run goes on with another number of ranks, and its loss curve goes on with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from disk import model_states
from torch.utils.data import DataLoader
from under_test import CELL, PRECISION, DeepSpeedStrategy

import ds_frozen_patch
from ds_frozen_patch.manifest import plain

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday]

SAMPLES = 12  # for each step of the optimizer
STEPS = 3  # in an epoch
EPOCHS = 3


class Run(runs.LoraRun):
    """A LoRA run in two groups with settings of their own."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "lr": 1e-2}, {"params": trained[3:], "lr": 1e-3, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups) if self.hparams["seed"] == 1 else torch.optim.SGD(groups, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


ADAM, SGD = 1, 2


def data(world_size: int, accumulate: int) -> DataLoader[Any]:
    tokens = torch.randint(runs.VOCABULARY, (SAMPLES * STEPS, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(tokens, batch_size=SAMPLES // world_size // accumulate)  # type: ignore[arg-type]


def strategy(stage: int) -> Any:
    several: dict[str, Any] = {"sub_group_size": 100, "stage3_param_persistence_threshold": 0}
    return DeepSpeedStrategy(config=runs.config(stage, **(several if stage == 3 else {"round_robin_gradients": True})))


def train(
    out: str,
    world_size: int,
    stage: int,
    *,
    accumulate: int = 1,
    precision: str = "32-true",
    seed: int = ADAM,
    resume: str | None = None,
    patch: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a run saw and did, the loss for each batch."""
    ds_frozen_patch.patch(**(patch if patch is not None else {"elastic": True}))
    trainer = runs.trainer(
        out,
        world_size,
        strategy=strategy(stage),
        precision=precision,
        epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
    )
    module = Run(seed=seed)
    with runs.heard() as said:
        trainer.fit(module, data(world_size, accumulate), ckpt_path=resume)
    return {
        "losses": module.losses,
        "seen": module.seen.item(),
        "steps": trainer.global_step,
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "said": said,
    }


def curve(ranks: list[dict[str, Any]], accumulate: int = 1) -> list[float]:
    """The mean loss of each step of the optimizer, over all its samples."""
    losses = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64).mean(0)
    means: list[float] = losses.view(-1, accumulate).mean(1).tolist()
    return means


def assert_goes_on(
    ranks: list[dict[str, Any]], whole: list[dict[str, Any]], within: float = 1e-6, accumulate: int = 1
) -> None:
    """The losses are those of the uninterrupted run, to within that part of them."""
    expected, found = curve(whole), curve(ranks, accumulate)
    assert len(expected) == STEPS * EPOCHS
    assert found == pytest.approx(expected[-len(found) :], rel=within)
    assert (ranks[0]["steps"], ranks[0]["lr"]) == (whole[0]["steps"], whole[0]["lr"])


@pytest.fixture(scope="module")
def whole(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`whole(stage)`: a run that nothing interrupts, on 4 ranks: its folder, and what each rank saw."""
    made: dict[Any, tuple[Path, list[dict[str, Any]]]] = {}

    def get(stage: int, **options: Any) -> tuple[Path, list[dict[str, Any]]]:
        key = (stage, *options.items())
        if key not in made:
            out = tmp_path_factory.mktemp(f"whole{stage}")
            made[key] = (out, ranks(4, train, out=str(out), world_size=4, stage=stage, **options))
        return made[key]

    return get


def copied(whole: Path, to: Path, epoch: int = 0) -> Path:
    path = to / f"epoch={epoch}.ckpt"
    shutil.copytree(whole / path.name, path)
    return path


# Before 0.18.3 DeepSpeed keeps only the last of the batches that it accumulates, in ZeRO-2.
LOSES_BATCHES = CELL.releases[1].release < (0, 18, 3)


@pytest.mark.parametrize(
    ("stage", "number", "accumulate"),
    [
        *((stage, number, 1) for stage in (1, 2, 3) for number in (4, 1, 3)),
        (1, 2, 2),
        (2, 2, 1 if LOSES_BATCHES else 2),
        (3, 2, 2),
        (3, 1, 4),
    ],
)
def test_the_loss_curve_goes_on(
    ranks: Any, whole: Any, tmp_path: Path, stage: int, number: int, accumulate: int
) -> None:
    out, expected = whole(stage)
    path = copied(out, tmp_path)
    options = {"out": str(tmp_path / "again"), "stage": stage, "accumulate": accumulate}
    found = ranks(number, train, world_size=number, resume=str(path), **options)
    assert_goes_on(found, expected, accumulate=accumulate)
    assert found[0]["seen"] == STEPS + 2 * STEPS * accumulate  # a buffer: it went on from what was saved
    assert (path / f"checkpoint.ranks{number}").is_dir() == (number != 4)
    for saved in model_states(tmp_path / "again" / "epoch=1.ckpt"):
        assert saved["dp_world_size"] == number
        assert all("lora_" in name or plain(name) == "seen" for name in saved["module"])
    if accumulate == 1:
        return
    again = {"out": str(tmp_path / "third"), "stage": stage, "resume": str(tmp_path / "again" / "epoch=1.ckpt")}
    same = ranks(number, train, world_size=number, accumulate=accumulate, **again)
    assert_goes_on(same, expected, accumulate=accumulate)
    back = ranks(4, train, world_size=4, **again)
    assert_goes_on(back, expected)
    assert len(back[0]["losses"]) == STEPS


@pytest.mark.parametrize("stage", [1, 3])
def test_the_gradients_keep_their_scale(ranks: Any, whole: Any, tmp_path: Path, stage: int) -> None:
    """SGD shows it at once, where Adam hides it."""
    out, expected = whole(stage, seed=SGD)
    path = copied(out, tmp_path)
    found = ranks(2, train, out=str(tmp_path), world_size=2, stage=stage, accumulate=2, seed=SGD, resume=str(path))
    assert_goes_on(found, expected, accumulate=2)


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16(ranks: Any, whole: Any, tmp_path: Path, stage: int) -> None:
    out, expected = whole(stage, precision=PRECISION)
    path = copied(out, tmp_path)
    found = ranks(2, train, out=str(tmp_path), world_size=2, stage=stage, precision=PRECISION, resume=str(path))
    assert_goes_on(found, expected, 2e-3)

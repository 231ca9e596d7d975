"""Promise 10: a run resumes at another world size, and its loss curve continues."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs, stages
from kit.cell import CELL, PRECISION, DeepSpeedStrategy, LambdaCallback
from kit.checkpoints import contents, model_states, snapshot
from torch.utils.data import DataLoader

import ds_frozen_patch
from ds_frozen_patch import reshard
from ds_frozen_patch.common.overrides import overridden
from ds_frozen_patch.parameters import plain

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday]

SAMPLES = 12  # for each step of the optimizer
STEPS = 3  # in an epoch
EPOCHS = 3


class Run(runs.LoraRun):
    """A LoRA run with two parameter groups of different settings; another seed gives another base."""

    def __init__(self, adam: bool = True, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.adam = adam

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[:3], "lr": 1e-2}, {"params": trained[3:], "lr": 1e-3, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups) if self.adam else torch.optim.SGD(groups, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(world_size: int, accumulate: int = 1) -> DataLoader[Any]:
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
    epochs: int = EPOCHS,
    resume: str | None = None,
    elastic: bool | None = True,
    **model: Any,
) -> dict[str, Any]:
    """Return what a run logged, the loss of each batch, and the files that it left."""
    ds_frozen_patch.patch(elastic=elastic)
    options: dict[str, Any] = {"precision": precision, "epochs": epochs, "accumulate_grad_batches": accumulate}
    trainer = runs.trainer(out, world_size, strategy=strategy(stage), **options)
    module = Run(**model)
    with runs.heard() as said:
        trainer.fit(module, data(world_size, accumulate), ckpt_path=resume)
    return {
        "losses": module.losses,
        "seen": module.seen.item(),
        "steps": trainer.global_step,
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "state": runs.trained_state(module),
        "said": [message for message in said if "samples" in message],
    }


def curve(ranks: list[dict[str, Any]], accumulate: int = 1) -> list[float]:
    """Return the mean loss of each optimizer step, over all its samples."""
    losses = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64).mean(0)
    means: list[float] = losses.view(-1, accumulate).mean(1).tolist()
    return means


def assert_goes_on(
    ranks: list[dict[str, Any]], whole: list[dict[str, Any]], within: float = 1e-6, accumulate: int = 1
) -> None:
    """Assert that the losses are those of the uninterrupted run, within this relative tolerance."""
    expected, found = curve(whole), curve(ranks, accumulate)
    assert len(expected) == STEPS * EPOCHS
    assert found == pytest.approx(expected[-len(found) :], rel=within)
    assert (ranks[0]["steps"], ranks[0]["lr"]) == (whole[0]["steps"], whole[0]["lr"])


@pytest.fixture(scope="module")
def whole(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`whole(stage)`: an uninterrupted run on 4 ranks: its folder, and each rank's results."""
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
        *(pytest.param(stage, 3, 1, marks=pytest.mark.short) for stage in (1, 2, 3)),
        (2, 1, 1),
        (1, 2, 2),
        (2, 2, 1 if LOSES_BATCHES else 2),
        (3, 1, 4),
    ],
)
def test_the_loss_curve_continues(
    ranks: Any, whole: Any, tmp_path: Path, stage: int, number: int, accumulate: int
) -> None:
    out, expected = whole(stage)
    path = copied(out, tmp_path)
    options = {"out": str(tmp_path / "again"), "stage": stage, "accumulate": accumulate}
    found = ranks(number, train, world_size=number, resume=str(path), **options)
    assert_goes_on(found, expected, accumulate=accumulate)
    assert found[0]["seen"] == STEPS + 2 * STEPS * accumulate  # a buffer: it went on from what was saved
    assert contents(path) == contents(out / path.name)
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


@pytest.mark.short
@pytest.mark.parametrize(("stage", "number", "accumulate"), [(1, 2, 2), (3, 2, 2), (1, 4, 3)])
def test_the_gradients_keep_their_scale(
    ranks: Any, whole: Any, tmp_path: Path, stage: int, number: int, accumulate: int
) -> None:
    """SGD shows it at once, while Adam hides it."""
    out, expected = whole(stage, adam=False)
    path = copied(out, tmp_path)
    options: dict[str, Any] = {"world_size": number, "stage": stage, "accumulate": accumulate, "adam": False}
    found = ranks(number, train, out=str(tmp_path), resume=str(path), **options)
    assert_goes_on(found, expected, accumulate=accumulate)


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16(ranks: Any, whole: Any, tmp_path: Path, stage: int) -> None:
    out, expected = whole(stage, precision=PRECISION)
    path = copied(out, tmp_path)
    found = ranks(2, train, out=str(tmp_path), world_size=2, stage=stage, precision=PRECISION, resume=str(path))
    assert_goes_on(found, expected, 2e-3)


def save_by_two(out: str, stage: int, full: bool = False, at_batch: int | None = None, batch: int = 6) -> None:
    """Train an epoch on 2 ranks, saved at its end or within it."""

    def save(trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == at_batch:
            trainer.save_checkpoint(f"{out}/run.ckpt")

    ds_frozen_patch.patch()
    options: dict[str, Any] = {
        "epochs": 1,
        "precision": "32-true",
        "callbacks": [LambdaCallback(on_train_batch_end=save)],
    }
    trainer = runs.trainer(out, 2, strategy=strategy(stage), **options)
    trainer.fit(Run(), data(2, 6 // batch))
    if at_batch is None:
        with ds_frozen_patch.full_checkpoint() if full else nullcontext():
            trainer.save_checkpoint(f"{out}/run.ckpt")


def refused(out: str, **options: Any) -> tuple[str, str]:
    return runs.refusal(train, out, resume=f"{out}/run.ckpt", **options)


@pytest.mark.short
@pytest.mark.once
def test_elastic_is_the_default(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    run_once(tmp_path, 2, save_by_two, stage=2)
    path = tmp_path / "run.ckpt"
    before = snapshot(path)
    options: dict[str, Any] = {"out": str(tmp_path), "world_size": 1, "stage": 2}
    ((kind, said),) = ranks(1, refused, **options, elastic=False)
    assert kind == "CheckpointMismatchError"
    assert said.startswith(
        "The checkpoint was saved in ZeRO stage 1 or 2 at world size 2 in fp16 or fp32, and DeepSpeed"
    )
    assert f"ds-frozen-patch reshard {path} NEW --stage 2 --ranks 1 --precision fp32, then" in said
    assert snapshot(path) == before
    reshard(path, tmp_path / "NEW", ranks=1)
    by_tool = ranks(1, train, **options, resume=str(tmp_path / "NEW"), elastic=None)
    for elastic in (None, True):
        by_itself = ranks(1, train, **options, resume=str(path), elastic=elastic)
        assert by_tool[0]["losses"] == by_itself[0]["losses"]
    assert snapshot(path) == before


@pytest.mark.parametrize(("before", "now"), [(1, 2), pytest.param(3, 0, marks=pytest.mark.short)])
def test_another_stage(ranks: Any, run_once: Any, tmp_path: Path, before: int, now: int) -> None:
    """`test_stages` compares what the optimizer holds."""
    run_once(tmp_path, 2, save_by_two, stage=before)
    options = {"out": str(tmp_path / "again"), "resume": str(tmp_path / "run.ckpt")}
    same = ranks(2, train, world_size=2, stage=before, **options)
    assert curve(ranks(2, train, world_size=2, stage=now, **options)) == pytest.approx(curve(same), rel=1e-6)
    assert curve(ranks(1, train, world_size=1, stage=now, **options)) == pytest.approx(curve(same), rel=1e-6)


def test_without_zero(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    """Any world size can load it unchanged; the gradients keep their scale nevertheless."""
    run_once(tmp_path, 2, save_by_two, stage=0)
    options = {"stage": 0, "out": str(tmp_path / "again"), "resume": str(tmp_path / "run.ckpt"), "elastic": None}
    same = ranks(2, train, world_size=2, **options)
    found = ranks(1, train, world_size=1, accumulate=2, **options)
    assert curve(found, 2) == pytest.approx(curve(same), rel=1e-6)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.once), 3])
def test_a_full_checkpoint(ranks: Any, run_once: Any, tmp_path: Path, number: int) -> None:
    """Its frozen parameters are loaded with it, in ZeRO-3 from partitions, onto any base."""
    run_once(tmp_path, 2, save_by_two, stage=3, full=True)
    options = {"stage": 3, "out": str(tmp_path), "resume": str(tmp_path / "run.ckpt"), "epochs": 1}
    same = ranks(2, train, world_size=2, **options)
    for found in ranks(3, train, world_size=3, seed=7, **options):
        assert found["state"] == same[0]["state"]


@pytest.mark.parametrize(
    ("at_batch", "number", "left"),
    [pytest.param(1, 1, 2, marks=pytest.mark.short), (3, 3, 1), (2, 3, None), (3, 2, 1), (2, 2, None)],
)
def test_resume_within_an_epoch(
    ranks: Any, run_once: Any, tmp_path: Path, at_batch: int, number: int, left: int | None
) -> None:
    """Of 6 batches of 2 x 3 samples: how many of the new run's remain, or that this cannot be determined."""
    run_once(tmp_path, 2, save_by_two, stage=2, at_batch=at_batch, batch=3)
    options = {"out": str(tmp_path), "stage": 2, "world_size": number, "epochs": 1}
    if left is None:
        for kind, said in ranks(number, refused, **options):
            assert kind == "CheckpointMismatchError"
            assert f"within an epoch, after {at_batch + 1} batches on each rank" in said
    else:
        found = ranks(number, train, **options, resume=str(tmp_path / "run.ckpt"))[0]
        assert len(found["losses"]) == left
        told = "took 6 samples (2 ranks x batch size 3 x 1 steps of gradient accumulation); now it takes 12."
        assert told in found["said"][0]


def fabric_run(out: str, stage: int, load: str | None = None) -> Any:
    ds_frozen_patch.patch(elastic=True)
    fabric = runs.fabric(int(os.environ["WORLD_SIZE"]), stage, "32-true")
    model, optimizer = runs.fabric_setup(fabric)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if load is None:
        runs.fabric_epoch(fabric, model, optimizer)
        fabric.save(f"{out}/fabric.ckpt", {**state, "epoch": 5})
    else:
        fabric.load(load, state)
    (kept,) = optimizer.state_dict()["base_optimizer_state"]["state"].values()
    return state["epoch"], runs.trained_state(model.module), float(kept["step"])


@pytest.mark.short
def test_fabric(ranks: Any, tmp_path: Path) -> None:
    """Fabric works the same way: trained parameters, optimizer, and the program's own state."""
    _, state, step = ranks(2, fabric_run, out=str(tmp_path), stage=2)[0]
    for found in ranks(3, fabric_run, out=str(tmp_path), stage=2, load=str(tmp_path / "fabric.ckpt")):
        assert found == (5, state, step)


def loss_of_test(out: str, world_size: int) -> Any:
    ds_frozen_patch.patch(elastic=True)
    trainer = runs.trainer(out, world_size, strategy=strategy(3), precision="32-true", enable_checkpointing=False)
    return trainer.test(Run(), data(world_size), ckpt_path=f"{out}/run.ckpt", verbose=False)[0]["test_loss"]


def test_testing_zero_3_at_a_larger_world_size(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    """Each rank looks for a file of its own, and there are too few."""
    run_once(tmp_path, 2, save_by_two, stage=3)
    expected = ranks(2, loss_of_test, out=str(tmp_path), world_size=2)
    before = snapshot(tmp_path / "run.ckpt")
    for found in ranks(3, loss_of_test, out=str(tmp_path), world_size=3):
        assert found == pytest.approx(expected[0], rel=1e-6)
    for found in ranks(1, loss_of_test, out=str(tmp_path), world_size=1):
        assert found == pytest.approx(expected[0], rel=1e-6)
    assert snapshot(tmp_path / "run.ckpt") == before


class Wide(stages.Net):
    """Eight million trained parameters: 96 MiB of masters and moments."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed, names=())
        self.wide = torch.nn.ModuleList(torch.nn.Linear(1024, 2048, bias=False) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        loss: torch.Tensor = torch.stack([weight.square().mean() for weight in self.wide.parameters()]).sum()
        return loss


def memory() -> int:
    """The memory of this process that is no file, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def save_or_load(out: str, stage: int, loads: bool) -> int:
    """The most memory that a load takes beyond that of the engine, in KiB."""
    ds_frozen_patch.patch(elastic=True)
    with overridden([(stages, "Net", Wide)]):
        engine = stages.begin(stage)
    if not loads:
        stages.go_on(engine, 1)
        engine.save_checkpoint(out, tag="a")
        return 0
    is_over, before = threading.Event(), memory()
    found = [before]

    def watch() -> None:
        while not is_over.wait(0.002):
            found.append(memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine.load_checkpoint(out)
    is_over.set()
    watcher.join()
    return max(found) - before


@pytest.mark.once
def test_a_load_makes_no_copy_of_the_state(ranks: Any, tmp_path: Path) -> None:
    """What DeepSpeed reads is one file in memory, of this rank's shard."""
    ranks(1, save_or_load, out=str(tmp_path), stage=2, loads=False)
    (more,) = ranks(1, save_or_load, out=str(tmp_path), stage=3, loads=True)
    assert more < 48 << 10

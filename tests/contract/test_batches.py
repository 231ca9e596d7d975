"""Promise 28: with `patch(resume_batches=True)`, a run that was saved within an epoch goes on at the next batch."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from batched import EPOCHS, SAMPLES, assert_goes_on, fit, in_processes, whole_and_resumed
from torch.utils.data import DataLoader

from ds_frozen_patch.frameworks.for_lightning.batches import KEY, _without_first

pytestmark = pytest.mark.promise(28)
everyday = pytest.mark.everyday

CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "fixed order": (1, 5, "fixed", {}),
    "DistributedSampler": (2, 15, "seeded", {"stage": 3, "validate": True}),
    "accumulation": (2, 2, "seeded", {"accumulate": 3, "asks_for_steps": True}),
    "the process's random numbers": (1, 29, "global", {"validate": True}),
    "a generator and a batch sampler": (1, 7, "own", {"asks_for_steps": True}),
    "a loader with state": (1, 5, "stateful", {"asks_for_steps": True}),
}
WORKERS: dict[str, tuple[int, list[int], str, dict[str, Any]]] = {
    "workers": (1, [5, 29], "global", {"workers": 2}),
    "persistent workers": (1, [5, 29], "global", {"workers": 2, "persistent": True}),
    "persistent workers, and a generator": (1, [5, 29], "own", {"workers": 1, "persistent": True}),
    "workers of two ranks": (2, [5, 15], "seeded", {"workers": 2, "persistent": True, "stage": 3}),
}


@pytest.mark.parametrize(
    ("order", "options"),
    [("seeded", {"accumulate": 2}), ("global", {"validate": True}), ("own", {})],
)
def test_random_steps(ranks: Any, tmp_path: Path, pytestconfig: Any, order: str, options: dict[str, Any]) -> None:
    """`--rounds` asks for more of them."""
    epoch = SAMPLES // 2 // options.get("accumulate", 1)
    steps = [epoch, *Random(order).choices(range(1, EPOCHS * epoch - 1), k=2 * pytestconfig.getoption("--rounds"))]
    arguments = {"out": str(tmp_path), "steps": steps, "world_size": 1, "order": order, **options}
    ((whole, *later),) = ranks(1, whole_and_resumed, **arguments)
    for step, resumed in zip(steps, later, strict=True):
        assert_goes_on(whole, resumed, step * options.get("accumulate", 1))
        assert resumed["said"] == []


@everyday
@pytest.mark.parametrize("case", CASES)
def test_goes_on(ranks: Any, tmp_path: Path, case: str) -> None:
    world_size, step, order, options = CASES[case]
    arguments = {"out": str(tmp_path), "steps": [step], "world_size": world_size, "order": order, **options}
    for whole, resumed in ranks(world_size, whole_and_resumed, **arguments):
        assert_goes_on(whole, resumed, step * options.get("accumulate", 1))
        assert resumed["said"] == []


@everyday
@pytest.mark.parametrize("case", WORKERS)
def test_workers(tmp_path: Path, case: str) -> None:
    world_size, steps, order, options = WORKERS[case]
    for rank, (whole, *later) in enumerate(in_processes(world_size, tmp_path, steps=steps, order=order, **options)):
        for step, resumed in zip(steps, later, strict=True):
            assert_goes_on(whole, resumed, step)
            assert [said for said in resumed["said"] if "its workers draw their random numbers anew" not in said] == []
            assert len(resumed["said"]) == (rank == 0)


@everyday
def test_workers_that_have_not_started() -> None:
    numbers: Any = range(6)
    loader: DataLoader[int] = DataLoader(numbers, batch_size=None, num_workers=1, persistent_workers=True)
    with _without_first(loader, 2):
        begun = iter(loader)
    assert [list(begun), list(loader)] == [[2, 3, 4, 5], [*range(6)]]


@everyday
@pytest.mark.parametrize("world_size", [1, 4])
def test_goes_on_at_another_world_size(ranks: Any, tmp_path: Path, world_size: int) -> None:
    """The global batches are the same ones."""
    step, order = 9, "seeded"
    whole = ranks(2, fit, out=str(tmp_path), step=step, world_size=2, order=order, size=2)
    checkpoint = str(tmp_path / f"step={step}.ckpt")
    resumed = ranks(
        world_size,
        fit,
        out=str(tmp_path),
        step=10**6,
        world_size=world_size,
        order=order,
        resume=checkpoint,
        size=4 // world_size,
    )
    assert global_batches(resumed) == global_batches(whole)[step:]
    assert resumed[0]["ended"] == whole[0]["ended"]


def global_batches(found: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of all ranks, by batch."""
    batches = zip(*(rank["samples"] for rank in found), strict=True)
    return [sorted(index for part in parts for index in part) for parts in batches]


@everyday
@pytest.mark.parametrize(
    ("order", "option", "said"),
    [
        ("fixed", False, "pass resume_batches=True to patch(), at the save as well"),
        ("stream", True, "can skip batches"),
        ("lazy", True, "can skip batches"),
    ],
)
def test_says_what_it_cannot(ranks: Any, tmp_path: Path, order: str, option: bool, said: str) -> None:
    options: dict[str, Any] = {"steps": [5], "world_size": 1, "order": order, "option": option}
    ((whole, resumed),) = ranks(1, whole_and_resumed, out=str(tmp_path), **options)
    assert whole["said"] == []
    (message,) = resumed["said"]
    assert said in message
    assert resumed["samples"][0] == whole["samples"][0]


@everyday
def test_warns_of_a_shuffle_that_was_not_saved(ranks: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"world_size": 1, "order": "global"}
    ranks(1, fit, out=str(tmp_path), step=5, option=False, **options)
    (resumed,) = ranks(1, fit, out=str(tmp_path), step=10**6, resume=str(tmp_path / "step=5.ckpt"), **options)
    (message,) = resumed["said"]
    assert "the shuffle is drawn anew" in message


def resume_with(position: Any, out: str, **options: Any) -> Any:
    """Resume from a checkpoint in which the position is another one."""
    (file,) = Path(out, "step=5.ckpt").rglob("*model_states.pt")
    torch.save(torch.load(file, weights_only=False) | {KEY: position}, file)
    os.environ["DS_FROZEN_PATCH_VERIFY_FILES"] = "0"
    return fit(out=out, step=10**6, resume=f"{out}/step=5.ckpt", **options)


@everyday
def test_goes_on_without_random_states(ranks: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"world_size": 1, "order": "global"}
    ranks(1, fit, out=str(tmp_path), step=5, **options)
    state = torch.get_rng_state()
    for position in (
        "text",
        {"ranks": 1},
        {"ranks": torch.ones(2)},
        {"ranks": 1, "now": state.float(), "global": state, "generators": []},
        {"ranks": 1, "now": state, "global": state[1:], "generators": []},
        {"ranks": 1, "now": state, "global": state, "generators": 3},
    ):
        (resumed,) = ranks(1, resume_with, position=position, out=str(tmp_path), **options)
        (message,) = resumed["said"]
        assert "the shuffle is drawn anew" in message

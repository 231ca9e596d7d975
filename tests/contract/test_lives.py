"""Promise 28: runs that change their stage, precision and number of ranks at random equal an uninterrupted one."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kit import stages

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, reshard

pytestmark = [pytest.mark.promise(28), pytest.mark.everyday, pytest.mark.once]

LIVES = int(os.environ.get("LIVES", "30"))
HOPS = 3
STEPS = 2  # in each
BF16 = 2.0**-8  # the rounding of one value, relative


def live(out: str, load: str | None, full: bool, **options: Any) -> tuple[stages.State, stages.State, list[float]]:
    """Load, train and save; what the engine held after the load and at the save, and the losses."""
    ds_frozen_patch.patch(elastic=options.pop("elastic", None))
    engine = stages.begin(**options)
    if load is not None:
        engine.load_checkpoint(load)
    loaded = stages.state_of(engine)
    losses = stages.go_on(engine, STEPS)
    with ds_frozen_patch.full_checkpoint() if full else nullcontext():
        engine.save_checkpoint(out, tag="a")
    return loaded, stages.state_of(engine), losses


@pytest.fixture(scope="module")
def whole(ranks: Any) -> dict[str, list[float]]:
    """The losses of uninterrupted runs, by optimizer."""
    return {name: ranks(1, whole_life, optimizer=name)[0] for name in ("AdamW", "SGD")}


def whole_life(optimizer: str) -> list[float]:
    return stages.go_on(stages.begin(0, optimizer=optimizer), HOPS * STEPS)


@stages.trains_in_half
@pytest.mark.parametrize("seed", range(LIVES))
def test_a_life(ranks: Any, whole: dict[str, list[float]], tmp_path: Path, seed: int) -> None:
    drawn = Random(seed)
    optimizer, precisions = drawn.choice(sorted(whole)), drawn.choice([["fp32"], ["bf16"], ["fp32", "bf16"]])
    load: Path | None = None
    before: stages.State = {}
    losses: list[float] = []
    is_exact = True
    size = 10**9  # of a sub-group, which `reshard` keeps
    for hop in range(HOPS):
        stage, number = drawn.randrange(4), drawn.choice((1, 2, 3))
        precision: Any = drawn.choice(precisions)
        by_tool = load is not None and drawn.random() < 0.4 and (stage, precision) != (0, "bf16")
        size = size if by_tool else drawn.choice((20, 50))
        options: dict[str, Any] = {"stage": stage, "precision": precision, "optimizer": optimizer}
        if by_tool and load is not None:
            try:
                reshard(load, tmp_path / f"resharded{hop}", ranks=number, stage=stage, precision=precision)
                load = tmp_path / f"resharded{hop}"
            except CheckpointError as error:
                if "already is a checkpoint" not in str(error) and "as it is" not in str(error):
                    raise
        options |= {"sub_group_size": size, "elastic": None if by_tool else True, "full": drawn.random() < 0.5}
        arguments = {"out": str(tmp_path / str(hop)), "load": load and str(load), **options}
        loaded, after, more = ranks(number, live, **arguments)[0]
        assert not before or stages.difference(loaded, before) == 0, options
        before, load = after, tmp_path / str(hop)
        losses += more
        is_exact &= (stage, precision) != (0, "bf16")  # there, DeepSpeed's steps differ without any load
        size = size if stage == 3 else 10**9
    assert not is_exact or stages.apart(losses, whole[optimizer]) <= (1e-5 if precisions == ["fp32"] else 6 * BF16)

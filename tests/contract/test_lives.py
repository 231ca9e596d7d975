"""Promise 28: runs that change their stage, precision, ranks and trained parameters at random equal unbroken ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from kit import stages

import ds_frozen_patch
from ds_frozen_patch import CheckpointError, reshard

pytestmark = [pytest.mark.promise(28), pytest.mark.everyday, pytest.mark.once]

LIVES = int(os.environ.get("LIVES", "30"))
HOPS = 3
STEPS = 2  # in each
BF16 = 2.0**-8  # the rounding of one value, relative
SETS = (stages.NAMES, ("first", "odd", "last"), ("second", "scale", "last"))
"""What is trained in a part of a life."""


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
def whole(ranks: Any) -> Callable[..., list[float]]:
    """The losses of an uninterrupted run with an optimizer that trains these sets of parameters in turn."""
    return cache(lambda optimizer, sets: ranks(1, whole_life, optimizer=optimizer, sets=sets)[0])


def whole_life(optimizer: str, sets: tuple[tuple[str, ...], ...]) -> list[float]:
    """Train in one process, without any checkpoint."""
    losses: list[float] = []
    values: dict[str, torch.Tensor] = {}
    state: stages.State = {}
    for names in sets:
        engine = stages.begin(0, optimizer=optimizer, names=names)
        stages.put(engine, values, state)
        engine.global_steps = len(losses)
        losses += stages.go_on(engine, STEPS)
        values = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        state = stages.state_of(engine)
    return losses


@stages.trains_in_half
@pytest.mark.parametrize("seed", range(LIVES))
def test_a_life(ranks: Any, whole: Callable[..., list[float]], tmp_path: Path, seed: int) -> None:
    drawn = Random(seed)
    optimizer, precisions = drawn.choice(["AdamW", "SGD"]), drawn.choice([["fp32"], ["bf16"], ["fp32", "bf16"]])
    # Adam counts steps for each parameter in stage 0, and for each group above, so only SGD begins alike in all.
    is_changed = optimizer == "SGD" and drawn.random() < 0.6
    sets = tuple(drawn.choice(SETS) if is_changed else stages.NAMES for _ in range(HOPS))
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
        elastic = None if by_tool and sets[hop] == sets[hop - 1] else True
        options |= {"sub_group_size": size, "elastic": elastic, "full": drawn.random() < 0.5, "names": sets[hop]}
        arguments = {"out": str(tmp_path / str(hop)), "load": load and str(load), **options}
        loaded, after, more = ranks(number, live, **arguments)[0]
        kept = loaded.keys() & before.keys()
        assert not before or sets[hop] != sets[hop - 1] or kept == loaded.keys() == before.keys(), options
        assert stages.difference({n: loaded[n] for n in kept}, {n: before[n] for n in kept}) == 0, options
        before, load = after, tmp_path / str(hop)
        losses += more
        is_exact &= (stage, precision) != (0, "bf16")  # there, DeepSpeed's steps differ without any load
        size = size if stage == 3 else 10**9
    within = 1e-5 if precisions == ["fp32"] else 6 * BF16
    assert not is_exact or stages.apart(losses, whole(optimizer, sets)) <= within

"""What the package stores about an engine, and how it is removed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_frozen_patch
from ds_frozen_patch.base import origins, watch_base
from ds_frozen_patch.engine.batch import scale_loss
from ds_frozen_patch.engine.served import attach
from ds_frozen_patch.internals import NAMES
from ds_frozen_patch.parameters import Contents

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


class Engine(torch.nn.Module):
    """Like DeepSpeed's engine, which has its methods from its class."""

    optimizer = None
    dp_world_size = mp_world_size = 1
    has_moe_layers = False
    _config = SimpleNamespace(_param_dict={}, zero_config=SimpleNamespace(mics_shard_size=-1))

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.losses: list[float] = []

    def zero_optimization_stage(self) -> int:
        return 0

    def forward(self, batch: Any) -> Any:
        return self.module(batch)

    def backward(self, loss: float) -> None:
        self.losses.append(loss)


for _name in {name for used in NAMES.used if used.of == "the engine" and used.is_needed for name in used.names}:
    if not hasattr(Engine, _name):
        setattr(Engine, _name, None)


def owner() -> Any:
    return SimpleNamespace(unserved="")


def test_others_wrappers_of_backward_survive() -> None:
    for theirs_first in (True, False):
        engine = Engine()
        seen: list[float] = []

        def count(call: Any, seen: list[float] = seen) -> Any:
            def backward(loss: float) -> Any:
                seen.append(loss)
                return call(loss)

            return backward

        known = attach(engine, owner())
        assert known is not None
        if theirs_first:
            engine.backward = count(engine.backward)  # type: ignore[method-assign]
        theirs = engine.backward
        scale_loss(known, engine, 2.0)
        if not theirs_first:
            engine.backward = theirs = count(engine.backward)  # type: ignore[method-assign]
        engine.backward(1.0)
        assert (engine.losses, seen) == ([2.0], [2.0 if theirs_first else 1.0])
        ds_frozen_patch.patch()
        ds_frozen_patch.unpatch()
        engine.backward(1.0)
        assert engine.losses == [2.0, 1.0]
        assert engine.backward == theirs


def test_the_record_of_the_base_leaves_forward_alone() -> None:
    engine = Engine()
    engine.forward = theirs = lambda batch: engine.module(batch)  # type: ignore[method-assign]
    known = attach(engine, owner())
    assert known is not None
    watch_base(engine, known)
    engine.eval()
    engine(torch.ones(2))
    engine.train()
    engine.forward(torch.ones(2))  # which calls no hook
    assert not any(one.built for one in origins(Contents(engine.module)).values())
    engine(torch.ones(2))
    assert all(one.built for one in origins(Contents(engine.module)).values())
    assert engine.forward is theirs
    assert not engine._forward_pre_hooks

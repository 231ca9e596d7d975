"""What the package stores about an engine, and how it is removed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ds_frozen_patch
from ds_frozen_patch.engine.loss import scale_loss
from ds_frozen_patch.engine.origins import origins, replacing, sample_at_start
from ds_frozen_patch.engine.served import attach
from ds_frozen_patch.save.writing import writes_before_it_returns

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


class Engine(torch.nn.Module):
    """Like DeepSpeed's engine, which has its methods from its class."""

    dp_world_size = 1
    _config = SimpleNamespace()

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


def owner() -> Any:
    return SimpleNamespace()


def test_unpatch_removes_the_loss_factor() -> None:
    engine = Engine()
    known = attach(engine, owner())
    assert known is not None
    scale_loss(known, engine, 2.0)
    engine.backward(1.0)
    scale_loss(known, engine, 3.0)
    engine.backward(1.0)
    ds_frozen_patch.patch()
    ds_frozen_patch.unpatch()
    engine.backward(1.0)
    assert engine.losses == [2.0, 3.0, 1.0]
    assert "backward" not in vars(engine)


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


def test_sampling_leaves_forward_alone() -> None:
    engine = Engine()
    engine.forward = theirs = lambda batch: engine.module(batch)  # type: ignore[method-assign]
    known = attach(engine, owner())
    assert known is not None
    sample_at_start(engine, known)
    engine.eval()
    engine(torch.ones(2))
    assert not any(one.samples for one in origins(engine.module).values())
    engine.train()
    engine.forward(torch.ones(2))  # which calls no hook
    assert not known.is_sampled
    engine(torch.ones(2))
    assert all(one.samples for one in origins(engine.module).values())
    assert engine.forward is theirs
    assert not engine._forward_pre_hooks


def test_unpatch_removes_the_sampling() -> None:
    engine = Engine()
    known = attach(engine, owner())
    assert known is not None
    sample_at_start(engine, known)
    ds_frozen_patch.patch()
    ds_frozen_patch.unpatch()
    assert not engine._forward_pre_hooks


def test_a_user_method_is_kept() -> None:
    engine = Engine()
    engine.forward = lambda batch: batch  # type: ignore[method-assign]
    attach(engine, owner())
    ds_frozen_patch.patch()
    ds_frozen_patch.unpatch()
    assert "forward" in vars(engine)


class Own(TorchCheckpointEngine):  # type: ignore[misc]
    """A user's checkpoint engine, which logs what it saves."""


class Decoupled(TorchCheckpointEngine):  # type: ignore[misc]
    """Like DeepSpeed's that write in the background."""

    def is_decoupled(self) -> bool:
        return True


class Unknown:
    """From a release without `is_decoupled`."""


@pytest.mark.parametrize(("kind", "expected"), [(Own, True), (Decoupled, False), (Unknown, False)])
def test_which_checkpoint_engines_write_before_they_return(kind: Any, expected: bool) -> None:
    engine = SimpleNamespace(checkpoint_engine=kind.__new__(kind))
    assert writes_before_it_returns(engine) == expected


@pytest.mark.promise(15)
def test_what_a_checkpoint_replaces_is_no_base() -> None:
    module: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    frozen: Any = module[1]
    with replacing(module), torch.no_grad():
        frozen.weight.add_(1)
    found = {name for name, one in origins(module).items() if one.is_suspected}
    assert found == {"0.weight", "0.bias", "1.weight"}
    built = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    frozen.weight = built
    assert not origins(torch.nn.ModuleList([frozen]))["0.weight"].is_suspected
    other = torch.nn.Linear(2, 2)
    other.weight = module[0].weight
    assert origins(other)["weight"].is_suspected

"""What the package stores about an engine, and how it is removed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ds_frozen_patch
from ds_frozen_patch.engine.attached import attach
from ds_frozen_patch.engine.frozen import sample_at_start
from ds_frozen_patch.engine.loss import scale_loss
from ds_frozen_patch.engine.origins import origins, replacing
from ds_frozen_patch.save.saving import writes_before_it_returns

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]


class Engine:
    """Like DeepSpeed's engine, which has its methods from its class."""

    dp_world_size = 1
    _config = SimpleNamespace()

    def __init__(self) -> None:
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


def test_unpatch_removes_the_sampling() -> None:
    engine = Engine()
    attach(engine, owner())
    sample_at_start(engine)
    ds_frozen_patch.patch()
    ds_frozen_patch.unpatch()
    assert "forward" not in vars(engine)


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

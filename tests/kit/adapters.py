"""Runs of many kinds, each trained for one step and saved, for the tests of `export` and `merge`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

import ds_frozen_patch
from ds_frozen_patch.cli import main
from kit import cell, runs
from kit.cell import DeepSpeedStrategy


class OfKind(runs.LoraRun):
    """A run of one kind; its subclasses make the model of each kind."""

    PATCHED: ClassVar[dict[str, dict[str, Any]]] = {}
    """The arguments of `patch()`, for some kinds."""
    FULL: ClassVar[tuple[str, ...]] = ()
    """The kinds that a full checkpoint is saved of too."""

    def __init__(self, kind: str) -> None:
        super(runs.LoraRun, self).__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []


def train(out: str, stage: int, run: type[OfKind], kinds: list[str]) -> None:
    """Take one step with each kind; save it, and what DeepSpeed itself reports as trained."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    for kind in kinds:
        cell.trainable_only()
        if kind in run.PATCHED:
            ds_frozen_patch.patch(**run.PATCHED[kind])
        # VeRA's projections are buffers, which DeepSpeed leaves in fp32.
        options: dict[str, Any] = {"precision": "32-true"} if kind.startswith("vera") else {}
        options |= {"enable_checkpointing": False, "limit_train_batches": 1}
        strategy = DeepSpeedStrategy(config=runs.config(stage, **zero))
        trainer = runs.trainer(out, 2, stage, strategy=strategy, epochs=1, **options)
        module = run(kind)
        trainer.fit(module, runs.batches(2))
        trainer.save_checkpoint(f"{out}/{kind}/small.ckpt")
        if kind in run.FULL:
            with cell.full_checkpoint(trainer.strategy):
                trainer.save_checkpoint(f"{out}/{kind}/full.ckpt")
        buffers = {name: tensor for name, tensor in module.named_buffers() if name in module.state_dict()}
        masters = {
            name: parameter.detach().float() if stage == 0 else safe_get_full_fp32_param(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
        if trainer.is_global_zero:
            torch.save({"trained": masters, "buffers": buffers, "frozen": frozen}, f"{out}/{kind}/truth.pt")
        cell.stop()


@dataclass(frozen=True)
class Trained:
    """The files of one run, and its parameters as DeepSpeed reports them."""

    run: type[Any]
    path: Path
    kind: str
    trained: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]

    @property
    def small(self) -> Path:
        return self.path / "small.ckpt"

    @property
    def full(self) -> Path:
        return self.path / "full.ckpt"

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {**self.trained, **self.buffers}

    def module(self, frozen: bool = False) -> Any:
        """Return the trained module, rebuilt without us: on its base in fp32, or in the dtype of the run."""
        module = self.run(self.kind).eval()
        module.load_state_dict({**self.values, **(self.frozen if frozen else {})}, strict=False)
        return module


Made = Callable[[str, int], Trained]


def made_once(ranks: Any, factory: pytest.TempPathFactory, run: type[OfKind], kinds: Mapping[int, list[str]]) -> Made:
    """Return `made(kind, stage)`; all kinds of a stage are trained together."""
    done: dict[int, Path] = {}

    def make(kind: str, stage: int) -> Trained:
        if stage not in done:
            done[stage] = factory.mktemp(f"zero{stage}")
            ranks(2, train, out=str(done[stage]), stage=stage, run=run, kinds=kinds[stage])
        path = done[stage] / kind
        return Trained(run, path, kind, **torch.load(path / "truth.pt"))

    return make


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether the names, dtypes and bits are the same."""
    one, other = (
        {name: (tensor.dtype, tensor.shape, runs.digest(tensor)) for name, tensor in tensors.items()}
        for tensors in (found, wanted)
    )
    return one == other


def logits(model: Any) -> torch.Tensor:
    torch.set_num_threads(1)  # more of them only wait for each other, where the ranks wait too
    tokens = torch.randint(runs.VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens).logits
    return found


def refusal(capsys: pytest.CaptureFixture[str], target: Path, *arguments: object) -> str:
    """Return the error message of a command that is refused; the folder of its target must be unchanged."""
    before = sorted(target.parent.rglob("*"))
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ds-frozen-patch: ")
    assert said.err.count("\n") == 1
    assert sorted(target.parent.rglob("*")) == before
    return said.err

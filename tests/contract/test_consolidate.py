"""Promise 9: one fp32 file from any checkpoint, by Lightning's own converter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import CELL, TRAINER

pytestmark = [pytest.mark.promise(9), pytest.mark.series]
RETURNS = CELL.patches != "2.0"  # in Lightning 2.0 the converter returns nothing, and its series keeps that


def save_both_ways(out: str, stage: int) -> dict[str, Any]:
    """Save a trainable-only and a full checkpoint of the same state; return the fp32 values at the end of training."""
    cell.trainable_only()
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False, precision="32-true")
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/small.ckpt")
    with cell.full_checkpoint(trainer.strategy):
        trainer.save_checkpoint(f"{out}/full.ckpt")
    return runs.trained_state(module)


@pytest.fixture
def convert() -> Iterator[Callable[..., Any]]:
    cell.trainable_only()
    yield importlib.import_module(f"{TRAINER}.utilities.deepspeed").convert_zero_checkpoint_to_fp32_state_dict
    cell.stop()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightnings_own_converter(ranks: Any, convert: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    trained = ranks(2, save_both_ways, out=str(tmp_path), stage=stage)[0]
    for kind in ("small", "full"):
        (tmp_path / f"{kind}.ckpt" / "latest").unlink()
        (tmp_path / f"{kind}.pt").write_text("what is replaced")
        given = convert(tmp_path / f"{kind}.ckpt", tmp_path / f"{kind}.pt", tag="checkpoint")
        single = torch.load(tmp_path / f"{kind}.pt", weights_only=False)
        if RETURNS:
            assert given.keys() == single.keys()
            assert {n: runs.digest(v) for n, v in given["state_dict"].items()} == {
                n: runs.digest(v) for n, v in single["state_dict"].items()
            }
        else:
            assert given is None
        module = runs.LoraRun(seed=1 if kind == "small" else 2)
        missing, unexpected = module.load_state_dict(single["state_dict"], strict=kind == "full")
        assert not unexpected
        assert not [name for name in missing if "lora_" in name]
        found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert {name: runs.digest(value) for name, value in found.items()} == trained
        assert bool(missing) == (kind == "small")
        assert single["hyper_parameters"]["hidden"] == 32
        assert not single.keys() & {"module", "frozen_param_fragments", "frozen_param_shapes", "param_shapes"}

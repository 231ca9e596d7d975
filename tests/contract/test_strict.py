"""Promise 4: only names that were left out may be missing; every other difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_frozen_patch
import pytest
import runs
import torch
from disk import model_states
from lightning.pytorch.strategies import DeepSpeedStrategy
from ranks import RankError


class Other(runs.LoraRun):
    """The run's model, changed in one way since the checkpoint was saved."""

    def __init__(self, change: str) -> None:
        super().__init__(**({"rank": 8} if change == "reshaped" else {"hidden": 64} if change == "base" else {}))
        if change == "new trainable":
            self.extra = torch.nn.Linear(2, 2)
        elif change == "new frozen":
            self.extra = torch.nn.Linear(2, 2).requires_grad_(False)
        elif change == "now trained":
            self.model.base_model.model.model.norm.weight.requires_grad_(True)
        elif change == "now frozen":
            next(p for p in self.parameters() if p.requires_grad).requires_grad_(False)
        elif change == "untied":
            head = self.model.base_model.model.lm_head
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        elif change == "gone frozen":
            del self.model.base_model.model.model.layers[1].mlp
            self.model.base_model.model.model.layers[1].mlp = torch.nn.Identity()
        elif change == "new buffer":
            self.register_buffer("other", torch.zeros(1))


def resume_changed(out: str, stage: int, change: str, evaluate: bool) -> None:
    ds_frozen_patch.patch()
    if not Path(out, "epoch=0.ckpt").exists():
        trainer = runs.trainer(out, 2, stage, epochs=1)
        trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer = runs.trainer(out, 2, stage, epochs=2)
    run = trainer.test if evaluate else trainer.fit
    run(Other(change), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")


Q = "model.base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ("reshaped", "CheckpointMismatchError", f"{Q}.lora_A.default.weight: saved [4, 32], now [8, 32]"),
        ("base", "CheckpointMismatchError", f"{Q}.base_layer.weight: saved [32, 32], now [64, 64]"),
        ("new trainable", "CheckpointMismatchError", "missing from the checkpoint: 'extra.bias', 'extra.weight'"),
        ("new frozen", "RuntimeError", 'Missing key(s) in state_dict: "extra.weight", "extra.bias"'),
        ("now trained", "CheckpointMismatchError", "now trains: 'model.base_model.model.model.norm.weight'"),
        ("now frozen", "CheckpointMismatchError", f"frozen or gone in the model: '{Q}.lora_A.default.weight'"),
        ("gone frozen", "CheckpointMismatchError", "does not have: 'model.base_model.model.model.layers.1.mlp.down"),
        ("new buffer", "RuntimeError", 'Missing key(s) in state_dict: "other"'),
    ],
)
def test_a_changed_model_is_refused(
    ranks: Any, tmp_path: Path, stage: int, change: str, error: str, names: str
) -> None:
    with pytest.raises(RankError) as refused:
        ranks(2, resume_changed, out=str(tmp_path), stage=stage, change=change, evaluate=False)
    for raised in refused.value.raised:
        assert raised is not None
        assert raised[0] == error
        assert names in raised[1]


@pytest.mark.parametrize(
    ("stage", "change", "names"),
    [
        (2, "reshaped", "size mismatch for model.base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
        (3, "reshaped", "size mismatch for model.base_model.model.model.layers.0.self_attn.q_proj.lora_A"),
        (3, "new trainable", 'Missing key(s) in state_dict: "extra.weight", "extra.bias"'),
        (3, "now trained", "now trains: 'model.base_model.model.model.norm.weight'"),
    ],
)
def test_a_changed_model_is_refused_in_test(ranks: Any, tmp_path: Path, stage: int, change: str, names: str) -> None:
    with pytest.raises(RankError) as refused:
        ranks(2, resume_changed, out=str(tmp_path), stage=stage, change=change, evaluate=True)
    for raised in refused.value.raised:
        assert raised is not None
        assert names in raised[1]


def resume_edited(out: str, names: str) -> None:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, strategy=DeepSpeedStrategy(config=runs.config(2)), epochs=2)
    trainer.fit(runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")


def test_a_damaged_checkpoint_is_refused(ranks: Any, tmp_path: Path) -> None:
    """A trainable parameter is missing, a key is unexpected: plain strictness, under its own names."""
    ranks(2, train, out=str(tmp_path))
    (file,) = Path(tmp_path, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt")
    (saved,) = model_states(tmp_path / "epoch=0.ckpt")
    lost = saved["module"].pop(f"{Q}.lora_A.default.weight")
    saved["module"]["stranger"] = lost
    torch.save(saved, file)
    with pytest.raises(RankError) as refused:
        ranks(2, resume_edited, out=str(tmp_path), names="")
    for raised in refused.value.raised:
        assert raised is not None
        assert f'Missing key(s) in state_dict: "{Q}.lora_A.default.weight".' in raised[1]
        assert 'Unexpected key(s) in state_dict: "stranger".' in raised[1]
        assert "base_layer" not in raised[1]

    saved["ds_frozen_patch"]["format"] = 99
    torch.save(saved, file)
    with pytest.raises(RankError) as refused:
        ranks(2, resume_edited, out=str(tmp_path), names="")
    assert "format 99" in str(refused.value.raised[0])


def train(out: str) -> None:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, epochs=1)
    trainer.fit(runs.LoraRun(), runs.batches(2))

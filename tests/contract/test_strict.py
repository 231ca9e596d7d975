"""Promise 4: only names that were left out may be missing; every other difference is an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.checkpoints import model_states, refresh, rewrite_record

import ds_frozen_patch
from ds_frozen_patch.common.files import RECORD

pytestmark = pytest.mark.promise(4)


class Other(runs.LoraRun):
    """The run's model, changed in one way after the checkpoint was saved."""

    def __init__(self, change: str) -> None:
        super().__init__(rank=8 if change == "reshaped" else 4, hidden=64 if change == "base" else 32)
        if change == "new trainable":
            self.extra = torch.nn.Linear(2, 2)
        elif change == "new frozen":
            self.extra = torch.nn.Linear(2, 2).requires_grad_(False)
        elif change == "now trained":
            self.model.base_model.model.model.norm.weight.requires_grad_(True)
        elif change == "now frozen":
            next(p for p in self.parameters() if p.requires_grad).requires_grad_(False)
        elif change == "gone frozen":
            del self.model.base_model.model.model.layers[1].mlp
            self.model.base_model.model.model.layers[1].mlp = torch.nn.Identity()
        elif change == "new buffer":
            self.register_buffer("other", torch.zeros(1))


def train(out: str, stage: int) -> None:
    ds_frozen_patch.patch()
    runs.trainer(out, 2, stage, epochs=1).fit(runs.LoraRun(), runs.batches(2))


def resume_changed(out: str, stage: int, change: str, evaluate: bool) -> tuple[str, str]:
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, stage, epochs=2)
    run = trainer.test if evaluate else trainer.fit
    return runs.refusal(run, Other(change), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")


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
    ranks: Any, run_once: Any, tmp_path: Path, stage: int, change: str, error: str, names: str
) -> None:
    run_once(tmp_path, 2, train, stage=stage)
    for raised in ranks(2, resume_changed, out=str(tmp_path), stage=stage, change=change, evaluate=False):
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
def test_a_changed_model_is_refused_in_test(
    ranks: Any, run_once: Any, tmp_path: Path, stage: int, change: str, names: str
) -> None:
    run_once(tmp_path, 2, train, stage=stage)
    for raised in ranks(2, resume_changed, out=str(tmp_path), stage=stage, change=change, evaluate=True):
        assert names in raised[1]


def resume(out: str, verify_files: bool = True) -> tuple[str, str]:
    """Return the name and the text of what is raised, or two empty ones."""
    ds_frozen_patch.patch(verify_files=verify_files)
    trainer = runs.trainer(out, 2, epochs=2)
    return runs.outcome(trainer.fit, runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")


@pytest.mark.short
def test_files_are_verified_unless_told_otherwise(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    """A flipped bit is loaded with `verify_files=False`; a truncated file is refused all the same."""
    run_once(tmp_path, 2, train, stage=2)
    file = max(Path(tmp_path, "epoch=0.ckpt", "checkpoint").glob("*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # most of it are the optimizer's numbers
    file.write_bytes(content)
    for name, text in ranks(2, resume, out=str(tmp_path)):
        assert name == "CheckpointError"
        assert f"{file.name} is damaged" in text
    assert ranks(2, resume, out=str(tmp_path), verify_files=False) == [("", "")] * 2
    file.write_bytes(content[: len(content) // 2])
    for name, text in ranks(2, resume, out=str(tmp_path), verify_files=False):
        assert name == "CheckpointError"
        assert f"{file.name} cannot be read, is truncated or damaged" in text


def test_a_damaged_checkpoint_is_refused(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    """A missing trainable parameter or an unexpected key is a strict error, under the module's own names."""
    run_once(tmp_path, 2, train, stage=2)
    (file,) = Path(tmp_path, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt")
    (saved,) = model_states(tmp_path / "epoch=0.ckpt")
    saved["module"]["stranger"] = saved["module"].pop(f"{Q}.lora_A.default.weight")
    torch.save(saved, file)
    refresh(file.parent)
    for name, text in ranks(2, resume, out=str(tmp_path)):
        assert name == "RuntimeError"
        assert f'Missing key(s) in state_dict: "{Q}.lora_A.default.weight".' in text
        assert 'Unexpected key(s) in state_dict: "stranger".' in text
        assert "base_layer" not in text

    for damage, said in ({"left_out": [3]}, "is damaged"), ({"format": 99}, "unknown format"):
        rewrite_record(file.parent, lambda values, damage=damage: values.update(damage))  # type: ignore[misc]
        for name, text in ranks(2, resume, out=str(tmp_path)):
            assert name == "CheckpointError"
            assert said in text

    (file.parent / RECORD).unlink()  # then any frozen parameter may be missing, but no other
    for name, text in ranks(2, resume, out=str(tmp_path)):
        assert name == "RuntimeError"
        assert f'Missing key(s) in state_dict: "{Q}.lora_A.default.weight".' in text
        assert "base_layer" not in text


def wrong_paths(out: str) -> dict[str, tuple[str, str]]:
    ds_frozen_patch.patch()
    paths = {
        "missing": f"{out}/nowhere.ckpt",
        "file": f"{out}/file.ckpt",
        "inner": f"{out}/epoch=0.ckpt/checkpoint",
        "shard": str(next(Path(out, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt"))),
    }
    found = {}
    for kind, path in paths.items():
        trainer = runs.trainer(out, 2, epochs=2)
        found[kind] = runs.refusal(trainer.fit, runs.LoraRun(), runs.batches(2), ckpt_path=path)
    made = runs.fabric(2, 2)
    model, optimizer = runs.fabric_setup(made)
    state = {"model": model, "optimizer": optimizer}
    found["fabric"] = runs.refusal(made.load, f"{out}/nowhere.ckpt", state)
    return found


def test_wrong_paths(ranks: Any, run_once: Any, tmp_path: Path) -> None:
    run_once(tmp_path, 2, train, stage=2)
    (tmp_path / "file.ckpt").write_text("not a checkpoint")
    for found in ranks(2, wrong_paths, out=str(tmp_path)):
        assert {name for name, _ in found.values()} == {"FileNotFoundError"}
        assert f"no checkpoint at {tmp_path}/nowhere.ckpt" in found["missing"][1]
        assert f"no checkpoint at {tmp_path}/nowhere.ckpt" in found["fabric"][1]
        assert f"{tmp_path}/file.ckpt is a file" in found["file"][1]
        assert f"Pass all of it: {tmp_path}/epoch=0.ckpt" in found["inner"][1]
        assert f"Pass all of it: {tmp_path}/epoch=0.ckpt" in found["shard"][1]


def resume_without_optimizer_state(out: str) -> tuple[str, str]:
    """Load, with ZeRO stage 0 in bf16, what plain DeepSpeed 0.17 or another release with another optimizer writes."""
    with ds_frozen_patch.patched():
        runs.trainer(out, 2, 0, epochs=1).fit(runs.LoraRun(), runs.batches(2))
        if torch.distributed.get_rank() == 0:
            (file,) = Path(out, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt")
            (saved,) = model_states(f"{out}/epoch=0.ckpt")
            torch.save({**saved, "optimizer": None}, file)
            refresh(file.parent)
        torch.distributed.barrier()
        trainer = runs.trainer(out, 2, 0, epochs=2)
        return runs.refusal(trainer.fit, runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")


def test_no_optimizer_state(ranks: Any, tmp_path: Path) -> None:
    for name, text in ranks(2, resume_without_optimizer_state, out=str(tmp_path)):
        assert name == "CheckpointMismatchError"
        assert "has no state for the optimizer" in text


def resume_loosely(out: str) -> int:
    """With `strict=False`, entries that the model no longer has are ignored."""
    with ds_frozen_patch.patched():
        made = runs.fabric(2, 2)
        model, optimizer = runs.fabric_setup(made)
        runs.fabric_epoch(made, model, optimizer)
        made.save(f"{out}/small.ckpt", {"model": model, "optimizer": optimizer})
        made = runs.fabric(2, 2)
        module = Other("gone frozen")
        other = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
        model, other = made.setup(module, other)
        state = {"model": model, "optimizer": other}
        name, _ = runs.refusal(made.load, f"{out}/small.ckpt", state)
        assert name == "CheckpointMismatchError"
        made.load(f"{out}/small.ckpt", state, strict=False)
        return len(runs.fabric_epoch(made, model, other))


def test_strict_false_ignores_unexpected_keys(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, resume_loosely, out=str(tmp_path)) == [runs.BATCHES] * 2

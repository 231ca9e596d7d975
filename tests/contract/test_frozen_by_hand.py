"""Promise 19: what a checkpoint of Trainer costs for a model that is frozen by hand, without PEFT.

A scaled copy of a public report: most of the model is frozen, and each checkpoint saves all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import owners
from kit.owners import BY_HAND, LARGE, Run

pytestmark = [pytest.mark.promise(19), pytest.mark.everyday]

FOR_FROM_PRETRAINED = ("model.safetensors", "config.json", "generation_config.json")
"""What Trainer writes for `from_pretrained`, which stays as it is."""


def saved(out: str, stage: int) -> Any:
    """The first epoch by plain Trainer; a run under `patch()`, resumed from its first checkpoint."""
    Run("trainer", f"{out}/plain", 2, stage, LARGE, num_train_epochs=1).train()
    with owners.served():
        whole = Run("trainer", f"{out}/ours", 2, stage, LARGE)
        losses, state = whole.train()
        resumed = Run("trainer", f"{out}/again", 2, stage, LARGE).train(whole.at(0))
    numbers = [
        sum(
            getattr(parameter, "ds_numel", parameter.numel())
            for parameter in whole.module.parameters()
            if parameter.requires_grad == wanted
        )
        for wanted in (True, False)
    ]
    return resumed == (losses[owners.STEPS :], state), *numbers


def size(checkpoint: Path) -> int:
    """The bytes of all files but those for `from_pretrained`."""
    files = (file for file in checkpoint.rglob("*") if file.is_file() and file.name not in FOR_FROM_PRETRAINED)
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("stage", [2])
def test_a_checkpoint_has_the_size_of_what_is_trained(ranks: Any, tmp_path: Path, stage: int) -> None:
    """It is at most 2 % larger than the floor, beside the files for `from_pretrained`.

    The floor is what a resume needs. AdamW's state of each trainable parameter is 12 bytes: its fp32 master value and
    two moments. In ZeRO-2, DeepSpeed also saves the parameters themselves, here 4 bytes each, for the module's state
    dict. In ZeRO-3 it does not, since the master values are the only copy on disk.
    """
    (is_same, trainable, frozen), other = ranks(2, saved, out=str(tmp_path), stage=stage)
    assert is_same
    assert other == (is_same, trainable, frozen)
    assert frozen / (trainable + frozen) > 0.95
    floor = trainable * (12 if stage == 3 else 16)
    ours, plain = (size(tmp_path / who / "checkpoint-4") for who in ("ours", "plain"))
    print(f"ZeRO-{stage}: {plain=} {ours=} {floor=}")  # for docs/guides/huggingface.md
    assert floor < ours < 1.02 * floor
    assert plain > floor + 4 * frozen
    for name in FOR_FROM_PRETRAINED:
        assert (tmp_path / "ours" / "checkpoint-4" / name).stat().st_size > 0


def not_gathered(out: str) -> Any:
    """Trainer then saves the engine in place of the model, and once more."""
    config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}
    with owners.served():
        whole = Run("trainer", out, 2, 3, BY_HAND, config=config)
        losses, state = whole.train()
        resumed = Run("trainer", f"{out}/again", 2, 3, BY_HAND, config=config).train(whole.at(0))
    return resumed == (losses[owners.STEPS :], state)


def test_a_model_that_is_not_gathered(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, not_gathered, out=str(tmp_path)) == [True, True]
    for number in (4, 8):
        assert not (tmp_path / f"checkpoint-{number}" / "model.safetensors").exists()
    assert not list(tmp_path.glob(".*"))

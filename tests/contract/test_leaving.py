"""Promise 6: a run goes back to full checkpoints, from which it resumes strictly without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import owners, runs
from kit.owners import BY_HAND, OWNERS, STEPS, Run

import ds_frozen_patch

pytestmark = [pytest.mark.promise(6), pytest.mark.everyday, pytest.mark.once]

EPOCHS = 3


def by_lightning(out: str, stage: int) -> Any:
    def fit(to: str, resume: str | None = None) -> Any:
        module = runs.LoraRun()
        runs.trainer(to, 2, stage, epochs=EPOCHS).fit(module, runs.batches(2), ckpt_path=resume)
        return module.losses, runs.trained_state(module)

    with ds_frozen_patch.patched():
        losses, state = fit(out)
        with ds_frozen_patch.full_checkpoint():
            fit(f"{out}/full", f"{out}/epoch=0.ckpt")
    return fit(f"{out}/plain", f"{out}/full/epoch=1.ckpt"), (losses[2 * runs.BATCHES :], state)


def by_others(by: str, out: str, stage: int) -> Any:
    def train(to: str, resume: Path | None = None) -> Any:
        options: dict[str, Any] = {"num_train_epochs": EPOCHS} if by == "trainer" else {}
        return Run(by, to, 2, stage, BY_HAND, **options).train(resume, epochs=EPOCHS)

    at = {epoch: f"checkpoint-{STEPS * (epoch + 1)}" if by == "trainer" else f"epoch{epoch}" for epoch in range(2)}
    with owners.served():
        losses, state = train(out)
        with ds_frozen_patch.full_checkpoint():
            train(f"{out}/full", Path(out, at[0]))
    return train(f"{out}/plain", Path(out, "full", at[1])), (losses[2 * STEPS :], state)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("by", ["lightning", *OWNERS])
def test_a_resume_within_full_checkpoint(ranks: Any, tmp_path: Path, by: str, stage: int) -> None:
    found = (
        ranks(2, by_lightning, out=str(tmp_path), stage=stage)
        if by == "lightning"
        else ranks(2, by_others, by=by, out=str(tmp_path), stage=stage)
    )
    for plain, expected in found:
        assert plain == expected

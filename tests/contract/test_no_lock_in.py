"""Promise 6: plain Lightning loads what we write, and we load what others write."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import cell, runs
from kit.cell import CELL, DeepSpeedStrategy, pl
from kit.checkpoints import model_states

from ds_frozen_patch.record import KEY, TRAINABLE_ONLY, LeftOut, Record, write_record

pytestmark = pytest.mark.promise(6)
HAS_STRICT_LOADING = hasattr(pl.LightningModule, "strict_loading")


def train(out: str, stage: int, **strategy: Any) -> tuple[list[float], dict[str, str]]:
    trainer = runs.trainer(out, 2, strategy=DeepSpeedStrategy(config=runs.config(stage), **strategy))
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    return module.losses[runs.BATCHES :], runs.trained_state(module)


def resume(saved: str, out: str, stage: int, seed: int = 1, strict: bool = True) -> tuple[list[float], dict[str, str]]:
    trainer = runs.trainer(f"{out}/again", 2, stage)
    module = runs.LoraRun(seed=seed)
    module.strict_loading = strict
    trainer.fit(module, runs.batches(2), ckpt_path=f"{saved}/epoch=0.ckpt")
    return module.losses, runs.trained_state(module)


def ours_into_plain(out: str, stage: int) -> tuple[Any, Any]:
    cell.trainable_only()
    trained = train(out, stage)
    cell.stop()
    return trained, resume(out, out, stage, strict=False)


@pytest.mark.series
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_lightning_loads_ours(ranks: Any, tmp_path: Path, stage: int) -> None:
    for trained, resumed in ranks(2, ours_into_plain, out=str(tmp_path), stage=stage):
        assert resumed == trained


def train_trainable_only(out: str, stage: int) -> Any:
    cell.trainable_only()
    trainer = runs.trainer(out, 2, stage, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(2))
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    return train(out, stage)


def ours_into_series(out: str, stage: int) -> list[str]:
    """What a patched Lightning says of its own checkpoints once they have our record in place of its list."""
    train_trainable_only(out, stage)
    if torch.distributed.get_rank() == 0:
        for file in (*Path(out, "epoch=0.ckpt", "checkpoint").glob("*model_states.pt"), Path(out, "weights.ckpt")):
            saved = torch.load(file, map_location="cpu", weights_only=False)
            left_out = tuple(LeftOut((name,), (1,), "float32", None) for name in saved.pop("excluded_parameters"))
            record = Record("0123abcd", 2, stage, 2, {}, TRAINABLE_ONLY, left_out)
            in_folder = file.name != "weights.ckpt"
            torch.save({**saved, KEY: record.save if in_folder else record.to_json()}, file)
            if in_folder:
                write_record(file.parent, record)
    torch.distributed.barrier()
    resume(out, out, stage)
    return refusals(out, stage, f"{out}/epoch=0.ckpt", f"{out}/weights.ckpt")


if CELL.patches:

    @pytest.mark.series
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_a_lightning_with_the_series_reads_our_record(ranks: Any, tmp_path: Path, stage: int) -> None:
        for refused in ranks(2, ours_into_series, out=str(tmp_path), stage=stage):
            assert len(refused) == 3
            assert all("extra.weight" in text for text in refused)


@pytest.mark.series("alone")
@pytest.mark.parametrize("stage", [2, 3])
def test_saves_for_plain_lightning(ranks: Any, saved: Path, stage: int) -> None:
    """Leaves what the next test takes where the same Lightning is as it was released."""
    out = saved / CELL.name / f"zero{stage}"
    facts = ranks(2, train_trainable_only, out=str(out), stage=stage)
    (out / "facts.json").write_text(json.dumps(facts))


def series_into_plain_and_ours(saved: str, out: str, stage: int) -> tuple[list[Any], list[str]]:
    plain = [resume(saved, out, stage, strict=False)] if HAS_STRICT_LOADING else []
    cell.trainable_only()
    refused = refusals(out, stage, f"{saved}/epoch=0.ckpt", f"{saved}/weights.ckpt")
    return [*plain, resume(saved, out, stage)], refused


class WithMoreFrozen(runs.LoraRun):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(2, 2).requires_grad_(False)


def refusals(out: str, stage: int, *checkpoints: str) -> list[str]:
    """What is said of checkpoints that lack a frozen module which was not left out of them."""
    methods = [*("fit" for _ in checkpoints[:1]), *("test" for _ in checkpoints)]
    return [
        runs.refusal(
            getattr(runs.trainer(f"{out}/other", 2, stage, enable_checkpointing=False), method),
            WithMoreFrozen(),
            runs.batches(2),
            ckpt_path=checkpoint,
        )[1]
        for method, checkpoint in zip(methods, (checkpoints[0], *checkpoints), strict=True)
    ]


if CELL.twin:

    @pytest.mark.parametrize("stage", [2, 3])
    def test_what_a_lightning_with_the_series_saved(ranks: Any, saved: Path, tmp_path: Path, stage: int) -> None:
        folder = saved / f"{CELL.name}-patched" / f"zero{stage}"
        trained = json.loads((folder / "facts.json").read_text())
        found = ranks(2, series_into_plain_and_ours, saved=str(folder), out=str(tmp_path), stage=stage)
        for before, (after, refused) in zip(trained, found, strict=True):
            assert after
            assert all(list(item) == before for item in after)
            assert len(refused) == 3
            assert all("extra.weight" in text for text in refused)


def plain_into_ours(out: str, stage: int) -> tuple[Any, Any, list[str]]:
    trained = train(out, stage)
    cell.trainable_only()
    with runs.heard() as messages:
        # Another seed: the frozen parameters must come from the checkpoint.
        resumed = resume(out, out, stage, seed=2)
    return trained, resumed, [m for m in messages if m.startswith("WARNING")]


@pytest.mark.series
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_full_checkpoint_of_plain_lightning(ranks: Any, tmp_path: Path, stage: int) -> None:
    for rank, (trained, resumed, warned) in enumerate(ranks(2, plain_into_ours, out=str(tmp_path), stage=stage)):
        assert resumed == trained
        assert len(warned) == (rank == 0 and not CELL.patches)  # the shim saves such a base from then on
        assert all("a checkpoint has replaced them" in message for message in warned)


def frozen_since(out: str, stage: int) -> tuple[Any, Any]:
    """Test from a full checkpoint with a parameter frozen that was trained at its save."""
    train(out, stage)
    cell.trainable_only()
    losses = []
    for freeze in (False, True):
        module = runs.LoraRun(seed=2)
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.requires_grad and not freeze)
        (loss,) = runs.trainer(out, 2, stage).test(module, runs.batches(2), f"{out}/epoch=0.ckpt", verbose=False)
        losses.append(loss["test_loss"])
    return losses[0], losses[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_full_checkpoint_with_a_parameter_frozen_since(ranks: Any, tmp_path: Path, stage: int) -> None:
    for before, after in ranks(2, frozen_since, out=str(tmp_path), stage=stage):
        assert after == before


def poc_into_ours(out: str, stage: int) -> tuple[Any, Any, list[str]]:
    """The feature request's proof of concept: the strategy's method replaced, the flag set by hand."""
    original = DeepSpeedStrategy.save_checkpoint

    def save_checkpoint(self: Any, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        filepath = self.broadcast(filepath)
        checkpoint = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        self.deepspeed_engine.save_checkpoint(
            filepath, client_state=checkpoint, tag="checkpoint", exclude_frozen_parameters=True
        )

    DeepSpeedStrategy.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    try:
        trained = train(out, stage)
    finally:
        DeepSpeedStrategy.save_checkpoint = original  # type: ignore[method-assign]
    return load_with_warnings(out, stage, trained)


def native_into_ours(out: str, stage: int) -> tuple[Any, Any, list[str]]:
    return load_with_warnings(out, stage, train(out, stage, exclude_frozen_parameters=True))


def load_with_warnings(out: str, stage: int, trained: Any) -> tuple[Any, Any, list[str]]:
    cell.trainable_only()
    with runs.heard() as messages:
        resumed = resume(out, out, stage)
    return trained, resumed, [m for m in messages if m.startswith("WARNING")]


HAS_FLAG = not CELL.patches and "exclude_frozen_parameters" in inspect.signature(DeepSpeedStrategy).parameters


@pytest.mark.series
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["proof of concept", *(["native flag"] if HAS_FLAG else [])])
def test_trainable_only_of_others(ranks: Any, tmp_path: Path, stage: int, way: str) -> None:
    function = native_into_ours if way == "native flag" else poc_into_ours
    first, second = ranks(2, function, out=str(tmp_path), stage=stage)
    assert first[0] == first[1]
    assert second[0] == second[1]
    if not CELL.patches:
        assert len(first[2]) == 1
        assert "cannot be verified" in first[2][0]
    assert second[2] == []
    # Such a checkpoint still holds the tied alias: DeepSpeed excludes it under one name only.
    saved = model_states(tmp_path / "epoch=0.ckpt")[0]
    assert "ds_frozen_patch" not in saved
    assert any(name.endswith("lm_head.weight") for name in saved["module"])

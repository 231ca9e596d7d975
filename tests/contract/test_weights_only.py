"""Promise 8: `save_weights_only=True` writes one file with the weights, without optimizer state."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import zero
from kit import cell, runs
from kit.cell import PRECISION, Callback, DeepSpeedStrategy, ModelCheckpoint, pl
from memory import memory, reset_peak_memory
from safetensors.torch import load_file

import ds_frozen_patch
from ds_frozen_patch.checkpoint.format.records import Records, TensorSource
from ds_frozen_patch.record import Record

pytestmark = pytest.mark.promise(8)


def save_weights_only(out: str, stage: int) -> dict[str, Any]:
    cell.trainable_only()
    callback = ModelCheckpoint(out, filename="weights", save_weights_only=True)
    # In ZeRO-3 small parameters stay whole otherwise, and nothing has to be gathered.
    strategy = DeepSpeedStrategy(config=runs.config(stage, stage3_param_persistence_threshold=0))
    trainer = runs.trainer(out, 2, strategy=strategy, epochs=1, callbacks=[callback])
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    (trained,) = trainer.test(module, runs.batches(2), verbose=False)
    digests = runs.trained_state(module)
    (best,) = trainer.test(module, runs.batches(2), ckpt_path="best", verbose=False)
    fresh = runs.trainer(out, 2, stage, enable_checkpointing=False)
    (tested,) = fresh.test(runs.LoraRun(), runs.batches(2), ckpt_path=f"{out}/weights.ckpt", verbose=False)
    return {"trained": trained, "best": best, "tested": tested, "digests": digests}


@pytest.mark.series
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_save_weights_only(ranks: Any, tmp_path: Path, stage: int) -> None:
    first, second = ranks(2, save_weights_only, out=str(tmp_path), stage=stage)
    assert first["tested"] == first["best"] == first["trained"]
    assert second["tested"] == second["best"] == second["trained"]
    file = tmp_path / "weights.ckpt"
    assert file.is_file()
    saved = torch.load(file, weights_only=False)
    weights = saved["state_dict"]
    assert {name for name in first["digests"] if "lora_" in name or name == "seen"} == weights.keys()
    assert {name: runs.digest(value) for name, value in weights.items()}.items() <= first["digests"].items()
    assert not saved.keys() & {"optimizer_states", "lr_schedulers", "module", "optimizer"}
    assert weights["model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].dtype == (
        torch.bfloat16 if PRECISION == "bf16-mixed" else torch.float32
    )


def strategy(stage: int) -> Any:
    return DeepSpeedStrategy(
        config=runs.config(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    )


def train_and_save(out: str, stage: int, precision: str = PRECISION) -> tuple[pl.Trainer, runs.LoraRun]:
    """Train an epoch; save its end as weights alone and as a checkpoint."""
    trainer = runs.trainer(
        out,
        2,
        strategy=strategy(stage),
        epochs=1,
        enable_checkpointing=False,
        precision=precision if stage else "32-true",
    )
    module = runs.LoraRun()
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    trainer.save_checkpoint(f"{out}/small.ckpt")
    return trainer, module


class Hooked(runs.LoraRun):
    """Its hook changes what Trainer has dumped, or a `state_dict` of its own does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return state if self.way != "own" else {f"mine.{name}": 1 * value for name, value in state.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if self.way == "without optimizer":
            del checkpoint["optimizer_states"]
        elif self.way == "with optimizer":
            checkpoint["optimizer_states"] = []
        elif self.way == "renamed":
            for name in list(state):
                state[name.replace("model.base_model", "mine")] = state.pop(name)
        elif self.way == "copied":
            checkpoint["state_dict"] = {f"mine.{name}": value.clone().double() for name, value in state.items()}


def fit_and_resume(out: str, stage: int, by: str) -> Any:
    """Train two epochs, and the second again from the end of the first."""
    if by == "ours":
        ds_frozen_patch.patch()
    whole, resumed = Hooked("without optimizer"), Hooked("without optimizer")
    runs.trainer(out, 2, stage).fit(whole, runs.batches(2))
    runs.trainer(f"{out}/again", 2, stage).fit(resumed, runs.batches(2), ckpt_path=f"{out}/epoch=0.ckpt")
    return whole.losses[runs.BATCHES :], resumed.losses, runs.trained_state(whole) == runs.trained_state(resumed)


@pytest.mark.everyday
@pytest.mark.promise(15)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_that_removes_the_optimizer_changes_no_resume(ranks: Any, tmp_path: Path, stage: int) -> None:
    """DeepSpeed saves it: what a program asks for is weights-only, not what its hook leaves."""
    plain, ours = (ranks(2, fit_and_resume, out=str(tmp_path / by), stage=stage, by=by) for by in ("plain", "ours"))
    assert plain == ours
    for whole, resumed, is_same in ours:
        assert whole == resumed
        assert is_same
    assert len(list((tmp_path / "ours" / "epoch=0.ckpt").rglob("*optim_states.pt"))) == 2


def save_hooked(out: str, stage: int, way: str) -> dict[str, Any]:
    """The trained values by their names in the module, and the names of the others."""
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, strategy=strategy(stage), epochs=1, enable_checkpointing=False)
    module = Hooked(way)
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    found = {}
    for name, parameter in module.named_parameters():
        with zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone() if parameter.requires_grad else None
    return found


@pytest.mark.everyday
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["renamed", "copied", "own", "with optimizer"])
def test_weights_that_a_hook_has_changed(ranks: Any, tmp_path: Path, stage: int, way: str) -> None:
    """Each tensor has its values, whatever the hook calls it."""
    found = ranks(2, save_hooked, out=str(tmp_path), stage=stage, way=way)[0]
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=False)
    state = saved["state_dict"]

    def name_of(name: str) -> str:
        names = {"renamed": name.replace("model.base_model", "mine"), "copied": f"mine.{name}", "own": f"mine.{name}"}
        return names.get(way, name)

    for name, value in found.items():
        if value is not None:
            assert torch.equal(state[name_of(name)], value.to(state[name_of(name)].dtype)), name
        elif (
            way not in ("copied", "own") or stage == 3
        ):  # where frozen parameters have values, a copy is the program's own
            assert name_of(name) not in state
    assert state[name_of("seen")].item() == runs.BATCHES
    assert all(value.numel() for value in state.values())
    assert ("optimizer_states" in saved) == (way == "with optimizer")
    assert (tmp_path / "weights.ckpt").stat().st_size < 200_000 * (5 if way == "copied" else 1)


class Remembers(Callback):
    """Records the weights at the start of training."""

    steps = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps = trainer.global_step
        trainer.save_checkpoint(f"{trainer.default_root_dir}/start.ckpt", weights_only=True)


class WithoutDecay(runs.LoraRun):
    """DeepSpeed 0.10 and 0.12 apply weight decay to the masters, not the weights, when an engine is built."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)


def fit_from_weights(out: str, stage: int) -> list[Any]:
    ds_frozen_patch.patch()
    train_and_save(out, stage)
    found = []
    for way in ("by trainer", "by hand"):
        module, start = WithoutDecay(), Remembers()
        if way == "by hand":
            ds_frozen_patch.load_trainable(module, f"{out}/weights.ckpt")
        fresh = runs.trainer(
            out,
            2,
            strategy=strategy(stage),
            enable_checkpointing=False,
            callbacks=[start],
            precision=PRECISION if stage else "32-true",
        )
        with runs.heard() as messages:
            fresh.fit(module, runs.batches(2), ckpt_path=f"{out}/weights.ckpt" if way == "by trainer" else None)
        said = [m for m in messages if "the optimizer, the schedulers and the step count start anew" in m]
        found.append((module.losses, runs.trained_state(module), start.steps, len(said)))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fit_starts_from_weights(ranks: Any, tmp_path: Path, stage: int) -> None:
    for by_trainer, by_hand in ranks(2, fit_from_weights, out=str(tmp_path), stage=stage):
        assert by_trainer[:3] == by_hand[:3]
        assert by_trainer[0]
        assert by_trainer[2] == 0
        assert (by_trainer[3], by_hand[3]) == (1, 0)


def save_files(out: str) -> None:
    ds_frozen_patch.patch()
    trainer, _ = train_and_save(out, 2, "32-true")
    Path(out, "folder").mkdir(exist_ok=True)
    trainer.save_checkpoint(f"{out}/folder", weights_only=True)
    with ds_frozen_patch.full_checkpoint():
        trainer.save_checkpoint(f"{out}/full.ckpt")
        trainer.save_checkpoint(f"{out}/whole.ckpt", weights_only=True)


@pytest.mark.promise(9)
@pytest.mark.everyday
def test_a_weights_only_file_is_consolidated_like_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_files, out=str(tmp_path))

    def of(name: str, **options: Any) -> dict[str, Any]:
        target = tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt"
        done = ds_frozen_patch.consolidate(tmp_path / name, target, **options)
        state = dict(torch.load(target, weights_only=True))
        assert done.is_whole == ("ds_frozen_patch" not in state)
        return state

    full, small = of("full.ckpt")["state_dict"], of("small.ckpt")
    for name in ("weights.ckpt", "folder"):
        found = of(name)
        assert {n: runs.digest(v) for n, v in found["state_dict"].items()} == {
            n: runs.digest(v) for n, v in small["state_dict"].items()
        }
        ours, theirs = (Record.from_json(state["ds_frozen_patch"], name) for state in (found, small))
        assert ours.left_out == theirs.left_out
    for found in (of("weights.ckpt", base=tmp_path / "full.ckpt"), of("whole.ckpt")):
        assert {n: runs.digest(v) for n, v in found["state_dict"].items()} == {
            n: runs.digest(v) for n, v in full.items()
        }
        tied = ("model.base_model.model.lm_head.weight", "model.base_model.model.model.embed_tokens.weight")
        assert len({found["state_dict"][name].data_ptr() for name in tied}) == 1
        assert found["epoch"] == 1
    ds_frozen_patch.consolidate(tmp_path / "whole.ckpt", tmp_path / "half.safetensors", dtype="bf16")
    assert {value.dtype for value in load_file(tmp_path / "half.safetensors").values()} == {torch.bfloat16, torch.int64}
    converter = __import__("importlib").import_module(f"{pl.__name__}.utilities.deepspeed")
    ds_frozen_patch.patch()
    try:
        convert = converter.convert_zero_checkpoint_to_fp32_state_dict
        given = convert(str(tmp_path / "weights.ckpt"), str(tmp_path / "converted.ckpt"))
    finally:
        ds_frozen_patch.unpatch()
    assert given["state_dict"].keys() == small["state_dict"].keys()

    torch.save({"weights": {}}, tmp_path / "other.ckpt")
    for name, options, said in (
        ("other.ckpt", {}, "which has a `state_dict`"),
        ("weights.ckpt", {"tag": "checkpoint"}, "has no tags"),
        ("whole.ckpt", {"base": tmp_path / "full.ckpt"}, "no base can be added"),
    ):
        with pytest.raises(ds_frozen_patch.CheckpointError, match=said):
            of(name, **options)


class OneMore(runs.LoraRun):
    """A buffer more than the run's model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.zeros(1))


def load_onto(out: str, stage: int) -> list[str]:
    ds_frozen_patch.patch()
    train_and_save(out, stage)
    raised = []
    for module in (runs.LoraRun(seed=2), runs.LoraRun(rank=8), OneMore()):
        try:
            trainer = runs.trainer(out, 2, strategy=strategy(stage), enable_checkpointing=False)
            trainer.test(module, runs.batches(2), ckpt_path=f"{out}/weights.ckpt", verbose=False)
        except ds_frozen_patch.CheckpointMismatchError as error:
            raised.append(str(error))
    return raised


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_another_model(ranks: Any, tmp_path: Path, stage: int) -> None:
    for other_base, other_shape, more in ranks(2, load_onto, out=str(tmp_path), stage=stage):
        assert "The base is not the one that the checkpoint was saved with: 15 of 20" in other_base  # not the norms
        assert "weights.ckpt does not fit this module: other shapes:" in other_shape
        assert "weights.ckpt does not fit this module: missing keys: 'more'" in more


def export_at_save(out: str, stage: int, async_save: bool) -> None:
    for kind in ("safetensors", "peft"):
        ds_frozen_patch.patch(export=kind, async_save=async_save)
        train_and_save(f"{out}/{kind}", stage)
        ds_frozen_patch.unpatch()


@pytest.mark.parametrize(("stage", "async_save"), [(0, False), (1, False), (2, False), (2, True), (3, False)])
def test_an_export_at_every_save(ranks: Any, tmp_path: Path, stage: int, async_save: bool) -> None:
    """It is what the tool makes of the checkpoint: trained weights in fp32."""
    ranks(2, export_at_save, out=str(tmp_path), stage=stage, async_save=async_save)
    for kind, inside in (("safetensors", "trainable.safetensors"), ("peft", "adapter")):
        checkpoint = tmp_path / kind / "small.ckpt"
        ds_frozen_patch.export(checkpoint, tmp_path / f"by tool {kind}", format=kind)
        found = checkpoint / inside
        made = tmp_path / f"by tool {kind}"
        if kind == "peft":
            config, expected = ((folder / "adapter_config.json").read_bytes() for folder in (found, made))
            assert config == expected
            found, made = (folder / "adapter_model.safetensors" for folder in (found, made))
        assert found.read_bytes() == made.read_bytes()
        assert {value.dtype for name, value in load_file(found).items() if "lora_" in name} == {torch.float32}
        assert not [item for item in checkpoint.rglob("*") if "partial" in item.name]


def save_with_nvme(out: str) -> str:
    """Raise in a save what DeepSpeed before 0.13 does with parameters on NVMe, which is not available here.

    Rank 1 is late: DeepSpeed creates the folder on each rank, and rank 0 has removed it by then.
    """
    from deepspeed import DeepSpeedEngine

    said = "ZeRO-3 does not yet support checkpointing with NVMe offloading, please disable for now."

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(said)

    original, create = DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._create_checkpoint_file

    def create_late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(os.environ["RANK"]))
        return create(*args, **kwargs)

    DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._create_checkpoint_file = refuse, create_late
    try:
        ds_frozen_patch.patch()
        with pytest.raises(ds_frozen_patch.CheckpointError) as raised:
            train_and_save(out, 2)
        assert Path(out, "weights.ckpt").is_file()
        return str(raised.value)
    finally:
        DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._create_checkpoint_file = original, create


def test_weights_only_where_deepspeed_cannot_save(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, save_with_nvme, out=str(tmp_path)):
        assert "NVMe offloading" in said
        assert "weights_only=True" in said
    assert [item.name for item in tmp_path.iterdir()] == ["weights.ckpt"]


class Wide(runs.LoraRun):
    """Many frozen parameters, few trained ones."""

    def __init__(self) -> None:
        super().__init__(hidden=1024, vocabulary=32768)


def save_and_measure(out: str) -> tuple[int, int]:
    """Return how far this rank's memory rose while weights alone were saved, and the bytes of its frozen parameters."""
    ds_frozen_patch.patch()
    trainer = runs.trainer(out, 2, strategy=strategy(3), epochs=1, enable_checkpointing=False, limit_train_batches=1)
    module = Wide()
    trainer.fit(module, runs.batches(2))
    trainer.save_checkpoint(f"{out}/first.ckpt", weights_only=True)  # the fingerprints are made once
    reset_peak_memory()
    before = memory("VmRSS")
    trainer.save_checkpoint(f"{out}/weights.ckpt", weights_only=True)
    frozen = sum(
        getattr(p, "ds_numel", p.numel()) * p.element_size() for p in module.parameters() if not p.requires_grad
    )
    return memory("VmHWM") - before, frozen


@pytest.mark.everyday
def test_a_save_gathers_no_frozen_parameter(ranks: Any, tmp_path: Path) -> None:
    for added, frozen in ranks(2, save_and_measure, out=str(tmp_path)):
        trained = (tmp_path / "weights.ckpt").stat().st_size
        assert frozen > 90_000_000
        assert trained < 1_000_000
        assert added < trained + 64 * 2**20
        assert added < frozen / 2


def save_to_the_end(out: str) -> None:
    train_and_save(out, 3)
    ds_frozen_patch.wait()


def export_onto_a_full_disk(out: str) -> str:
    original, written = Records.read, list[TensorSource]()

    def fill(records: Records, tensor: TensorSource) -> memoryview:
        if len(written) > 3 and os.environ["RANK"] == "0":
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(tensor)
        return original(records, tensor)

    ds_frozen_patch.patch(export="safetensors")
    with mock.patch.object(Records, "read", fill), pytest.raises(ds_frozen_patch.CheckpointError) as raised:
        save_to_the_end(out)
    return str(raised.value)


def test_an_export_that_cannot_be_written(ranks: Any, tmp_path: Path) -> None:
    """Every rank raises, and none waits for another."""
    for said in ranks(2, export_onto_a_full_disk, out=str(tmp_path)):
        assert "small.ckpt/trainable.safetensors cannot be written (No space left on device), with" in said
    assert not (tmp_path / "small.ckpt").exists()

"""`patch(weights_only=True)`: a load runs nothing that a checkpoint names, and benign runs resume as before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from kit import owners, runs
from kit.cell import Callback, ModelCheckpoint
from kit.checkpoints import changed, precision_of, refresh

import ds_frozen_patch
from ds_frozen_patch.common.overrides import overridden

pytestmark = [
    pytest.mark.promise(15),
    pytest.mark.everyday,
    pytest.mark.skipif(
        not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"),
        reason="torch is too old for weights_only=True",
    ),
]


class RunsCode:
    """Runs code when a pickle of it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def whole_and_resumed(out: str, world_size: int, stage: int, precision: str, trust: bool) -> Any:
    ds_frozen_patch.patch(weights_only=not trust)
    results = []
    for resume_from in (None, f"{out}/epoch=0.ckpt"):
        folder = out if resume_from is None else f"{out}/again"
        trainer = runs.trainer(folder, world_size, stage, precision=precision)
        module = runs.LoraRun()
        trainer.fit(module, runs.batches(world_size), ckpt_path=resume_from)
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        results.append((module.losses[-runs.BATCHES :], runs.trained_state(module), trainer.global_step))
    tester = runs.trainer(f"{out}/test", world_size, stage, precision=precision, enable_checkpointing=False)
    tested = [
        tester.test(runs.LoraRun(), runs.batches(world_size), ckpt_path=f"{out}/{name}.ckpt", verbose=False)
        for name in ("epoch=1", "weights")
    ]
    return results, tested


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_runs_resume_with_weights_only(ranks: Any, tmp_path: Path, stage: int) -> None:
    arguments: dict[str, Any] = {"world_size": 2, "stage": stage, "precision": precision_of(stage), "trust": False}
    for (whole, resumed), (tested, of_weights) in ranks(2, whole_and_resumed, out=str(tmp_path), **arguments):
        assert whole == resumed
        assert tested == of_weights


def resume_all(out: str, paths: list[str], stage: int, trust: bool) -> list[tuple[str, str]]:
    """Return the error and the messages of each resume; all in one run, so that the ranks stay in step."""
    ds_frozen_patch.patch(weights_only=not trust)
    found = []
    for path in paths:
        trainer = runs.trainer(out, 2, stage, precision=precision_of(stage), enable_checkpointing=False)
        try:
            trainer.fit(runs.LoraRun(), runs.batches(2), ckpt_path=path)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("resumed", ""))
    return found


def how_files_are_loaded(out: str) -> list[Any]:
    load, seen = torch.load, list[Any]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    with owners.served(weights_only=True):
        run = owners.Run("deepspeed", out, 2, 2)
        run.train(epochs=1)
        with overridden([(torch, "load", noted)]):
            run.load(run.at(0))
    return seen


@pytest.mark.short
def test_torch_loads_no_more_than_weights(ranks: Any, tmp_path: Path) -> None:
    """It does so whatever becomes of a file after it was inspected."""
    for seen in ranks(2, how_files_are_loaded, out=str(tmp_path)):
        assert seen
        assert set(seen) == {True}


def hostile_model(path: Path, canary: Path) -> None:
    changed(min(path.rglob("*model_states.pt")), lambda state: state.update(mine=RunsCode(canary)))


def hostile_optimizer(path: Path, canary: Path) -> None:
    changed(max(path.rglob("*optim_states.pt")), lambda state: state.update(mine=RunsCode(canary)))


def hostile_hyper_parameters(path: Path, canary: Path) -> None:
    changed(max(path.rglob("*model_states.pt")), lambda state: state["hyper_parameters"].update(mine=RunsCode(canary)))


def of_the_old_format(path: Path, canary: Path) -> None:
    for file in path.rglob("*_states.pt"):
        state = torch.load(file, weights_only=False)
        torch.save({**state, "mine": RunsCode(canary)}, file, _use_new_zipfile_serialization=False)
        refresh(file.parent)


def deeply_nested(path: Path, canary: Path) -> None:
    deep: list[Any] = [RunsCode(canary)]
    for _ in range(150):
        deep = [deep]
    changed(max(path.rglob("*optim_states.pt")), lambda state: state.update(mine=deep))


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "model": hostile_model,
    "optimizer": hostile_optimizer,
    "hyper-parameters": hostile_hyper_parameters,
    "old format": of_the_old_format,
    "deeply nested": deeply_nested,
}


@pytest.mark.short
@pytest.mark.parametrize("stage", [2, 3])
def test_hostile_checkpoints_are_refused_before_anything_runs(ranks: Any, tmp_path: Path, stage: int) -> None:
    """Every rank refuses, whichever rank's file it is; with trust, each resume runs the code."""
    canary = tmp_path / "canary"
    ranks(2, whole_and_resumed, out=str(tmp_path), world_size=2, stage=stage, precision=precision_of(stage), trust=True)
    paths = []
    for name, attack in ATTACKS.items():
        paths.append(tmp_path / f"{name.replace(' ', '-')}.ckpt")
        shutil.copytree(tmp_path / "epoch=0.ckpt", paths[-1])
        attack(paths[-1], canary)
    single = tmp_path / "single.ckpt"
    shutil.copy(tmp_path / "weights.ckpt", single)
    changed(single, lambda state: state.update(mine=RunsCode(canary)))
    paths.append(single)
    arguments: dict[str, Any] = {"out": str(tmp_path / "out"), "paths": list(map(str, paths)), "stage": stage}
    for found in ranks(2, resume_all, trust=False, **arguments):
        for path, (kind, text) in zip(paths, found, strict=True):
            assert kind == "CheckpointError", (path.name, kind, text)
            assert path.name in text
            assert "system" in text or path.stem in ("old-format",), text
    assert not canary.exists()
    for path in paths[:-1]:  # Lightning 2.6 reads a single file with weights_only=True by itself
        canary.unlink(missing_ok=True)
        ranks(2, resume_all, trust=True, **{**arguments, "paths": [str(path)]})
        assert canary.exists(), f"{path.name} would not have run anything"


def test_fabric_and_torch_load_of_the_program(ranks: Any, tmp_path: Path) -> None:
    """After a load, a program's own `torch.load` works as before, and classes that it declares safe are accepted."""
    for said in ranks(2, fabric_life, out=str(tmp_path)):
        assert said == ["refused, by name: True", "loaded", True]


def train_on(out: str, trust: bool, is_monitored: bool) -> None:
    ds_frozen_patch.patch(weights_only=not trust)
    options: dict[str, Any] = {"monitor": "epoch", "mode": "max", "save_last": True} if is_monitored else {}
    keeps = ModelCheckpoint(f"{out}/kept", filename="{epoch}", save_top_k=1, **options)
    resume_from = f"{out}/named.ckpt" if Path(out, "named.ckpt").is_dir() else None
    trainer = runs.trainer(out, 2, epochs=2 if resume_from else 1, callbacks=[keeps])
    before = Path.cwd()
    os.chdir(out)
    try:
        trainer.fit(Logs(), runs.batches(2), ckpt_path=resume_from)
    finally:
        os.chdir(before)


class Logs(runs.LoraRun):
    """Logs what the callback monitors."""

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("outside", "is_monitored"), [("..", True), ("relative", False), ("link", True), ("link", False)]
)
def test_retention_removes_nothing_that_a_checkpoint_names_outside(
    ranks: Any, tmp_path: Path, outside: str, is_monitored: bool, trust: bool
) -> None:
    """Lightning removes what is in its folder by the name alone."""
    victim, kept = tmp_path / "victim", tmp_path / "kept"
    victim.mkdir()
    options: dict[str, Any] = {"out": str(tmp_path), "trust": trust, "is_monitored": is_monitored}
    ranks(2, train_on, **options)
    (first,) = (path for path in kept.iterdir() if path.name.startswith("epoch"))
    shutil.copytree(first, tmp_path / "named.ckpt")
    (kept / "link").symlink_to(tmp_path)
    named = {"..": f"{kept}/../victim", "relative": "kept/link/victim", "link": f"{kept}/link/victim"}

    def name_it(state: dict[str, Any]) -> None:
        ((_, callback),) = ((key, value) for key, value in state["callbacks"].items() if "best_k_models" in value)
        path = named[outside]
        if is_monitored:
            score = next(iter(callback["best_k_models"].values()))
            callback.update(best_k_models={path: score}, kth_best_model_path=path)
        else:
            callback.update(best_model_path=path)

    changed(min((tmp_path / "named.ckpt").rglob("*model_states.pt")), name_it)
    ranks(2, train_on, **options)
    assert victim.exists() is not trust
    assert (kept / "epoch=1.ckpt").exists()


class Sweeps(Callback):
    """A callback of the program's, which removes what it has noted before."""

    def __init__(self, folder: str) -> None:
        self.folder, self.noted, self.other = folder, list[str](), dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return {"noted": self.noted, **self.other}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.noted, self.other = state_dict.pop("noted"), state_dict

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            for path in self.noted:
                Path(path).unlink()
            self.noted = [f"{self.folder}/note-{trainer.current_epoch}"]
            Path(self.noted[0]).touch()


def swept(out: str, trust: bool, resume_from: str | None) -> dict[str, Any]:
    ds_frozen_patch.patch(weights_only=not trust)
    sweeps, keeps = Sweeps(f"{out}/kept"), ModelCheckpoint(f"{out}/kept", filename="{epoch}")
    trainer = runs.trainer(out, 2, epochs=2 if resume_from else 1, callbacks=[sweeps, keeps])
    trainer.fit(runs.LoraRun(), runs.batches(2), ckpt_path=resume_from)
    return sweeps.other


@pytest.mark.parametrize("trust", [False, True])
def test_a_callback_of_the_program_gets_no_path_outside(ranks: Any, tmp_path: Path, trust: bool) -> None:
    Path(tmp_path, "kept").mkdir()
    ranks(2, swept, out=str(tmp_path), trust=trust, resume_from=None)
    shutil.copytree(tmp_path / "kept" / "epoch=0.ckpt", tmp_path / "named.ckpt")
    (victim := tmp_path / "victim").touch()
    other = {"monitor": "val/loss", "scores": {"a/b": 1.5}, "text": "and so on... and on"}

    def name_it(state: dict[str, Any]) -> None:
        (callback,) = (value for value in state["callbacks"].values() if "noted" in value)
        callback["noted"] += [str(victim)]
        callback.update(other)

    changed(min((tmp_path / "named.ckpt").rglob("*model_states.pt")), name_it)
    assert ranks(2, swept, out=str(tmp_path), trust=trust, resume_from=str(tmp_path / "named.ckpt")) == [other] * 2
    assert victim.exists() is not trust
    assert [item.name for item in (tmp_path / "kept").glob("note*")] == ["note-1"]


def test_retention_removes_what_is_in_the_folder_of_the_run(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    out = tmp_path / "run"
    for _ in range(2):
        ranks(2, train_on, out=str(out), trust=False, is_monitored=True)
        if not (out / "named.ckpt").exists():
            shutil.copytree(out / "kept" / "epoch=0.ckpt", out / "named.ckpt")
    assert [path.name for path in (out / "kept").glob("epoch*")] == ["epoch=1.ckpt"]


class Mine:
    """A class of the user's in a checkpoint."""


def fabric_life(out: str) -> list[Any]:
    ds_frozen_patch.patch(weights_only=True)
    fabric = runs.fabric(2, 2)
    model, optimizer = runs.fabric_setup(fabric)
    runs.fabric_epoch(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer, "mine": Mine()}
    fabric.save(f"{out}/one.ckpt", state)
    before, found = torch.load, []
    declared: tuple[list[Any], ...] = ([], [Mine])
    for safe in declared:
        with torch.serialization.safe_globals(safe):
            try:
                fabric.load(f"{out}/one.ckpt", state)
                found.append("loaded")
            except ds_frozen_patch.CheckpointError as error:
                found.append(f"refused, by name: {'Mine' in str(error)}")
    return [*found, torch.load is before]


def load_by_deepspeed(out: str, way: str) -> str:
    """What a load says that DeepSpeed does by itself: a universal one, or into an engine that is not served."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if way == "universal":
        ds_frozen_patch.patch(weights_only=True)
    universal = {"checkpoint": {"load_universal": True}} if way == "universal" else {}
    module = torch.nn.Linear(2, 2)
    config = runs.config(1) | {"train_micro_batch_size_per_gpu": 1, **universal}
    engine = deepspeed.initialize(model=module, config=config, optimizer=torch.optim.AdamW(module.parameters()))[0]
    ds_frozen_patch.patch(weights_only=True)
    try:
        engine.load_checkpoint(out)
    except ds_frozen_patch.CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("way", ["universal", "not served"])
@pytest.mark.parametrize("hidden", ["mp_rank_00_model_states.pt", "zero/weight/fp32.pt"])
def test_loads_of_deepspeed_run_nothing(ranks: Any, tmp_path: Path, way: str, hidden: str) -> None:
    canary = tmp_path / "canary"
    file = tmp_path / "step1" / hidden
    file.parent.mkdir(parents=True)
    torch.save({"module": {}, "mine": RunsCode(canary)}, file)
    (tmp_path / ("latest_universal" if way == "universal" else "latest")).write_text("step1")
    for said in ranks(2, load_by_deepspeed, out=str(tmp_path), way=way):
        assert "names 'posix.system'" in said
    assert not canary.exists()

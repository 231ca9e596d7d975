"""`ds-frozen-patch universal`: a universal checkpoint, made by DeepSpeed, from which plain Lightning resumes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
from tools_checkpoints import Checkpoints, changed, loaded, raw, settings, snapshot, weights_of
from under_test import CELL, DeepSpeedStrategy

from ds_frozen_patch import CheckpointError, consolidate, universal
from ds_frozen_patch.cli import main
from ds_frozen_patch.manifest import KEY
from ds_frozen_patch.parameters import plain
from ds_frozen_patch.tools import universal as module
from ds_frozen_patch.workarounds import fault

pytestmark = [pytest.mark.promise(10), pytest.mark.everyday]


@pytest.mark.once
@pytest.mark.parametrize(("stage", "kind"), [(1, "full"), pytest.param(3, "small", marks=pytest.mark.short)])
def test_it_contains_the_trained_state(checkpoints: Checkpoints, tmp_path: Path, stage: int, kind: str) -> None:
    many_groups = stage == 3 and CELL.releases[1].release < (0, 18)
    source = checkpoints(stage, module="lora" if many_groups else "uneven") / f"{kind}.ckpt"
    before = snapshot(source)
    made = tmp_path / "out.ckpt"
    done = universal(source, made)
    assert snapshot(source) == before
    assert [item.name for item in tmp_path.iterdir()] == ["out.ckpt"]
    assert done.size == sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    assert (made / "latest_universal").read_text() == "checkpoint"
    consolidate(source, tmp_path / "weights.ckpt")
    weights = weights_of(tmp_path / "weights.ckpt")
    held = {plain(file.parent.name): loaded(file) for file in (made / "checkpoint" / "zero").glob("*/fp32.pt")}
    found = {name: one["param"] if isinstance(one, dict) else one for name, one in held.items()}
    assert {"lora_" in name or "bend." in name for name in found} == {True}
    assert len(found) == 8 + 2 * (not many_groups)
    assert {name: raw(tensor.flatten()) for name, tensor in found.items()} == {
        name: raw(weights[name].flatten()) for name in found
    }
    state = loaded(min((made / "checkpoint").glob("*model_states.pt")))
    theirs = loaded(min((source / "checkpoint").glob("*model_states.pt")))
    assert (KEY in state) == (kind == "small")
    assert state["global_step"] == theirs["global_step"]
    assert state["module"].keys() == theirs["module"].keys()


def resume_plainly(path: str, out: str, world_size: int, stage: int) -> tuple[list[float], int]:
    """Resume with Lightning and DeepSpeed alone, which do not support `round_robin_gradients` here."""
    config = settings(3) if stage == 3 else runs.config(stage)
    strategy = DeepSpeedStrategy(config={**config, "checkpoint": {"load_universal": True}})
    options: dict[str, Any] = {"precision": "32-true", "enable_checkpointing": False}
    trainer = runs.trainer(out, world_size, strategy=strategy, epochs=2, **options)
    made = runs.LoraRun()
    trainer.fit(made, runs.batches(world_size), ckpt_path=path)
    return made.losses, trainer.global_step


def resume_under_patch(**options: Any) -> tuple[tuple[list[float], int], list[str], list[str]]:
    """What `resume_plainly` returns, our messages, and our keys in what the program loads."""
    import ds_frozen_patch
    from ds_frozen_patch.common.overrides import overridden

    keys: list[str] = []
    hooks = [(runs.LoraRun, "on_load_checkpoint", lambda _, checkpoint: keys.extend(checkpoint))]
    with ds_frozen_patch.patched(), runs.heard() as said, overridden(hooks):
        resumed = resume_plainly(**options)
    assert "epoch" in keys
    return resumed, [text for text in said if "load_universal" in text], [key for key in keys if KEY in key]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.once), 3])
def test_plain_lightning_resumes_from_it(checkpoints: Checkpoints, ranks: Any, tmp_path: Path, stage: int) -> None:
    source = checkpoints(stage, precision="32-true") / "small.ckpt"
    universal(source, tmp_path / "out.ckpt")
    options = {"path": str(tmp_path / "out.ckpt"), "out": str(tmp_path), "world_size": 2, "stage": stage}
    expected = ranks(2, resume_by_us, **{**options, "path": str(source)})
    plain = ranks(2, resume_plainly, **options)
    for (losses, steps), (theirs, their_steps) in zip(plain, expected, strict=True):
        assert steps == their_steps
        assert losses == pytest.approx(theirs, rel=1e-6)
    for rank, (resumed, said, keys) in enumerate(ranks(2, resume_under_patch, **options)):
        assert resumed == plain[rank]
        assert not keys
        assert len(said) == (rank == 0)
        assert stage == 3 or all("loads neither buffers nor frozen parameters" in text for text in said)


def resume_by_us(path: str, out: str, world_size: int, stage: int) -> tuple[list[float], int]:
    from tools_checkpoints import resume

    losses, _, steps = resume(path, out, world_size, stage, "32-true")
    return losses, steps


@pytest.mark.once
def test_what_cannot_be_converted(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.ckpt"

    def refused(source: Path) -> str:
        assert main(["universal", str(source), str(target)]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert not target.exists()
        return said.err.removeprefix("converting by deepspeed 0.17.6 ...\n")

    assert "First convert it to another stage: ds-frozen-patch reshard --stage 1" in refused(
        checkpoints(0) / "small.ckpt"
    )
    assert "parameter groups in ZeRO-3" in refused(checkpoints(3, module="uneven") / "small.ckpt")
    source = tmp_path / "in.ckpt"
    shutil.copytree(checkpoints(2) / "small.ckpt", source)
    for file in source.rglob("*optim_states.pt"):
        changed(file, lambda state: state["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg_sq"))
    assert "supports only the state of Adam" in refused(source)
    monkeypatch.setattr(module, "CONVERTER", "ds_frozen_patch.no_such_module")
    assert refused(checkpoints(2) / "small.ckpt").startswith(
        "ds-frozen-patch: The converter of deepspeed 0.17.6 failed; its last output was: "
    )
    older = tmp_path / "deepspeed" / "checkpoint" / "ds_to_universal.py"
    older.parent.mkdir(parents=True)
    older.write_text("def main(args):\n    extract_zero_shards(args)\n")
    monkeypatch.setattr(fault, "package_folder", lambda _: tmp_path / "deepspeed")
    assert "Install deepspeed>=0.14.5" in refused(checkpoints(3) / "small.ckpt")
    older.unlink()
    assert "Install deepspeed>=0.11.2" in refused(checkpoints(2) / "small.ckpt")
    assert {item.name for item in tmp_path.iterdir()} == {"in.ckpt", "deepspeed"}


@pytest.mark.short
@pytest.mark.once
def test_the_command(checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["universal", str(checkpoints(2) / "small.ckpt"), str(tmp_path / "out.ckpt"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Would write {tmp_path / 'out.ckpt'}: ZeRO stage 2, by deepspeed 0.17.6.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.once
def test_nothing_is_imported_from_the_current_directory(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    for name in ("torch", "tqdm", "deepspeed", "runpy", "importlib"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w'); raise SystemExit(3)")
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w'); raise SystemExit(3)")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep.join([os.environ.get('PYTHONPATH', ''), '', '.', str(here)])}")
    shutil.copytree(checkpoints(2) / "small.ckpt", here / "in.ckpt")
    universal("in.ckpt", "out.ckpt")
    assert (here / "out.ckpt" / "checkpoint" / "zero").is_dir()
    assert not (tmp_path / "canary").exists()


# What a file says, with nothing but names that may be in a checkpoint.
UNKNOWN: dict[str, Any] = {
    "a key of the number of ranks": lambda s: s.update(mp_world_size={Path("a"): 1}),
    "the number of ranks": lambda s: s.update(mp_world_size={1: 1}),
    "the release": lambda s: s.update(ds_version=["0.17.6"]),
}


@pytest.mark.once
@pytest.mark.parametrize("what", UNKNOWN)
def test_the_converter_receives_only_numbers_and_tensors(checkpoints: Checkpoints, tmp_path: Path, what: str) -> None:
    shutil.copytree(checkpoints(2) / "full.ckpt", tmp_path / "in.ckpt")
    for file in tmp_path.rglob("*model_states.pt"):
        changed(file, UNKNOWN[what])
    with pytest.raises(CheckpointError, match="DeepSpeed's converter would unpickle it") as refused:
        universal(tmp_path / "in.ckpt", tmp_path / "out.ckpt")
    assert refused.value.__suppress_context__
    assert [item.name for item in tmp_path.iterdir()] == ["in.ckpt"]


@pytest.mark.once
def test_the_converter_loads_weights_only(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program replaces the converter and loads something else."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "loads.py").write_text(
        "import collections, sys, torch\n"
        f"torch.save(collections.deque([1]), {str(tmp_path / 'a.pt')!r})\n"
        f"torch.load({str(tmp_path / 'a.pt')!r}, weights_only=False)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'code'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setattr(module, "CONVERTER", "loads")
    with pytest.raises(CheckpointError, match="failed; its last output was: "):
        universal(checkpoints(2) / "small.ckpt", tmp_path / "out.ckpt")
    assert (tmp_path / "a.pt").exists()
    (tmp_path / "code" / "loads.py").write_text("import sys; sys.exit('it was started')")
    with pytest.raises(CheckpointError, match="its last output was: it was started"):
        universal(checkpoints(2) / "small.ckpt", tmp_path / "out.ckpt")

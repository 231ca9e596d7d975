"""`ds-frozen-patch inspect` and `status`: their output for real checkpoints, and for paths that are none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import runs
from kit.cell import CELL
from kit.checkpoints import Checkpoints, changed, unmark

from ds_frozen_patch import CheckpointError
from ds_frozen_patch.cli import main
from ds_frozen_patch.tools.inspect import inspect

pytestmark = [pytest.mark.promise(14), pytest.mark.everyday, pytest.mark.once]
CHECKPOINTS = {(stage, 2) for stage in (0, 1, 2, 3)} | {(2, 1), (3, 1)}


Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(checkpoints: Checkpoints) -> Made:
    """`made(stage, world_size)`: a folder with `small.ckpt` and `full.ckpt`."""
    return partial(checkpoints, hidden=64, vocabulary=1024)


def elements(is_trained: bool) -> int:
    """Return how many elements are trained, or frozen."""
    module = runs.LoraRun(hidden=64, vocabulary=1024)
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad == is_trained)


@pytest.mark.parametrize(("stage", "world_size"), sorted(CHECKPOINTS))
def test_every_byte_has_a_kind(made: Made, stage: int, world_size: int) -> None:
    out = made(stage, world_size)
    small, full = inspect(out / "small.ckpt"), inspect(out / "full.ckpt")
    width = 2 if stage else 4  # bf16, but for stage 0
    trained, frozen = elements(True), elements(False)
    for found, whole in ((small, False), (full, True)):
        assert (found.zero_stage, found.world_size) == (stage, world_size)
        assert (found.epoch, found.global_step) == (1, runs.BATCHES)
        assert found.versions["deepspeed"] == CELL.deepspeed
        # Not of what is installed beside it and took no part.
        assert found.versions.keys() == {"lightning", "deepspeed", "ds_frozen_patch", "torch"}
        for name, kinds in found.files.items():
            assert sum(kinds.values()) == (Path(found.path) / "checkpoint" / name).stat().st_size
            assert kinds["file format"] > 0
        close = pytest.approx
        weights = {"trainable weights": width * trained, "frozen weights": width * frozen * whole}
        if stage == 3:  # ZeRO-3 has the trained ones in fp32 only
            weights["trainable weights"] = 0
        expected = {**weights, "fp32 master weights": 4 * trained * bool(stage), "optimizer state": 8 * trained}
        for kind, size in expected.items():
            assert found.kinds.get(kind, 0) == close(size, rel=0.02, abs=512), kind
        assert found.kinds["buffers"] == 8 * len(list((Path(found.path) / "checkpoint").glob("*model_states.pt")))
        assert found.record is not None
        assert found.record.is_trainable_only != whole
        assert found.kinds.get("client state", 0) < 200_000
    kept = [kind for kind in small.kinds if kind not in ("client state", "file format")]
    assert {kind: full.kinds[kind] for kind in kept} == {kind: small.kinds[kind] for kind in kept}
    assert full.prunable == pytest.approx(width * frozen, rel=0.02)
    assert small.prunable == 0
    assert small.record is not None
    assert small.record.total_bytes == width * frozen


def test_stage_0_without_what_we_add(made: Made, tmp_path: Path) -> None:
    """DeepSpeed's own checkpoint does not say which were trained."""
    out = made(0)
    full = shutil.copytree(out / "full.ckpt", tmp_path / "full.ckpt")
    changed(full / "checkpoint" / "mp_rank_00_model_states.pt", lambda state: state.pop("param_shapes"))
    total = 4 * (elements(True) + elements(False))
    assert inspect(full).kinds["weights, trainable or frozen"] == pytest.approx(total, rel=0.02, abs=512)


def test_a_second_copy_of_frozen_weights_is_reported(made: Made, tmp_path: Path) -> None:
    """On a GPU, ZeRO-2 saves frozen weights twice; on the CPU both share their memory, which is undone here."""
    out = made(2)
    shutil.copytree(out / "full.ckpt", tmp_path / "full.ckpt")
    file = tmp_path / "full.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["frozen_param_fragments"] = {name: t.clone() for name, t in state["frozen_param_fragments"].items()}
    torch.save(state, file)
    found = inspect(tmp_path / "full.ckpt")
    assert found.kinds["frozen weights"] == found.kinds["frozen weights, second copy"] == 2 * elements(False)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ds_frozen_patch", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.short
def test_the_command_line(made: Made) -> None:
    out = made(2)
    text = command("inspect", out / "full.ckpt")
    assert (text.returncode, text.stderr) == (0, "")
    assert f"ZeRO stage 2, ranks: 2, epoch 1, step {runs.BATCHES}" in text.stdout
    assert "fp32 master weights" in text.stdout
    assert "Without its frozen weights it would be" in text.stdout
    assert min(inspect(out / "full.ckpt").kinds.values()) > 0, "tied weights were counted twice"
    assert "Trainable-only: 20 frozen parameters" in command("inspect", out / "small.ckpt").stdout
    found = json.loads(command("inspect", out / "small.ckpt", "--tag", "checkpoint", "--json").stdout)
    assert found["kinds"] == inspect(out / "small.ckpt").kinds
    assert len(found["record"]["left_out"]) == 20


def test_inspect_needs_neither_torch_nor_lightning(made: Made) -> None:
    out = made(3)
    program = f"""
import sys
from ds_frozen_patch.tools.inspect import inspect
inspect({str(out / "full.ckpt")!r})
print([name for name in ("torch", "lightning", "deepspeed", "numpy") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_status_as_json() -> None:
    found = json.loads(command("status", "--json").stdout)
    assert found["frameworks"]["deepspeed"]["version"] == CELL.deepspeed
    assert found["frameworks"]["lightning.pytorch"]["state"] == "can be wrapped"
    assert (found["in_force"], found["problem"]) == (False, "")
    assert command("status").stdout.splitlines()[0] == "In force: no"


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Path:
    shutil.copytree(made(2) / "full.ckpt", tmp_path / "copy.ckpt")
    return tmp_path / "copy.ckpt"


def refusal(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error message of the command line for a checkpoint; the exit status must be 1."""
    assert main(["inspect", str(path), *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ds-frozen-patch: ")
    assert said.err.count("\n") == 1
    return said.err


def test_a_file_that_is_no_checkpoint(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copied / "checkpoint" / "mp_rank_00_model_states.pt"
    others: list[Any] = [[], {"state_dict": {}}, {"module": 1}]
    for state in others:
        torch.save(state, file)
        assert f"{file} is not a file of a DeepSpeed checkpoint: it has no 'module'" in refusal(copied, capsys)
    torch.save({"module": {}, "param_shapes": 5, "buffer_names": [{}, 7], "ds_config": "x", "ds_version": 1}, file)
    unmark(copied)
    assert inspect(copied).versions == {}


def test_paths_that_are_no_checkpoint(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"Pass the directory that contains it: {copied}" in refusal(copied / "checkpoint", capsys)
    assert "is a file. Pass the directory" in refusal(copied / "latest", capsys)
    assert "There is no directory" in refusal(tmp_path / "nowhere", capsys)
    assert "is a folder of checkpoints: 'copy.ckpt'. Pass the path of one" in refusal(tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    assert "has no file `latest`" in refusal(tmp_path / "empty", capsys)
    assert "has no subdirectory 'other'; it has 'checkpoint'" in refusal(copied, capsys, "--tag", "other")
    (shard,) = (copied / "checkpoint").glob("*zero_pp_rank_0_*optim_states.pt")
    shard.unlink()
    assert "lacks the optim states of rank 0" in refusal(copied, capsys)
    for file in (copied / "checkpoint").iterdir():
        file.unlink()
    assert "contains no *model_states.pt" in refusal(copied, capsys)


def test_a_missing_shard_of_another_rank(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made(3) / "small.ckpt", tmp_path / "copy.ckpt")
    (tmp_path / "copy.ckpt" / "checkpoint" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="model states of 1 ranks and optimizer states of 2"):
        inspect(tmp_path / "copy.ckpt")

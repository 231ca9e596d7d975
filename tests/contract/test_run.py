"""A program that knows nothing of us, under `ds-frozen-patch run` and each way to start ranks: saved, and resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk import model_states

import ds_frozen_patch

pytestmark = [pytest.mark.everyday, pytest.mark.once, pytest.mark.promise(1)]

PROGRAM = Path(__file__).parents[1] / "program.py"
STARTS = {
    "Lightning": [sys.executable, str(PROGRAM)],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(PROGRAM)],
    "deepspeed": ["deepspeed", "--num_accelerators=2", "--no_local_rank", str(PROGRAM)],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.mark.parametrize(("epochs", "start"), enumerate(STARTS, 1))
def test_a_program_saves_and_resumes(
    out: Path, epochs: int, start: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each start goes on from the checkpoint of the one before."""
    for said in out.glob("worker-*"):
        said.unlink()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    resume = [f"--ckpt-path={out}/{epochs - 1}.ckpt"] if epochs > 1 else []
    options = ["--cpu", "--strict", "--verify-base=error"]
    command = [shutil.which("ds-frozen-patch"), "run", *options, "--", *STARTS[start], str(out), f"--epochs={epochs}"]
    done = subprocess.run([*map(str, command), *resume], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = out / f"{epochs}.ckpt"
    assert ds_frozen_patch.inspect(saved).global_step == 2 * epochs
    for rank in model_states(saved):
        assert not any("body" in name for name in rank.get("frozen_param_shapes") or {})
        assert [names for names, *_ in rank["ds_frozen_patch"]["left_out"]] == [["body.weight"], ["body.bias"]]
    assert {said.read_text() for said in out.glob("worker-*")} == {"BoundFunctionWrapper"}

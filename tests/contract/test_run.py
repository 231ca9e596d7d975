"""Programs that do not import us, under `run` with each launcher, on CPU ranks: they save and resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from kit.checkpoints import model_states, record_in
from kit.programs import shell

import ds_frozen_patch

pytestmark = [pytest.mark.everyday, pytest.mark.once, pytest.mark.promise(1)]

ROOT = Path(__file__).parents[2]
STARTS = re.findall(r"^\$ (ds-frozen-patch run -- .+)", (ROOT / "docs" / "guides" / "run.md").read_text(), re.MULTILINE)
"""The ways to start a program under `run`, as the page has them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    shutil.copy(ROOT / "tests" / "programs" / "fine_tune.py", made / "train.py")
    return made


@pytest.mark.in_order
@pytest.mark.parametrize(("epochs", "start"), list(enumerate(STARTS, 1)))
def test_a_program_saves_and_resumes(folder: Path, epochs: int, start: str) -> None:
    """Each start resumes from the checkpoint of the previous one."""
    for said in folder.glob("worker-*"):
        said.unlink()
    done = shell(start, folder, DS_FROZEN_PATCH_CPU="1", DS_FROZEN_PATCH_STRICT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = folder / f"{epochs}.ckpt"
    assert ds_frozen_patch.inspect(saved).global_step == 2 * epochs
    states = model_states(saved)
    for rank in states:
        assert not any("body" in name for name in rank.get("frozen_param_shapes") or {})
    assert [entry.names for entry in record_in(saved).left_out] == [("body.weight",), ("body.bias",)]
    assert {said.read_text() for said in folder.glob("worker-*")} == {"True"}


ACCELERATED = """
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

torch.manual_seed(1)
plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": 1})
accelerator = Accelerator(deepspeed_plugin=plugin)
model = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1))
engine, adam = accelerator.prepare(model, torch.optim.AdamW(model[1].parameters()))
accelerator.backward(engine(torch.ones(1, 4, device=accelerator.device)).mean())
adam.step()
accelerator.save_state("state")
accelerator.end_training()
"""


DEEPSPEED_ALONE = """
import os, deepspeed, torch
torch.manual_seed(1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
model = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
engine = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model[1].parameters()))[0]
path, _ = engine.load_checkpoint("state")
engine.backward(engine(torch.ones(1, 4)).mean())
engine.step()
engine.save_checkpoint("state")
said = "resumed" if path else "began"
os.write(1, f"{said} {engine.global_steps}\\n".encode())  # at once, so that ranks do not mix their words
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads can abort a program that ends
"""


@pytest.mark.promise(12)
def test_a_program_of_deepspeed_alone(tmp_path: Path) -> None:
    """It calls nothing of ours, and no framework."""
    (tmp_path / "train.py").write_text(DEEPSPEED_ALONE)
    for said in ("began 1", "resumed 2"):
        done = shell("ds-frozen-patch run --cpu --strict -- torchrun --nproc-per-node 2 train.py", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(said) == 2
        found = ds_frozen_patch.inspect(tmp_path / "state")
        assert found.record is not None
        assert found.record.names == {"0.weight", "0.bias"}


def test_a_program_of_accelerate_has_cpu_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCELERATED)
    done = shell("ds-frozen-patch run --cpu --strict -- torchrun --nproc-per-node 2 train.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = ds_frozen_patch.inspect(tmp_path / "state")
    assert found.world_size == 2
    assert found.record is not None
    assert found.record.names == {"0.weight", "0.bias"}

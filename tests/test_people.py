"""The ways of four people: a researcher, an engineer without torch, a user of Trainer, one who deploys `run`.

The researcher's is from a clone of the repository to an installed wheel, a run, a merged model and `generate`. The
notebook is run cell by cell, with the wheel in place of the sources. Jupyter is not needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import packaging
import pytest
import torch
import wrapt
from kit.checkpoints import Checkpoints
from kit.programs import shell

import ds_frozen_patch

pytestmark = [pytest.mark.everyday, pytest.mark.once]

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
WRITES = "%%writefile "


def cells() -> list[str]:
    book = json.loads((TUTORIAL / "lora.ipynb").read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def test_its_programs_are_those_of_the_tutorial() -> None:
    written = [cell.removeprefix(WRITES).split("\n", 1) for cell in cells() if cell.startswith(WRITES)]
    page = (TUTORIAL / "lora.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert [name for name, _ in written] == ["make_base.py", "train.py"]
    assert [text.strip() for _, text in written] == [blocks[name].strip() for name, _ in written]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel installs that was built in a clone."""
    folder = tmp_path_factory.mktemp("cloned")
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", folder / "clone"], check=True)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "clone", check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def test_from_a_clone_to_generate(installed: Path, tmp_path: Path) -> None:
    printed = []
    python = []
    for cell in [*cells(), "print(ds_frozen_patch.__file__)"]:
        if cell.startswith(WRITES):
            name, text = cell.removeprefix(WRITES).split("\n", 1)
            (tmp_path / name).write_text(text)
            continue
        if not cell.startswith("!"):  # all cells so far, as in one kernel
            python.append(cell)
            (tmp_path / "kernel.py").write_text("\n".join(python))
        line = cell[1:] if cell.startswith("!") else "python kernel.py"
        done = shell(line, tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
        if line == "python kernel.py":
            python = [earlier for earlier in python if "merge(" not in earlier]  # which writes a folder once
    assert "Trainable-only: 38 frozen parameters, 18.7 MB were left out." in printed[2]
    assert re.search(r"^step 4: loss", printed[3], re.MULTILINE)
    assert "The adapter 'default' is folded into 8 of them." in printed[4]
    assert "generated 5 tokens" in printed[5]
    assert printed[6].split()[-1] == str(installed / "ds_frozen_patch" / "__init__.py")


def test_an_engineer_without_torch(installed: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """On a server that has Python alone: what `pip install .` brings, and no more."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for package in (installed / "ds_frozen_patch", Path(wrapt.__file__).parent, Path(packaging.__file__).parent):
        (site / package.name).symlink_to(package)
    (tmp_path / "full.ckpt").symlink_to(checkpoints(2) / "full.ckpt")

    def run(line: str, status: int = 0) -> str:
        command = [str(tmp_path / "venv" / "bin" / "python"), "-m", "ds_frozen_patch", *line.split()]
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "Without its frozen weights it would be" in run("inspect full.ckpt")
    assert run("prune full.ckpt small.ckpt", 1).endswith("This command needs torch: pip install torch\n")
    assert not (tmp_path / "small.ckpt").exists()
    assert "It has no fingerprints" in run("prune full.ckpt small.ckpt --no-fingerprints")
    assert "no problems" in run("verify small.ckpt")
    assert run("consolidate full.ckpt whole.safetensors").startswith("Wrote whole.safetensors: ")
    assert run("status", 1).endswith("DeepSpeed is not installed. Install it: pip install 'deepspeed>=0.10.1'.\n")


BASE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(1)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("base")
"""
TRAIN = """
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
torch.manual_seed(1)
lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), lora)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (16, 8))]
config = {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto"}
arguments = TrainingArguments("out", max_steps=int(sys.argv[1]), save_steps=2, per_device_train_batch_size=1,
    deepspeed=config, report_to="none", disable_tqdm=True)
Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=len(sys.argv) > 2)
"""


def test_a_user_of_trainer(tmp_path: Path) -> None:
    """A script of Trainer and PEFT that does not name us: it trains, resumes, and its model serves."""
    for name, program in (("make_base", BASE), ("train", TRAIN)):
        (tmp_path / f"{name}.py").write_text(program)
    run = "ds-frozen-patch run --cpu --strict -- torchrun --nproc-per-node 2 train.py"
    for line in (
        "python make_base.py",
        f"{run} 2",
        f"{run} 4 resume",
        "ds-frozen-patch verify out/checkpoint-4 --base base",
        "ds-frozen-patch merge out/checkpoint-4 merged --base base",
    ):
        done = shell(line, tmp_path, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["global_step"] == 4
    for step in (2, 4):
        found = ds_frozen_patch.inspect(tmp_path / f"out/checkpoint-{step}")
        assert found.prunable == 0
        assert found.record is not None
        assert len(found.record.left_out) == 12
    ask = "from transformers import AutoModelForCausalLM as auto; auto.from_pretrained('merged').generate()"
    done = shell(f'python -c "{ask}"', tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


DDP = """
import torch, lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 1)
    def training_step(self, batch, index): return self.head(self.body(batch)).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.head.parameters(), lr=0.1)
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_epochs=1, logger=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 4)))
trainer.save_checkpoint("ddp.ckpt")
"""
INFERENCE = """
import deepspeed, torch
engine = deepspeed.init_inference(torch.nn.Sequential(torch.nn.Linear(4, 4)), dtype=torch.float)
assert engine(torch.ones(1, 4)).shape == (1, 4)
"""


def test_who_deploys_run_for_a_team(tmp_path: Path) -> None:
    """Variables in everybody's shell say nothing to programs that save no checkpoint of DeepSpeed's."""
    for name, program in (("ddp", DDP), ("inference", INFERENCE)):
        (tmp_path / f"{name}.py").write_text(program)
    deployed = 'set -e; eval "$(ds-frozen-patch run --env --strict)"'
    done = shell(f"{deployed}; ds-frozen-patch status", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "In force: yes")
    done = shell(f"{deployed}; python -c 'print(1)'", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    for name in ("ddp", "inference"):
        done = shell(f"{deployed}; python {name}.py", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "ds_frozen_patch" not in done.stdout + done.stderr
    assert "body.weight" in torch.load(tmp_path / "ddp.ckpt", weights_only=False)["state_dict"]

"""Every block of code in the README and the guides runs, and prints what it says there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import readme
import runs
from made_up import FLAG, Site
from under_test import PRECISION, TRAINER, pl

import ds_frozen_patch

pytestmark = [pytest.mark.everyday, pytest.mark.once]

ELSEWHERE = {
    "pip install nox && nox -f ci/noxfile.py -s demo": "test_demo.py",
    "nox -f ci/noxfile.py": "../.ci/run",
    "pip install .": "../ci/release.py",
    "ds-frozen-patch universal last.ckpt last.universal": "tools/test_universal.py",
    "python patches apply ~/src/pytorch-lightning": "patches/test_series.py",
    **dict.fromkeys(
        (
            one.line
            for block in readme.blocks("console")
            if "run -- torchrun" in block
            for one in readme.commands(block)
        ),
        "contract/test_run.py",
    ),
}
"""What a reader types that is run by another test, or by a session."""

MAKE_BASE = """
from ds_frozen_patch.demo.train import LoraFineTune
LoraFineTune().model.unload().save_pretrained("Llama-3.1-8B")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo: tuple[Path, Any]) -> Path:
    """A reader's folder: what the demo has saved, and its base, by the names that the pages use."""
    made = tmp_path_factory.mktemp("reader")
    full = demo[0] / "zero2" / "full.ckpt"
    for place in ("last.ckpt", "runs/last.ckpt", "lightning_logs/version_0/checkpoints/last.ckpt"):
        shutil.copytree(full, made / place)
    shutil.copytree(full.with_name("trainable-only.ckpt"), made / "tuned.ckpt")
    subprocess.run([sys.executable, "-c", MAKE_BASE], cwd=made, check=True, timeout=120, capture_output=True)
    return made


def test_what_runs_elsewhere_is_there() -> None:
    for line, place in ELSEWHERE.items():
        assert f"\n$ {line}\n" in readme.TEXT
        assert (Path(__file__).parent / place).is_file()
    assert (readme.ROOT / ".ci" / "run").read_text().splitlines()[-1] == "nox -f ci/noxfile.py"


def test_what_a_reader_types(folder: Path) -> None:
    """In the order of the pages, each in the folder that the ones before have left."""
    typed = [one for block in readme.blocks("console") for one in readme.commands(block)]
    for one in typed:
        if one.line in ELSEWHERE:
            continue
        done = readme.shell(one.line, folder)
        assert done.returncode == 0, f"$ {one.line}\n{done.stdout}{done.stderr}"
        printed = [readme.masked(line) for line in done.stdout.splitlines()]
        expected = [readme.masked(line) for line in one.prints]
        if "..." in expected:
            assert printed[: expected.index("...")] == expected[: expected.index("...")], one.line
            assert printed[-1] == expected[-1], one.line
        elif expected:
            assert printed == expected, one.line


def test_what_the_demo_prints(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    (block,) = (block for block in readme.blocks("") if "bit for bit" in block)
    printed = [readme.masked(line) for line in demo[1].stdout.splitlines()]
    lines = [readme.masked(line) for line in block.splitlines() if line != "..."]
    assert [line for line in printed if line in lines] == lines


def test_what_status_prints(tmp_path: Path) -> None:
    (block,) = (block for block in readme.blocks("") if block.startswith("target "))
    site = Site(tmp_path)
    site.lightning()
    site.lightning("pytorch_lightning", "2.6.6", flag=FLAG)
    site.deepspeed()
    imported = "import lightning.pytorch.strategies.deepspeed, lightning.fabric.strategies.deepspeed"
    program = f"dfp.patch(); {imported}, deepspeed.runtime.engine; print(dfp.status())"
    assert site.run(program) == block


def train_and_save(out: str, world_size: int) -> None:
    """What `last.ckpt` is in the blocks: an epoch's end of a run under `patch(export="peft")`."""
    ds_frozen_patch.patch(export="peft")
    trainer = runs.trainer(out, world_size, epochs=1, enable_checkpointing=False)
    trainer.fit(runs.LoraRun(), runs.batches(world_size))
    trainer.save_checkpoint(f"{out}/last.ckpt")


def run_block(block: str, out: str) -> dict[str, Any]:
    """Run a block of Python in the midst of a program as it takes for granted; gives what it has left."""
    import peft

    os.chdir(out)
    quiet: dict[str, Any] = {
        "precision": PRECISION,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    model = runs.LoraRun()
    model.train_dataloader = partial(runs.batches, 2)  # type: ignore[method-assign]
    names: dict[str, Any] = {
        "ds_frozen_patch": ds_frozen_patch,
        "Trainer": partial(pl.Trainer, max_epochs=2, **quiet),
        "trainer": runs.trainer(out, 2, enable_checkpointing=False),
        "model": model,
        "PeftModel": peft.PeftModel,
        "base_model": runs.LoraRun().model.unload(),
    }
    if "full_checkpoint" in block:
        ds_frozen_patch.patch()
        names["trainer"].fit(model)
    elif "fit(" in block and "patch(" not in block:
        ds_frozen_patch.patch()
    exec(block, names)
    status = ds_frozen_patch.status()[TRAINER]
    trainer = names["trainer"]
    return {
        "wrapped": status.wrapped,
        "step": trainer.global_step,
        "strategy": type(trainer.strategy).__name__,
        "full": Path("everything.ckpt").is_dir() and ds_frozen_patch.inspect("everything.ckpt").prunable > 0,
    }


PYTHON: dict[str, dict[str, Any]] = {
    "import ds_frozen_patch\n": {"wrapped": True},
    "trainer.fit(model, ckpt_path=": {"wrapped": True, "step": 8},
    "with ds_frozen_patch.full_checkpoint()": {"full": True},
    "ds_frozen_patch.patch(elastic=True)": {"step": 6},
    "PeftModel.from_pretrained": {},
    "from ds_frozen_patch.testing": {"strategy": "DeepSpeedStrategy"},
}
"""What holds after the block that begins so."""


@pytest.mark.parametrize("block", readme.blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python(ranks: Any, tmp_path: Path, block: str) -> None:
    (expected,) = (found for begin, found in PYTHON.items() if block.startswith(begin))
    saved_by = 1 if "elastic" in block else 2
    if "last.ckpt" in block:
        ranks(saved_by, train_and_save, out=str(tmp_path), world_size=saved_by)
    for found in ranks(2, run_block, block=block, out=str(tmp_path)):
        assert {name: found[name] for name in expected} == expected


def test_what_can_go_wrong_is_what_we_say() -> None:
    """Each message in the table of the page on troubleshooting is in the sources."""
    said = [text for file in (readme.ROOT / "src").rglob("*.py") for text in texts(file)]
    page = (readme.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`(.+?)`", cell)]
    assert len(messages) > 10
    for message in messages:
        if message == "Missing key(s) in state_dict":
            continue  # torch's
        pattern = ".+?".join(map(re.escape, re.split(r"\.\.\.|\d+(?:\.\d+)*", message)))
        assert any(re.search(pattern, text) for text in said), message


def texts(file: Path) -> list[str]:
    """The strings of a module, f-strings with a mark where something is put in."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found

"""Every block of code in the README and in `docs/` runs, and prints what it says there.

Sybil finds the blocks and runs each as a test, by evaluators of ours: a block of Python runs in the midst of a program
on two ranks, and a command in a shell, in a folder that the blocks of one page share. A comment before a block,
`<!-- skip: next "FILE" -->`, names the file that runs it instead.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from doctest import ELLIPSIS, OutputChecker
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit import runs
from kit.cell import PRECISION, TRAINER, pl
from kit.programs import FLAG, Site, shell
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import ds_frozen_patch

pytestmark = [pytest.mark.everyday, pytest.mark.once]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PYTHON: dict[str, dict[str, Any]] = {
    "import ds_frozen_patch\n": {"wrapped": True},
    "trainer.fit(model, ckpt_path=": {"wrapped": True, "step": 2 * runs.BATCHES},
    "trainer.test(model, ckpt_path=": {"wrapped": True, "loss": True},
    "with ds_frozen_patch.full_checkpoint()": {"full": True},
    "ds_frozen_patch.patch()\ntrainer": {"step": 3 * runs.BATCHES // 2},
    "ds_frozen_patch.patch(leave_out=": {"wrapped": True},
    "PeftModel.from_pretrained": {},
    "from ds_frozen_patch.testing": {"strategy": "DeepSpeedStrategy"},
    "import logging\n": {},
}
"""What holds after the block of Python that begins so."""

MAKE_BASE = """
from demo.train import LoraFineTune
LoraFineTune().model.unload().save_pretrained("Llama-3.1-8B")
"""


def masked(text: str) -> str:
    """Text without its numbers and their padding, which differ between runs."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d.]*( [kMG]?B\b)?", "#", text))


def console(example: Example) -> str | None:
    """Run the commands of a block, each of which prints what stands below it; `...` stands for any lines."""
    for command in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
        line, _, below = command.partition("\n")
        expected = re.sub(r"^\.\.\.\n", "...", below, flags=re.MULTILINE)  # no line is enough
        done = shell(line, example.namespace["folder"])
        printed = OutputChecker().check_output(masked(expected), masked(done.stdout), ELLIPSIS)
        if done.returncode or (expected and not printed):
            return f"$ {line}\nexit status {done.returncode}\n{done.stdout}{done.stderr}"
    return None


def python(example: Example) -> None:
    """Write the file that the first line names, or run the block on two ranks."""
    block, folder = str(example.parsed), example.namespace["folder"]
    if named := re.match(r"# (\w+\.py)\n", block):
        (folder / named[1]).write_text(block, encoding="utf-8")
        return
    (expected,) = (found for begin, found in PYTHON.items() if block.startswith(begin))
    ranks, out = example.namespace["ranks"], example.namespace["empty"]
    saved_by = 1 if "accumulate_grad_batches" in block else 2
    if "last.ckpt" in block:
        ranks(saved_by, train_and_save, out=str(out), world_size=saved_by)
    sets_levels = "logging" in block  # of loggers, which later tests in the same processes would keep
    for found in ranks(2, run_block, block=block, out=str(out), alone=sets_levels):
        assert {name: found[name] for name in expected} == expected


def train_and_save(out: str, world_size: int) -> None:
    """What `last.ckpt` is in the blocks of Python: an epoch's end of a run under `patch(export="peft")`."""
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
    model.train_dataloader = model.test_dataloader = partial(runs.batches, 2)  # type: ignore[method-assign]
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
    elif "ckpt_path=" in block and "patch(" not in block:
        ds_frozen_patch.patch()
    exec(block, names)
    status = ds_frozen_patch.status()[TRAINER]
    trainer = names["trainer"]
    return {
        "wrapped": status.state == "wrapped",
        "step": trainer.global_step,
        "loss": "test_loss" in trainer.callback_metrics,
        "strategy": type(trainer.strategy).__name__,
        "full": Path("full.ckpt").is_dir() and ds_frozen_patch.inspect("full.ckpt").prunable > 0,
    }


SKIP = SkipParser()
RUN = Sybil([CodeBlockParser("console", console), CodeBlockParser("python", python), SKIP])
EXAMPLES = [example for page in PAGES for example in RUN.parse(page)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo: tuple[Path, Any]) -> Path:
    """What a reader has: the demo's checkpoints, and their base, by the names that the pages use."""
    folder = tmp_path_factory.mktemp("made")
    full = demo[0] / "zero2" / "full.ckpt"
    for place in ("last.ckpt", "runs/last.ckpt", "lightning_logs/version_0/checkpoints/last.ckpt"):
        shutil.copytree(full, folder / place)
    shutil.copytree(full.with_name("trainable-only.ckpt"), folder / "tuned.ckpt")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "ci")}
    subprocess.run(
        [sys.executable, "-c", MAKE_BASE], cwd=folder, env=variables, check=True, timeout=120, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The reader's folder of each page, empty where no command of the page names a checkpoint of the demo."""
    home = tmp_path_factory.mktemp("reader")

    def folder(page: str) -> Path:
        of_page = home / Path(page).stem
        if of_page.exists():
            return of_page
        if re.search(r"^\$ .*(\b(last|tuned)\.ckpt|runs/)", Path(page).read_text(encoding="utf-8"), re.MULTILINE):
            made: Path = request.getfixturevalue("made")
            shutil.copytree(made, of_page, copy_function=os.link)  # no tool writes to what it reads
        else:
            of_page.mkdir()
        return of_page

    return folder


@pytest.mark.in_order
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{Path(one.path).name}:{one.line}")
def test_block(example: Example, folders: Callable[[str], Path], ranks: Any, tmp_path: Path) -> None:
    example.namespace.update(folder=folders(example.path), ranks=ranks, empty=tmp_path)
    example.evaluate()


def test_what_is_run_elsewhere_is_there() -> None:
    skips = [example for example in EXAMPLES if example.region.evaluator not in (console, python)]
    assert skips
    for _, reason in (example.parsed for example in skips):
        assert (ROOT / ast.literal_eval(reason)).is_file()


def test_no_block_is_of_a_kind_that_nothing_runs() -> None:
    kinds = {
        region.lexemes["language"]
        for page in PAGES
        for region in FencedCodeBlockLexer(".*")(RUN.parse(page))
        if not region.lexemes["language"].startswith("{")  # MyST's own, which show no code
    }
    assert kinds == {"console", "python", "text"}
    assert len(texts_of_pages()) == 2  # which the next tests are of


def texts_of_pages() -> list[str]:
    """What programs print, where no command stands above it."""
    found = Sybil([CodeBlockParser("text", print)])
    return [example.parsed for page in PAGES for example in found.parse(page)]


def test_what_the_demo_prints(demo: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    (block,) = (block for block in texts_of_pages() if "bit for bit" in block)
    printed = [masked(line) for line in demo[1].stdout.splitlines()]
    lines = [masked(line) for line in block.splitlines() if line != "..."]
    assert [line for line in printed if line in lines] == lines


def test_what_status_prints(tmp_path: Path) -> None:
    (block,) = (block for block in texts_of_pages() if block.startswith("In force"))
    site = Site(tmp_path)
    site.lightning()
    site.lightning("pytorch_lightning", "2.6.6", flag=FLAG)
    site.deepspeed()
    imported = "import lightning.pytorch.strategies.deepspeed, lightning.fabric.strategies.deepspeed"
    program = f"dfp.patch(); {imported}, deepspeed.runtime.engine; print(dfp.status())"
    assert site.run(program) == block


def test_what_can_go_wrong_is_what_we_say() -> None:
    """Each message that is a heading of the page on troubleshooting is in the sources, and so is its whole text."""
    said = [text for file in (ROOT / "src").rglob("*.py") for text in strings(file)]
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (`.+`)$", page, re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`(.+?)`", heading)]
    quotes = re.findall(r"^> [^\n]*(?:\n> [^\n]*)*", page.partition("## What status() prints")[0], re.MULTILINE)
    assert len(messages) > 35
    assert len(quotes) > 25
    messages += [quote[2:].replace("\n> ", " ") for quote in quotes]
    for message in messages:
        if message == "Missing key(s) in state_dict":
            continue  # torch's
        pattern = ".+?".join(map(re.escape, re.split(r"\.\.\.|\d+(?:\.\d+)*", message)))
        assert any(re.search(pattern, text) for text in said), message


def strings(file: Path) -> list[str]:
    """The strings of a module, f-strings with a mark where something is put in."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found

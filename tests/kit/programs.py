"""Programs in processes of their own: those of the pages, in a shell; those written elsewhere; and programs in
a folder of made-up releases of Lightning and DeepSpeed, which import at once and can differ as no real release does.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import packaging
import wrapt

import ds_frozen_patch

STRATEGY = """
class Base:
    def inherited(self): ...
    def remove_checkpoint(self, filepath): ...
    def teardown(self): ...

class DeepSpeedStrategy(Base):
    load_full_weights = zero_stage_3 = True
    def __init__(self, stage=2{flag}):
        self.stage = stage
        self.model = None
    def setup(self, trainer): ...
    def setup_module(self, module): ...
    def setup_module_and_optimizers(self, module, optimizers): ...
    def {save}(self, checkpoint, filepath): return "saved"
    def load_checkpoint(self, path): return "loaded"
"""
ENGINE = """
class DeepSpeedEngine:
    def __init__(self, args=None, model=None, optimizer=None): self.module, self.optimizer = model, optimizer
    def save_checkpoint(self, save_dir, tag=None, client_state={{}}{flag}): ...
    def load_checkpoint(self, load_dir): ...
    def module_state_dict(self{flag}): ...
    def load_module_state_dict(self, checkpoint, strict=True): ...
"""
ACCELERATOR = """
class Accelerator:
    def _prepare_deepspeed(self, *args): self._models.append(args)
    def load_state(self, input_dir=None): ...

    def save_state(self, output_dir=None):
        save_accelerator_state(output_dir)
        save_custom_state(output_dir)
"""
TRAINER = """
class Trainer:
    def train(self, resume_from_checkpoint=None): ...
    def _get_output_dir(self, trial=None): ...
    def _save(self, output_dir=None): ...
    def _save_rng_state(self, output_dir): ...
    def _save_checkpoint(self, model, trial):
        folder = os.path.join(self._get_output_dir(trial), PREFIX_CHECKPOINT_DIR)
        self.state.save_to_json(folder){end}
"""
FLAG = ", exclude_frozen_parameters=False"


class Site:
    """A folder of made-up packages; a program run in it can import no others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "wrapt").symlink_to(Path(wrapt.__file__).parent)
        (root / "ds_frozen_patch").symlink_to(Path(ds_frozen_patch.__file__).parent)
        (root / "packaging").symlink_to(Path(packaging.__file__).parent)

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def release(self, distribution: str, version: str) -> None:
        name = distribution.replace("-", "_")
        self.write(f"{name}-{version}.dist-info/METADATA", f"Name: {distribution}\nVersion: {version}\n")

    def lightning(
        self, package: str = "lightning", version: str = "2.5.2", flag: str = "", loads: str = '"loaded"', **change: str
    ) -> None:
        self.release(package.replace("_", "-"), version)
        parts = {"lightning": ("lightning/pytorch", "lightning/fabric")}.get(package, (package,))
        for part in parts:
            for folder in itertools.accumulate(f"{part}/strategies".split("/"), "{}/{}".format):
                self.write(f"{folder}/__init__.py")
            source = STRATEGY.format(**{"flag": flag, "save": "save_checkpoint"} | change)
            self.write(f"{part}/strategies/deepspeed.py", source.replace('"loaded"', loads))

    def deepspeed(self, version: str = "0.17.6", flag: str = FLAG) -> None:
        self.release("deepspeed", version)
        self.write("deepspeed/__init__.py")
        self.write("deepspeed/runtime/__init__.py")
        self.write("deepspeed/runtime/engine.py", ENGINE.format(flag=flag))

    def accelerate(self, end: str = "") -> None:
        self.release("accelerate", "1.10.0")
        self.write("accelerate/__init__.py")
        self.write("accelerate/accelerator.py", ACCELERATOR + end)

    def transformers(self, version: str, end: str = "") -> None:
        self.release("transformers", version)
        self.write("transformers/__init__.py")
        self.write("transformers/trainer.py", TRAINER.format(end=end))

    def run(self, program: str) -> str:
        path = f"import sys; sys.path.insert(0, {str(self.root)!r}); import ds_frozen_patch as dfp\n"
        command = [sys.executable, "-S", "-E", "-c", path + program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.root, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line with the programs of this Python's environment, in a terminal of 100 columns."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    torchrun = programs / "torchrun"  # the cells' torch is of a base environment, whose programs are not in theirs
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "HOME": str(folder), "COLUMNS": "100", **environment}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=400, check=False
    )


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
PLAIN = Path(__file__).parents[1] / "programs" / "plain"
"""On PYTHONPATH, a program under `run` is not patched."""


def start(
    command: Sequence[str],
    folder: Path,
    *options: str,
    path: Path | None = None,
    ranks: Sequence[dict[str, str]] = ({},),
    **environment: str,
) -> None:
    """Run a program in a folder under `ds-frozen-patch run --cpu`, and wait for it.

    Args:
        command: the program and its arguments.
        options: more options of `run`.
        path: what is added to PYTHONPATH.
        ranks: the environment of each process to start; else one starts the others.
        environment: the environment of all of them.
    """
    # Some launchers set the number of threads, DeepSpeed's does not; the last bits of a loss depend on it.
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(path or ""))))
    run = [sys.executable, "-m", "ds_frozen_patch", "run", "--cpu", "--strict", "--verify-base=error", *options]
    with (folder / "output.txt").open("w+") as output:
        launch = partial(subprocess.Popen, [*run, "--", *command], cwd=folder, stdout=output, stderr=output)
        started = [launch(env=variables | rank) for rank in ranks]
        try:
            statuses = [process.wait(timeout=400) for process in started]
        finally:
            for process in started:
                process.kill()
            output.seek(0)
            print(output.read())
    assert not any(statuses), statuses


def save_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Save a tokenizer of these words, the first two of which are padding and what it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, unknown = words[:2]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown)  # type: ignore[no-untyped-call]
    saved.save_pretrained(folder)

"""Programs of Lightning written by others, unchanged, under `ds-frozen-patch run`: they save, and resume strictly.

`nox -s programs` clones them, as listed in `ci/matrix/programs.py`. What they would download is created here, small and
where they look for it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kit.checkpoints import model_states, record_in, size
from kit.programs import PLAIN, WORDS, save_tokenizer, start
from safetensors.torch import load_file

import ds_frozen_patch

pytestmark = [pytest.mark.programs]

HERE = Path(__file__).parent
SIZES: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}


@dataclass
class Program:
    """How a user works with one.

    `prepare(folder)` creates what it would find or download. `command(clones, folder, epochs, checkpoint)` trains for
    that many epochs, from a checkpoint or from the start; `ranks` are the environments of the processes that start it.
    `trained` is part of the names of the parameters that it trains; `checkpoints` is where it saves.
    """

    prepare: Callable[[Path], None]
    command: Callable[[Path, Path, int, Path | None], list[str]]
    trained: str
    checkpoints: str
    ranks: tuple[dict[str, str], ...] = ({},)
    environment: Callable[[Path, Path], dict[str, str]] = lambda clones, folder: {}


def prepare_lightning_ir(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    BertTokenizer(vocab_file=str(vocabulary)).save_pretrained(folder / "base")
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SIZES)
    BertModel(config).save_pretrained(folder / "base")
    choose = random.Random(0).choices
    ranked = [(query, rank) for query in range(8) for rank in (1, 2)]
    texts = {name: " ".join(choose(WORDS[5:], k=6)) for name in (*range(8), *ranked)}
    lines = [
        {"query_id": f"q{query}", "query": texts[query], "doc_id": f"d{query}.{rank}", "text": texts[query, rank]}
        | {"rank": rank, "score": 3.0 - rank}
        for query, rank in ranked
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.copytree(HERE / "lightning-ir", folder, dirs_exist_ok=True)


def lightning_ir(clones: Path, folder: Path, epochs: int, checkpoint: Path | None) -> list[str]:
    resume = [f"--ckpt_path={checkpoint}"] if checkpoint else []
    command = str(Path(sys.executable).with_name("lightning-ir"))
    return [command, "fit", "--config=config.yaml", f"--trainer.max_steps={2 * epochs}", *resume]


def prepare_openthaigpt(folder: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    save_tokenizer(folder / "base")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(folder / "base")
    choose = random.Random(0).choices
    for split in ("train", "validation"):
        rows = [choose(range(len(WORDS)), k=16) for _ in range(8)]
        Dataset.from_dict({"input_ids": rows}).save_to_disk(folder / split)
    shutil.copytree(HERE / "openthaigpt", folder / "configurations", dirs_exist_ok=True)


def openthaigpt(clones: Path, folder: Path, epochs: int, checkpoint: Path | None) -> list[str]:
    """Its own resume_from_checkpoint reads a single file only; but Slurm jobs resume from such a place."""
    if checkpoint:
        shutil.copytree(checkpoint, folder / "hpc_ckpt_1.ckpt")
    script = clones / "openthaigpt" / "src" / "model" / "scripts" / "pytorch_lighting_training" / "pretraining.py"
    return [sys.executable, str(script), f"--config-path={folder}/configurations", f"trainer.max_steps={2 * epochs}"]


def openthaigpt_environment(clones: Path, folder: Path) -> dict[str, str]:
    job = {"SLURM_JOB_NAME": "pretraining", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}
    job |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    here = {"SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 30000))}
    return job | here | {"PYTHONPATH": f"{clones}/openthaigpt/src/model:{clones}/llama"}


def prepare_torchgeo(folder: Path) -> None:
    from PIL import Image

    for split in ("train", "val", "test"):
        names = [f"{kind}-{split}-{index}.tif" for kind in ("beach", "forest") for index in range(4)]
        for seed, name in enumerate(names):
            place = folder / "data" / "UCMerced_LandUse" / "Images" / name.partition("-")[0] / name
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((32, 32), 50 + seed).convert("RGB").save(place)
        (folder / "data" / f"uc_merced-{split}.txt").write_text("\n".join(names))
    shutil.copytree(HERE / "torchgeo", folder, dirs_exist_ok=True)


def torchgeo(clones: Path, folder: Path, epochs: int, checkpoint: Path | None) -> list[str]:
    resume = [f"--ckpt_path={checkpoint}"] if checkpoint else []
    command = str(Path(sys.executable).with_name("torchgeo"))
    return [command, "fit", "--config=config.yaml", f"--trainer.max_epochs={epochs}", *resume]


PROGRAMS = {
    "lightning-ir": Program(prepare_lightning_ir, lightning_ir, trained=".lora_", checkpoints="checkpoints/*.ckpt"),
    "openthaigpt": Program(
        prepare_openthaigpt,
        openthaigpt,
        trained=".lora_",
        checkpoints="saved/epoch/*.ckpt",
        ranks=({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}),
        environment=openthaigpt_environment,
    ),
    "torchgeo": Program(
        prepare_torchgeo,
        torchgeo,
        trained="model.fc.",
        checkpoints="lightning_logs/*/checkpoints/*.ckpt",
        environment=lambda clones, folder: {"LOCAL_SIZE": "2"},  # DeepSpeed 0.15 asks for it
    ),
}


@dataclass
class Place:
    """A folder that a program was prepared in, and is started in."""

    program: Program
    clones: Path
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.program.prepare(self.folder)

    def train(self, epochs: int, checkpoint: Path | None = None, path: Path | None = None) -> Path:
        """Train for this many epochs; return the checkpoint that the program has saved."""
        before = self._checkpoints()
        command = self.program.command(self.clones, self.folder, epochs, checkpoint)
        environment = self.program.environment(self.clones, self.folder)
        start(command, self.folder, path=path, ranks=self.program.ranks, **environment)
        (new,) = self._checkpoints() - before
        return new

    def _checkpoints(self) -> set[Path]:
        return set(self.folder.glob(self.program.checkpoints))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_saves_and_resumes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program, clones = PROGRAMS[name], request.config.getoption("--programs")
    place = Place(program, clones, tmp_path / "patched")
    first = shutil.copytree(place.train(epochs=1), tmp_path / "first.ckpt")  # which the next may remove
    second = place.train(epochs=2, checkpoint=first)
    full = Place(program, clones, tmp_path / "plain").train(epochs=1, path=PLAIN)
    print(name, {path: size(path) for path in (full, first, second)})

    assert [ds_frozen_patch.inspect(path).global_step for path in (full, first, second)] == [2, 2, 4]
    everything = {key for rank in model_states(full) for key in rank["module"]}
    trained = {key for key in everything if program.trained in key}
    for path in (first, second):
        states = model_states(path)
        left_out = record_in(path).names
        for rank in states:
            assert left_out == everything - rank["module"].keys()
            assert set(rank["param_shapes"][0]) == trained
            assert not rank["frozen_param_shapes"]
        ds_frozen_patch.export(path, path.with_suffix(".safetensors"))
    before, after = (load_file(path.with_suffix(".safetensors")) for path in (first, second))
    assert trained <= before.keys() == after.keys()
    assert not all(before[key].equal(after[key]) for key in trained)
    assert size(first) < size(full) / 10

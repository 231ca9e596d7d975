"""Trainers that are built on Hugging Face's, and OpenRLHF, under `ds-frozen-patch run`: what they save, and resume.

They are as installed. Beside the checkpoints' states, what they write themselves, and what they derive from the path of
a checkpoint, must be where it is without us.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.programs import PLAIN, WORDS, save_tokenizer, start
from programs.test_hugging_face import ALIKE, RANKS, STEPS, TORCHRUN, losses, text
from safetensors.torch import load_file

import ds_frozen_patch
from ds_frozen_patch.common.files import RECORD

pytestmark = [pytest.mark.programs]

HERE = Path(__file__).parent
ROWS = 2 * RANKS * STEPS
LORA = "--lora_rank 4"
TRL = (
    "--model_name_or_path base --dataset_name data --bf16 False --dtype float32 --max_length 32 --use_peft --lora_r 4"
    " --lora_target_modules all-linear"
)
LLAMAFACTORY = (
    "--stage sft --do_train --model_name_or_path base --dataset text --dataset_dir data --template default"
    f" --finetuning_type lora {LORA} --lora_target all --cutoff_len 64 --deepspeed ds_config.json"
)
SWIFT = (
    "--model base --model_type llama --template dummy --dataset data/train.jsonl --split_dataset_ratio 0"
    f" --tuner_type lora {LORA} --target_modules all-linear --torch_dtype float32 --fp16 False --bf16 False"
    " --attn_impl eager --max_length 64 --gradient_accumulation_steps 1 --dataset_num_proc 1 --data_seed 0"
    " --dataloader_num_workers 0 --deepspeed zero2 --add_version False"
)
OPENRLHF = (
    "--model.model_name_or_path base --ds.attn_implementation eager --ds.lora.rank 4 --data.dataset data"
    " --data.input_key prompt --data.output_key completion --data.max_len 32 --train.micro_batch_size 2"
    f" --train.batch_size {2 * RANKS} --adam.lr 1e-2 --lr_scheduler constant --ckpt.output_dir out"
    " --ckpt.path out/saved --ckpt.save_steps 2 --ckpt.max_num 2 --logger.tensorboard_dir logs"
)


def save_base(folder: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens: Any = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = LlamaConfig(vocab_size=len(WORDS), tie_word_embeddings=True, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    save_tokenizer(folder / "base", ["<pad>", *WORDS[1:]])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.eos_token = WORDS[3]
    tokenizer.save_pretrained(folder / "base")


def save_data(folder: Path, row: Callable[[], dict[str, Any]]) -> None:
    random.seed(0)
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(row())}\n" for _ in range(ROWS)))


def to_complete() -> dict[str, Any]:
    return {"prompt": f"{text(6)} ", "completion": text(6)}


def to_prefer() -> dict[str, Any]:
    return {"prompt": f"{text(6)} ", "chosen": text(6), "rejected": text(6)}


def to_follow() -> dict[str, Any]:
    return {"instruction": text(6), "input": "", "output": text(6)}


def to_chat() -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text(6)} for role in ("user", "assistant")]}


def describe_data(folder: Path) -> None:
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"text": {"file_name": "train.jsonl"}}))
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False} | dict.fromkeys(
        automatic, "auto"
    )
    (folder / "ds_config.json").write_text(json.dumps(config))


@dataclass
class Program:
    """How a program is started, and what it trains on.

    `command` is a module and its arguments. What stands in for modules that need a GPU is in `stubs`.
    """

    command: str
    arguments: str
    row: Callable[[], dict[str, Any]]
    prepare: Callable[[Path], None] = lambda folder: None
    environment: dict[str, str] = field(default_factory=dict)
    stubs: str = ""


def of_trl(kind: str, row: Callable[[], dict[str, Any]]) -> Program:
    launcher = f"--accelerate_config zero2 --num_processes {RANKS} --mixed_precision no --main_process_port {{port}}"
    return Program(f"trl.cli.main {kind} {launcher}", TRL, row)


PROGRAMS = {
    "trl": {"sft": of_trl("sft", to_complete), "dpo": of_trl("dpo", to_prefer)},
    "llamafactory": {
        "sft": Program(
            f"{TORCHRUN} -m llamafactory.launcher", LLAMAFACTORY, to_follow, describe_data, stubs="llamafactory"
        )
    },
    "ms-swift": {
        "sft": Program(
            "swift.cli.main sft",
            SWIFT,
            to_chat,
            environment={"NPROC_PER_NODE": str(RANKS), "MASTER_PORT": "{port}", "USE_HF": "1"},
        )
    },
}
RLHF = Program(
    f"deepspeed.launcher.runner --num_accelerators {RANKS} --master_port {{port}} --module",
    OPENRLHF,
    to_complete,
    stubs="openrlhf",
)
ROTATED = [
    ("global_step1", {"global_step1"}),
    ("best_global_step1", {"global_step1", "best_global_step1"}),
    ("global_step2", {"global_step1", "global_step2", "best_global_step1"}),
    ("global_step3", {"global_step2", "global_step3", "best_global_step1"}),
    ("best_global_step3", {"global_step2", "global_step3", "best_global_step3"}),
    ("global_step3", {"global_step2", "global_step3", "best_global_step3"}),
    ("global_step4", {"global_step2", "global_step4", "best_global_step3"}),
    ("global_step5", {"global_step2", "global_step5", "best_global_step3"}),
    ("global_step6", {"global_step2", "global_step5", "global_step6", "best_global_step3"}),
    ("global_step7", {"global_step2", "global_step5", "global_step7", "best_global_step3"}),
]
"""Each save of `openrlhf/rotate.py`, and what is there after it."""


@dataclass
class Place:
    """A folder that a program was prepared in, and is started in, with us or plain."""

    program: Program
    folder: Path
    is_plain: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        save_base(self.folder)
        save_data(self.folder, self.program.row)
        self.program.prepare(self.folder)

    def train(self, epochs: int, *more: str) -> Path:
        """Train up to this many epochs; return the checkpoint of the last one."""
        command = [*self.program.command.split(), *f"{self.program.arguments} {ALIKE}".split()]
        self.start(*command, f"--num_train_epochs={epochs}", *more)
        return self.folder / "out" / f"checkpoint-{epochs * STEPS}"

    def start(self, *command: str, **environment: str) -> None:
        """Start a module with arguments."""
        port = str(random.SystemRandom().randint(20000, 30000))
        variables: dict[str, Any] = {name: value.format(port=port) for name, value in self.program.environment.items()}
        paths = [PLAIN] if self.is_plain else []
        paths += [HERE / self.program.stubs] if self.program.stubs else []
        path = Path(os.pathsep.join(map(str, paths))) if paths else None
        filled = [part.format(port=port) for part in command]
        start([sys.executable, "-m", *filled], self.folder, path=path, **(variables | environment))


def names(folder: Path) -> set[str]:
    """Return what is in a folder, but for our records, which plain checkpoints do not have."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != RECORD}


def check_states(checkpoint: Path, tag: str = "") -> None:
    """Check that a checkpoint has a record, and none of what it lists."""
    record = ds_frozen_patch.inspect(checkpoint, tag or None).record
    assert record
    assert record.names
    assert not any(".lora_" in name for name in record.names)
    (file,) = (checkpoint / tag).rglob("mp_rank_00_model_states.pt")
    state = torch.load(file, weights_only=False)
    assert state["module"]
    assert not record.names & state["module"].keys()


def check_equal(ours: Path, theirs: Path) -> None:
    """Check that two files have the same tensors."""
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys()
    assert all(one[key].equal(other[key]) for key in other)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_resumes(name: str, tmp_path: Path) -> None:
    for kind, program in PROGRAMS[name].items():
        patched = Place(program, tmp_path / kind / "patched")
        first = patched.train(1)
        saved_at = first.stat().st_mtime_ns
        second = patched.train(2, f"--resume_from_checkpoint={first}")
        plain = Place(program, tmp_path / kind / "plain", is_plain=True)
        full = plain.train(2)
        print(name, kind, losses(full), losses(second))

        assert first.stat().st_mtime_ns == saved_at  # it was not trained anew
        assert losses(second) == losses(full)
        assert names(second.parent) == names(full.parent)
        assert not list(patched.folder.rglob(".ds_frozen_patch*"))
        check_equal(*(path / "adapter_model.safetensors" for path in (second, full)))
        record = ds_frozen_patch.inspect(full).record
        assert record is None or not record.is_trainable_only
        check_states(first)
        check_states(second)
        if name == "ms-swift":
            check_export(patched, plain)


def check_export(*places: Place) -> None:
    """Let ms-swift merge the last checkpoint of each place, for which it reads the `args.json` in it."""
    for place in places:
        adapter = f"--adapters=out/checkpoint-{2 * STEPS}"
        place.start("swift.cli.main", "export", adapter, "--merge_lora", "True", "--output_dir", "merged")
    check_equal(*(place.folder / "merged" / "model.safetensors" for place in places))


def logged(folder: Path, *runs: str) -> list[float]:
    """Return the losses of runs that are parts of one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for run in runs:
        events = EventAccumulator(str(folder / "logs" / run))
        events.Reload()
        found += [(event.step, event.value) for event in events.Scalars("train/loss_mean")]
    assert [step for step, _ in found] == list(range(1, 2 * STEPS + 1))
    return [loss for _, loss in found]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["openrlhf"])
def test_openrlhf_resumes(name: str, tmp_path: Path) -> None:
    def train(place: Place, epochs: int, run: str, *more: str) -> set[str]:
        command = [*place.program.command.split(), "on_cpu", *place.program.arguments.split()]
        place.start(*command, f"--train.max_epochs={epochs}", f"--logger.wandb.run_name={run}", *more)
        return {path.name for path in (place.folder / "out" / "saved").iterdir() if path.is_dir()}

    patched = Place(RLHF, tmp_path / "patched")
    assert train(patched, 1, "first") == {"global_step2", "global_step4"}
    for tag in ("global_step2", "global_step4"):
        check_states(patched.folder / "out" / "saved", tag)
    assert train(patched, 2, "second", "--ckpt.load_enable") == {"global_step6", "global_step8"}
    plain = Place(RLHF, tmp_path / "plain", is_plain=True)
    assert train(plain, 2, "full") == {"global_step6", "global_step8"}
    assert logged(patched.folder, "first", "second") == logged(plain.folder, "full")
    saved, full = (place.folder / "out" for place in (patched, plain))
    assert names(saved) == names(full)
    check_equal(*(path / "adapter_model.safetensors" for path in (saved, full)))
    record = ds_frozen_patch.inspect(full / "saved").record
    assert record is None or not record.is_trainable_only
    assert not list(patched.folder.rglob(".ds_frozen_patch*"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["openrlhf"])
def test_openrlhf_removes_what_it_should(name: str, tmp_path: Path) -> None:
    expected = [(tag, {*tags, "latest", "zero_to_fp32.py"}) for tag, tags in ROTATED]
    patched, plain = Place(RLHF, tmp_path / "patched"), Place(RLHF, tmp_path / "plain", is_plain=True)
    for place in (patched, plain):
        place.start(*RLHF.command.split(), "rotate")
        found = json.loads((place.folder / "rotated.json").read_text())
        assert [(tag, set(there)) for tag, there in found["after"]] == expected
        assert found["moved"]
        assert found["same"]
        assert found["state"] == ROTATED[-1][0]
    assert names(patched.folder / "rotated") == names(plain.folder / "rotated")
    assert not list(patched.folder.rglob(".ds_frozen_patch*"))
    for tag in ROTATED[-1][1]:
        check_states(patched.folder / "rotated", tag)

"""Scripts of Hugging Face's Trainer, unchanged, under `ds-frozen-patch run`: they resume as if never interrupted.

transformers' `run_clm.py` has no option that freezes parameters; but its model can be an adapter of PEFT's, which
transformers freezes together with its base, except biases, if the adapter's configuration says so. To Trainer that is a
model that is frozen by hand; the frozen adapter is saved too. PEFT's `examples/sft/train.py` trains with LoRA, by TRL's
trainer, with the configuration of `accelerate launch` beside it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoints import size
from kit.programs import PLAIN, WORDS, save_tokenizer, start
from safetensors.torch import load_file

import ds_frozen_patch

pytestmark = [pytest.mark.programs]

RANKS = 2
STEPS = 4
"""Of an epoch."""
ALIKE = (
    "--seed 0 --learning_rate 1e-2 --lr_scheduler_type constant --per_device_train_batch_size 2 --save_strategy epoch"
    " --logging_steps 1 --report_to none --disable_tqdm True --output_dir out"
)
CLM = (
    "--model_name_or_path adapter --config_name base --train_file train.txt --do_train --block_size 16"
    " --cache_dir cache --deepspeed ds_config.json"
)
# As in PEFT's run_peft_deepspeed.sh, without what needs a GPU or the network; the paths are short.
SFT = (
    "--model_name_or_path base --dataset_name data --chat_template_format chatml --add_special_tokens False"
    " --append_concat_token False --splits train,test --max_length 64 --log_level info --logging_strategy steps"
    " --eval_strategy epoch --bf16 False --packing False --weight_decay 1e-4 --warmup_steps 0 --max_grad_norm 1.0"
    " --per_device_eval_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing True"
    " --use_reentrant False --dataset_text_field content --use_flash_attn False --use_peft_lora True --lora_r 8"
    " --lora_alpha 16 --lora_dropout 0.1 --lora_target_modules all-linear --use_4bit_quantization False"
)
TORCHRUN = f"torch.distributed.run --nproc-per-node {RANKS} --master-port {{port}}"
ACCELERATE = f"accelerate.commands.launch --num_processes {RANKS} --main_process_port {{port}}"
DEEPSPEED = f"deepspeed.launcher.runner --num_accelerators {RANKS} --master_port {{port}}"


def text(length: int) -> str:
    return " ".join(random.choices(WORDS[5:], k=length))


def prepare_clm(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    (folder / "train.txt").write_text("".join(f"{text(16)}\n" for _ in range(2 * RANKS * STEPS + 1)))  # 5 % are tests
    config: Any = {"zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False}
    automatic = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    (folder / "ds_config.json").write_text(json.dumps(config | automatic))
    sizes: Any = {"n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **sizes)).save_pretrained(folder / "base")
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, bias="all", task_type="CAUSAL_LM")
    get_peft_model(GPT2LMHeadModel.from_pretrained(folder / "base"), lora).save_pretrained(f"{folder}/adapter")
    save_tokenizer(folder / "adapter")


def prepare_sft(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), tie_word_embeddings=True, **sizes)).save_pretrained(
        folder / "base"
    )
    save_tokenizer(folder / "base", ["<pad>", *WORDS[1:]])
    (folder / "data").mkdir()
    for split in ("train", "test"):
        chats = [
            [{"role": role, "content": text(6)} for role in ("user", "assistant")] for _ in range(4 * RANKS * STEPS)
        ]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))


@dataclass
class Program:
    """What there is to say of one: its script in the clones, its arguments, and how it is started.

    `launchers` are for the run from the start, the one that resumes, and the one of both epochs at once. `{clones}` is
    the folder of the clones. `trained` tells the names of the parameters that it trains.
    """

    prepare: Callable[[Path], None]
    script: str
    arguments: str
    launchers: tuple[str, str, str]
    final: str
    trained: Callable[[str], bool]


BY_PEFT = (
    f"{ACCELERATE} --config_file {{clones}}/peft/examples/sft/configs/deepspeed_config.yaml --mixed_precision no"
    " --gradient_accumulation_steps 2"
)
PROGRAMS = {
    "run-clm": Program(
        prepare_clm,
        "transformers/examples/pytorch/language-modeling/run_clm.py",
        CLM,
        (TORCHRUN, f"{ACCELERATE} --multi_gpu", DEEPSPEED),
        "adapter_model.safetensors",
        lambda name: name.endswith(".bias") and "base_layer" not in name,
    ),
    "peft-sft": Program(
        prepare_sft,
        "peft/examples/sft/train.py",
        SFT,
        (BY_PEFT, BY_PEFT, BY_PEFT),
        "adapter_model.safetensors",
        lambda name: ".lora_" in name,
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
        random.seed(0)
        torch.manual_seed(0)
        self.program.prepare(self.folder)

    def train(self, launcher: str, epochs: int, *more: str, path: Path | None = None) -> Path:
        """Train up to this many epochs; return the checkpoint of the last one."""
        module = launcher.format(clones=self.clones, port=random.SystemRandom().randint(20000, 30000)).split()
        arguments = [*f"{self.program.arguments} {ALIKE}".split(), f"--num_train_epochs={epochs}", *more]
        script = str(self.clones / self.program.script)
        start([sys.executable, "-m", *module, script, *arguments], self.folder, path=path)
        return self.folder / "out" / f"checkpoint-{epochs * STEPS}"


def losses(checkpoint: Path) -> list[float]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry.get("loss", entry.get("eval_loss")) for entry in history]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_of_trainer_resumes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program, clones = PROGRAMS[name], request.config.getoption("--programs")
    place = Place(program, clones, tmp_path / "patched")
    to_start, to_resume, to_compare = program.launchers
    first = place.train(to_start, 1)
    saved_at = first.stat().st_mtime_ns
    second = place.train(to_resume, 2, f"--resume_from_checkpoint={first}")
    full = Place(program, clones, tmp_path / "plain").train(to_compare, 2, path=PLAIN)
    print(name, {path: size(next(path.glob("global_step*"))) for path in (full, first, second)})

    assert first.stat().st_mtime_ns == saved_at  # it was not trained anew
    assert losses(second) == losses(full)
    ours, theirs = (load_file(path / program.final) for path in (second, full))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)

    whole = ds_frozen_patch.inspect(full).record
    assert whole is None or not whole.is_trainable_only
    for path, steps in ((first, STEPS), (second, 2 * STEPS)):
        assert ds_frozen_patch.inspect(path).global_step == steps
        record = ds_frozen_patch.inspect(path).record
        left_out = record.names if record else frozenset()
        assert left_out
        assert not any(map(program.trained, left_out))
        for file in path.rglob("*model_states.pt"):
            state = torch.load(file, weights_only=False)
            assert all(map(program.trained, state["param_shapes"][0]))
            assert not left_out & state["module"].keys()
            frozen = state["frozen_param_shapes"] or {}  # of a frozen adapter alone, which is in no base
            assert not [name for name in frozen if program.trained(name) or ".lora_" not in name]

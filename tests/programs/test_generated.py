"""Promises 15, 22, 24 and 29: programs that are drawn at random do under `patch()` what they do without it.

A program trains, saves after each second step, and is interrupted after the fifth; another process resumes it from one
of its checkpoints. Both run plain, and then under `patch()` in the same folder: they must see and leave the same, but
for the base in the checkpoints. A program that fails is shrunk; then it belongs in `FAILED`.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any
from zlib import crc32

import deepspeed
import numpy
import peft
import pytest
import torch
import training
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration
from kit import runs
from kit.cell import Callback, DeepSpeedStrategy, Fabric, FabricDeepSpeed, ModelCheckpoint, pl
from kit.processes import RankError
from torch.nn import Linear, Module, Parameter
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import ds_frozen_patch
from ds_frozen_patch.common.files import RECORD
from ds_frozen_patch.testing import adapt_deepspeed

pytestmark = [pytest.mark.promise(29), pytest.mark.everyday]

PROGRAMS = int(os.environ.get("PROGRAMS", "24"))
STEPS, ROWS = (5, 6), 2  # of the two processes; of each rank in a step
TOKENS: Any = torch.randint(runs.VOCABULARY, (2 * ROWS * STEPS[1], 8), generator=torch.Generator().manual_seed(0))

ON: Any = {"target_modules": ["q_proj", "v_proj"]}
LORA = {"r": 2, **ON}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("Lora", {"init_lora_weights": name, **LORA})
        for name in ("pissa", "pissa_niter_2", "olora", "orthogonal")
    },
    **{name: (name, ON) for name in ("Beft", "Frod", "OSF")},
    **{name: (name, LORA) for name in ("Vera", "LoHa", "LoKr", "HRA", "Miss", "RandLora", "Shira", "Delora", "Deft")},
    **{name: (name, LORA) for name in ("Glora", "Hira", "Lily", "Peanut", "Psoft", "Pvera", "Supertuning", "TinyLora")},
    **dict.fromkeys(("lora", "lora-fa"), ("Lora", LORA)),
    "lora, biases": ("Lora", {"bias": "all", **LORA}),
    "lora, a layer saved": ("Lora", {"modules_to_save": ["lm_head"], **LORA}),
    "lora, tokens": ("Lora", {"trainable_token_indices": [1, 2], **LORA}),
    "lora, embedding": ("Lora", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "lora, parameter": ("Lora", {"r": 2, "target_parameters": ["mlp.gate_proj.weight"]}),
    "dora": ("Lora", {"use_dora": True, **LORA}),
    "ia3": ("IA3", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "adalora": ("AdaLora", {"init_r": 2, "target_r": 1, "total_step": 10, **ON}),
    "boft": ("BOFT", {"boft_block_size": 4, **ON}),
    "oft": ("OFT", {"oft_block_size": 4, "r": 0, **ON}),
    **{name: (name, {"n_frequency": 8, **ON}) for name in ("FourierFT", "WaveFT")},
    "vblora": ("VBLoRA", {"num_vectors": 8, "vector_length": 8, "topk": 2, **LORA}),
    "UniLora": ("UniLora", LORA),
    "ln": ("LNTuning", {"target_modules": ["input_layernorm"]}),
    "c3a": ("C3A", {"block_size": 8, **ON}),
    "road": ("Road", {"group_size": 8, **ON}),
    "gralora": ("Gralora", {"gralora_k": 2, **LORA}),
    "tokens": ("TrainableTokens", {"token_indices": [1, 2]}),
    **{name: (name, {"num_virtual_tokens": 3}) for name in ("PromptTuning", "PrefixTuning", "Cartridge")},
    "p-tuning": ("PromptEncoder", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "adaption": ("AdaptionPrompt", {"adapter_len": 3, "adapter_layers": 1}),
}
"""What PEFT 0.21 trains on a CPU without more packages or data: the class of its configuration, and the options."""
BY_HAND = {"bitfit": "bias", "last layer": "mlp.up_proj", "head": "lm_head.1", "lora by hand": "lora_B"}
BY_HAND |= {"teacher": "layers.0", "lora-fa": "lora_B", "all is trained": ""}
"""Where the program itself freezes what is not called so."""
MERGED = ("lora", "lora, biases", "dora", "ia3", "LoKr")
CHANGED = "down_proj.weight"
"""What of the base a program changes, or thaws."""
ONCE = ("only the model", "weights")
"""The ways to save from which nothing resumes."""


class Color(Enum):
    RED = 1


@dataclass
class Config:
    rate: float
    names: list[str]


VALUES: dict[str, Callable[[Life], Any]] = {
    "alias": lambda life: {"table": next((p.detach() for p in life.module.parameters() if not p.requires_grad), None)},
    "dataclass": lambda life: Config(0.5, ["a"]),
    "enum": lambda life: {Color.RED: [Color.RED]},
    "nested": lambda life: {"a": {"b": [1, (2, None)], 3: b"c"}},
    "numpy": lambda life: (numpy.float32(1.5), numpy.arange(3)),
    "path": lambda life: Path("data/train.txt"),
    "set": lambda life: {("x", 1), "y"},
    "tensor": lambda life: {"mean": torch.arange(4.0), "half": torch.ones(2, dtype=torch.bfloat16)[1:]},
}
"""State of a program's own."""


@dataclass(frozen=True)
class Program:
    """What is drawn of one; each default is the simplest."""

    owner: str = "engine"
    stage: int = 2
    ranks: int = 1
    kind: str = "lora"
    has_seed: bool = True
    is_bf16: bool = False
    is_tied: bool = False
    is_wrapped: bool = False
    optimizer: str = "trainable"
    freezes: str = ""
    merges: str = ""
    path: str = "absolute"
    name: str = ""
    way: str = "call"
    full: int = 0
    state: tuple[str, ...] = ()
    hook: str = ""
    looks: str = ""
    moves: bool = False
    resumes: int = 1
    is_async: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Program:
        draw = random.Random(seed)

        def sometimes(*values: Any, share: float = 0.35, other: Any = "") -> Any:
            return draw.choice(values) if draw.random() < share else other

        owner, stage = draw.choice(tuple(OWNERS)), draw.randrange(4)
        kind = draw.choice(tuple(ADAPTERS)) if draw.random() < 0.75 else draw.choice(tuple(BY_HAND))
        kind = "lora" if (kind, stage) == ("adalora", 3) else kind  # which cannot train there
        merges = sometimes("each step", "around saves", share=0.7) if kind in MERGED and stage < 3 else ""
        full = sometimes(2, 4, share=0.2, other=0)
        if owner == "transformers" and merges == "around saves":
            full = 0  # Trainer's own is never full; a full one has the merged base, to which a resume adds the adapters
        return cls(
            *(owner, stage, sometimes(2, share=0.2, other=1), kind),
            has_seed=draw.random() < 0.6 or kind == "head",  # on one rank, nothing shows that the head is random
            is_bf16=owner not in ("accelerate", "transformers") and stage > 0 and not merges and draw.random() < 0.3,
            is_tied=draw.random() < 0.5,
            is_wrapped=kind == "teacher" or draw.random() < 0.3,
            optimizer=sometimes("groups", "all" if stage < 3 else "groups", other="trainable"),
            freezes=sometimes("at start", "late", "thaws", "thaws and freezes", "changes the base"),
            merges=merges,
            path=draw.choice(("absolute", "Path", "relative", "dots", "spaces", "link", "deep", "changed cwd")),
            name="" if full else sometimes("one", "default", "int"),
            way=draw.choice(OWNERS[owner].ways[: 2 if full else None]),
            full=full,
            state=tuple(draw.sample(sorted(VALUES), 3)) if draw.random() < 0.6 else (),
            hook=sometimes("adds", "pops the optimizer", "pops the scheduler", "renames", "own state_dict"),
            looks=sometimes("lists", "copies", "marks", share=0.5),
            moves=draw.random() < 0.2,
            resumes=draw.choice((0, 1)),
            is_async=draw.random() < 0.25,
        )

    def __str__(self) -> str:
        odd = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Program({', '.join(odd)})"

    def is_free(self, name: str) -> bool:
        """Whether a checkpoint may have this frozen parameter or not: the program may have changed it, or not."""
        is_changed = self.freezes in ("thaws and freezes", "changes the base") and name.endswith(CHANGED)
        is_changed |= self.merges == "around saves" and "base_layer" in name
        return is_changed or "teacher" in name or self.kind == "pissa_niter_2"


# The model


class Net(Module):
    """A model in a module with buffers, an alias, a teacher that follows it, or a `state_dict` of its own."""

    steps: Any

    def __init__(self, inner: Any, teacher: Any, is_selective: bool) -> None:
        super().__init__()
        self.inner, self.teacher, self.is_selective = inner, teacher, is_selective
        self.alias = self.table = Parameter(torch.arange(9.0), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        given = self.inner(input_ids=input_ids, labels=labels)
        if self.training:
            self.steps += 1
        if self.teacher is not None:
            given.loss = given.loss + (given.logits.mean() - self.teacher(input_ids=input_ids).logits.mean()).square()
        return given

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """All, or what is trained."""
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        for name, parameter in self.named_parameters() if self.is_selective else ():
            state.pop(f"{prefix}{name}" if not parameter.requires_grad else "", None)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load it, and keep what it lacks."""
        return super().load_state_dict(state_dict, strict and not self.is_selective, assign)


class LoraByHand(Linear):
    def __init__(self, layer: Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = Parameter(torch.randn(2, layer.in_features), requires_grad=False)
        self.lora_B = Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x: Any) -> Any:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


# The program


class Life:
    """A process of a program, on each rank: what it does whoever owns its engine."""

    ways: tuple[str, ...] = ("call",)
    module: Any
    top: Any

    def __init__(self, program: Program, number: int, last: int) -> None:
        self.program, self.number, self.folder, self.last = program, number, Path.cwd(), last
        self.losses, self.listed, self.saved, self.returned = list[float](), list[Any](), list[str](), list[Any]()
        self.module = self.top = self._build()
        self.module.register_forward_hook(self._note_loss)
        self.trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        self.frozen = {parameter for parameter in self.module.parameters() if not parameter.requires_grad}
        self.values = {name: VALUES[name](self) for name in program.state}
        root: Any = {"Path": self.folder / "out", "relative": "out", "changed cwd": "out", "link": self.folder / "link"}
        root |= {"spaces": f"{self.folder}/my runs, \u00e9", "deep": self.folder / "out" / "a" / "b"}
        self.root: Any = {"dots": f"{self.folder}/out/../out/.", **root}.get(program.path, f"{self.folder}/out")

    def _build(self) -> Any:
        program, kind = self.program, self.program.kind
        seed = crc32(str(program).encode())  # no program's base may be what an earlier one of this process has trained
        base = runs.small_llama(seed, num_hidden_layers=1, tie_word_embeddings=program.is_tied, attention_bias=True)
        self.of_base = set(base.parameters())
        # As if the program had a seed, or drew another one in each process and on each rank.
        torch.manual_seed(7 if program.has_seed else (1 << 40) + 10 * self.number + int(os.environ["RANK"]))
        model: Any = base
        if kind in ADAPTERS:
            config, options = ADAPTERS[kind]
            model = peft.get_peft_model(base, getattr(peft, f"{config}Config")(task_type="CAUSAL_LM", **options))
        elif kind == "head":
            base.lm_head = torch.nn.Sequential(Linear(32, 32), Linear(32, runs.VOCABULARY))
            self.of_base.update(base.lm_head[0].parameters())
        elif kind == "lora by hand":
            base.model.layers[0].self_attn.q_proj = LoraByHand(base.model.layers[0].self_attn.q_proj)
        if program.is_wrapped:
            model = Net(model, deepcopy(base) if kind == "teacher" else None, program.hook == "own state_dict")
            self.of_base.add(model.table)
        if program.freezes != "at start":
            self._freeze(model)
        return model

    def _freeze(self, model: Any) -> None:
        part = BY_HAND.get(self.program.kind)
        for name, parameter in model.named_parameters() if part is not None else ():
            parameter.requires_grad_(part in name and "teacher" not in name and parameter.requires_grad)

    def _note_loss(self, module: Any, _: Any, given: Any) -> None:
        if module.training:
            self.losses.append(given.loss.item())

    def optimizer(self) -> Any:
        parameters = [p for p in self.module.parameters() if p.requires_grad or self.program.optimizer == "all"]
        groups: Any = [{"params": parameters[:1], "lr": 2e-2}, {"params": parameters[1:]}]
        adam = torch.optim.AdamW(groups if self.program.optimizer == "groups" and parameters[1:] else parameters, 1e-2)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))

    def config(self, **more: Any) -> dict[str, Any]:
        of_3 = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        made = runs.config(self.program.stage, **(of_3 if self.program.stage == 3 else {}))
        return {"zero_optimization": {"stage": 0}, **made, **more}

    def batches(self, first: int) -> Iterator[tuple[int, Any]]:
        """The number of each step, counted from 1, and what this rank trains on."""
        rank, world_size = int(os.environ["RANK"]), self.program.ranks
        for step in range(first + 1, self.last + 1):
            yield step, TOKENS.split(ROWS * world_size)[step - 1][rank::world_size]

    def arrange(self, step: int) -> None:
        """Freeze, thaw and change what is due after so many steps; when training begins, too."""
        freezes = self.program.freezes
        if freezes == "at start":
            self._freeze(self.module)
        for name, parameter in self.module.named_parameters():
            if freezes == "late" and step >= 2 and name in self.trained[1:2]:
                parameter.requires_grad_(False)
            if name.endswith(CHANGED) and freezes.startswith("thaws"):
                parameter.requires_grad_(step >= 1 and (freezes == "thaws" or step < 3))
            if name.endswith(CHANGED) and freezes == "changes the base" and step == 3:
                parameter.data.mul_(1.01)

    def after(self, step: int) -> None:
        """What follows each step."""
        self.arrange(step)
        for name, parameter in self.module.named_parameters():
            if "teacher" in name:
                parameter.data.lerp_(self.module.get_parameter(name.replace("teacher", "inner")).data, 0.1)
        if self.program.merges == "each step":
            self._tuner().merge_adapter()
            self._tuner().unmerge_adapter()
        if step % 2 == 0:
            self.save(step)

    def _tuner(self) -> Any:
        return next(module for module in self.module.modules() if hasattr(module, "merge_adapter"))

    def save(self, step: int) -> None:
        """Save, where no framework does by itself."""
        name: Any = {"one": "ckpt", "default": None, "int": step}.get(self.program.name, f"ckpt{step}")
        with self.saving(Path(self.root, str(name or f"global_step{step}")), step) as place:
            self.write(place, name, step)
        if self.program.path == "changed cwd":
            os.chdir(self.folder / "elsewhere")

    def write(self, place: Any, name: Any, step: int) -> None:
        """Save to a place; `name` is its last part, as the program gives it."""

    @property
    def intervenes(self) -> bool:
        """Whether the program overrides a framework's own saves."""
        return bool(self.program.looks or self.program.merges or self.program.full)

    @contextmanager
    def saving(self, place: Any, step: int) -> Iterator[Any]:
        """What the program does around a save."""
        if merges := self.program.merges == "around saves":
            self._tuner().merge_adapter()
        self.saved.append(os.path.abspath(place))  # noqa: PTH100  -- links stay
        with ds_frozen_patch.full_checkpoint() if step == self.program.full else nullcontext():
            yield place if isinstance(self.root, Path) else str(place)
        if merges:
            self._tuner().unmerge_adapter()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0 and Path(self.saved[-1]).is_dir() and self.program.way != "weights":
            self._look(Path(self.saved[-1]), step)
        torch.distributed.barrier()

    def _look(self, place: Path, step: int) -> None:
        if self.program.looks == "lists":
            self.listed.append(sorted(item.name for item in place.parent.rglob("*") if item.name != RECORD))
        elif self.program.looks == "copies":
            shutil.copytree(place, self.folder / "copies" / str(step), dirs_exist_ok=True)
        elif self.program.looks == "marks":
            (place / "complete").write_text("mine")

    def state_dict(self) -> dict[str, Any]:
        """As a callback, or what Accelerate saves too."""
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note what `state_dict` has returned once."""
        self.returned.append(told(state))

    def base(self) -> list[str]:
        """The names, in what the engine has, of what was frozen from the beginning to the end."""
        named = self.top.named_parameters(remove_duplicate=False)
        return sorted(name for name, p in named if p in self.frozen & self.of_base and not p.requires_grad)


class ByEngine(Life):
    ways = ("call", "no latest", "call", "native")

    def run(self, resume: str | None) -> None:
        adapt_deepspeed()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        bf16 = {"bf16": {"enabled": True}} if self.program.is_bf16 else {}
        config = self.config(train_micro_batch_size_per_gpu=ROWS, **bf16)
        adam, scheduler = self.optimizer()
        self.engine = deepspeed.initialize(model=self.module, optimizer=adam, lr_scheduler=scheduler, config=config)[0]
        if resume:
            folder, tag = os.path.split(resume)
            self.returned.append(told(self.engine.load_checkpoint(folder, tag=tag)[1], odd=ODD[1:3]))
        self.arrange(self.engine.global_steps)
        for step, tokens in self.batches(self.engine.global_steps):
            self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
            self.engine.step()
            self.after(step)

    def write(self, place: Any, name: Any, step: int) -> None:
        flags = {"no latest": {"save_latest": False}, "native": {"exclude_frozen_parameters": True}}
        self.engine.save_checkpoint(self.root, name, {"step": step, **self.values}, **flags.get(self.program.way, {}))


class ByFabric(Life):
    def run(self, resume: str | None) -> None:
        precision: Any = "bf16-true" if self.program.is_bf16 else "32-true"
        strategy = FabricDeepSpeed(config=self.config())
        self.fabric = Fabric(accelerator="cpu", devices=self.program.ranks, precision=precision, strategy=strategy)
        self.fabric.launch()
        model, adam = self.fabric.setup(self.module, self.optimizer()[0])
        self.state: dict[str, Any] = {"model": model, "optimizer": adam, "step": 0, **self.values}
        if resume:
            self.returned.append(told(self.fabric.load(resume, self.state), odd=ODD[1:3]))
            self.returned.append(told({name: self.state[name] for name in ("step", *self.values)}))
        self.arrange(self.state["step"])
        for step, tokens in self.batches(self.state["step"]):
            self.fabric.backward(model(input_ids=tokens, labels=tokens).loss)
            adam.step()
            adam.zero_grad()
            self.after(step)

    def write(self, place: Any, name: Any, step: int) -> None:
        self.fabric.save(place, {**self.state, "step": step, **({"late": 1} if self.program.hook == "adds" else {})})


class ByAccelerate(Life):
    ways = ("call", "call", "automatic")

    def run(self, resume: str | None) -> None:
        training.on_cpu_ranks()
        plugin = DeepSpeedPlugin(hf_ds_config=self.config(train_micro_batch_size_per_gpu=ROWS))
        project = ProjectConfiguration(self.root, automatic_checkpoint_naming=True, total_limit=1)
        options: Any = {"project_config": project} if self.program.way == "automatic" else {}
        self.accelerator = Accelerator(deepspeed_plugin=plugin, step_scheduler_with_optimizer=False, **options)
        model, adam, scheduler = self.accelerator.prepare(self.module, *self.optimizer())
        self.accelerator.register_for_checkpointing(self)
        if self.program.hook == "adds":
            self.accelerator.register_save_state_pre_hook(lambda *given: Path(given[-1], "mine.txt").write_text("1"))
        if resume:
            self.accelerator.load_state(resume)
        self.arrange(model.global_steps)
        for step, tokens in self.batches(model.global_steps):
            self.accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            adam.step()
            scheduler.step()
            self.after(step)

    def write(self, place: Any, name: Any, step: int) -> None:
        is_automatic = self.program.way == "automatic"
        if is_automatic:
            self.saved[-1] = os.path.abspath(f"{self.root}/checkpoints/checkpoint_{len(self.saved) - 1}")  # noqa: PTH100
        self.accelerator.save_state(None if is_automatic else place)


class ByTransformers(Life, TrainerCallback):
    ways = ("steps", "steps", "limit", "only the model")

    def run(self, resume: str | None) -> None:
        more: dict[str, Any] = {"limit": {"save_total_limit": 1}, "only the model": {"save_only_model": True}}
        trainer = training.hugging_face(
            self.module, TOKENS, str(self.root), self.config(), per_device_train_batch_size=ROWS, learning_rate=1e-2,
            lr_scheduler_type="constant", max_steps=self.last, save_strategy="steps", save_steps=2,
            label_names=["labels"], **more.get(self.program.way, {}),
        )  # fmt: skip
        trainer.add_callback(self)
        save = trainer._save_checkpoint

        def save_checkpoint(*given: Any) -> None:
            step = trainer.state.global_step
            with self.saving(Path(self.root, f"checkpoint-{step}"), step):
                save(*given)

        if self.intervenes:
            trainer._save_checkpoint = save_checkpoint
        trainer.train(resume_from_checkpoint=resume)
        self.saved = sorted(map(str, (self.folder / self.root).glob("checkpoint-*")))

    def on_train_begin(self, args: Any, state: Any, *_: Any, **more: Any) -> None:
        self.arrange(state.global_step)

    def on_step_end(self, args: Any, state: Any, *_: Any, **more: Any) -> None:
        self.after(state.global_step)

    def save(self, step: int) -> None:
        """Leave it to Trainer, which saves after its callbacks."""


class Lit(pl.LightningModule):
    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life, self.model = life, life.module

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        adam, scheduler = self.life.optimizer()
        return {"optimizer": adam, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        hook, state = self.life.program.hook, checkpoint["state_dict"]
        if hook == "adds":
            checkpoint["mine"] = self.life.values
        elif hook.startswith("pops"):
            checkpoint.pop("optimizer_states" if hook == "pops the optimizer" else "lr_schedulers", None)
        elif hook == "renames":
            for name in list(state):
                state[f"mine.{name}"] = state.pop(name)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.life.returned.append(told({name: value for name, value in checkpoint.items() if name != "state_dict"}))


class Intervening(ModelCheckpoint):
    life: Life

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        with self.life.saving(filepath, trainer.global_step):
            super()._save_checkpoint(trainer, filepath)


class ByLightning(Life, Callback):
    ways = ("call", "steps", "steps", "top 1", "last", "last link", "weights")

    def run(self, resume: str | None) -> None:
        callbacks: list[Any] = [self]
        if self.program.way not in ("call", "weights"):
            last: Any = {"last": True, "last link": "link"}.get(self.program.way)
            made: Any = (Intervening if self.intervenes else ModelCheckpoint)(
                self.root, {"one": "ckpt", "default": None}.get(self.program.name, "ckpt{step}"),
                every_n_train_steps=2, save_top_k=1 if self.program.way == "top 1" else -1,
                save_last=last,
            )  # fmt: skip
            made.life = self
            callbacks.append(made)
        self.top = Lit(self)
        self.trainer = runs.trainer(
            str(self.root), self.program.ranks, strategy=DeepSpeedStrategy(config=self.config()), epochs=-1,
            max_steps=self.last, callbacks=callbacks, enable_checkpointing=len(callbacks) > 1,
            precision="bf16-true" if self.program.is_bf16 else "32-true",
        )  # fmt: skip
        self.trainer.fit(self.top, DataLoader(TOKENS[: 4 * ROWS * self.program.ranks], ROWS), ckpt_path=resume)
        if len(callbacks) > 1:
            self.saved = sorted(map(str, Path(made.dirpath).glob("*.ckpt")))

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.arrange(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.after(trainer.global_step)

    def save(self, step: int) -> None:
        """Save if no callback does."""
        if self.program.way in ("call", "weights"):
            super().save(step)

    def write(self, place: Any, name: Any, step: int) -> None:
        self.trainer.save_checkpoint(place, weights_only=self.program.way == "weights")


OWNERS: dict[str, type[Any]] = {
    **{"engine": ByEngine, "fabric": ByFabric, "accelerate": ByAccelerate},
    **{"transformers": ByTransformers, "lightning": ByLightning},
}


def lived(program: Program, folder: str, number: int, last: int, resume: str = "", patched: bool = False) -> Any:
    """Run a process of a program in its folder; return what it has seen, and has at its end."""
    before = Path.cwd()
    if patched:
        ds_frozen_patch.patch(async_save=program.is_async)
    random.seed(0)
    numpy.random.seed(0)
    for name in ("elsewhere", "real"):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        Path(folder, "link").symlink_to("real")
    try:
        os.chdir(folder)
        life = OWNERS[program.owner](program, number, last)
        life.run(resume or None)
        ds_frozen_patch.wait()
        seen = {"losses": life.losses, "weights": runs.trained_state(life.module), "returned": life.returned}
        return {**seen, "listed": life.listed, "saved": life.saved, "base": life.base()}
    finally:
        os.chdir(before)


# What is compared


ODD = ("ds_frozen_patch", "frozen_param_", "shared_params", "universal_checkpoint_info")
"""How keys begin that only trainable-only checkpoints have, or lack."""


def told(value: Any, at: str = "", odd: tuple[str, ...] = ODD) -> dict[str, str]:
    """What is in a value, by its place; without odd keys."""
    if isinstance(value, torch.Tensor):
        return {at: f"{value.dtype} {tuple(value.shape)} {runs.digest(value)}"}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type | Enum | Path):
        inner = vars(value)
    else:
        return {at: f"{type(value).__name__} {sorted(map(repr, value)) if isinstance(value, set) else repr(value)}"}
    found = {at: type(value).__name__}
    for name, item in inner.items():
        found |= {} if str(name).startswith(odd) else told(item, f"{at}/{name}", odd)
    return found


def outcomes(ranks: Any, program: Program, folder: Path, by: str) -> list[Any]:
    """What each process has seen on rank 0, with a copy of its folder beside it; or what it has raised."""
    found, run, resume = list[Any](), folder / "run", ""
    arguments: dict[str, Any] = {"program": program, "folder": str(run), "patched": by == "ours"}
    for number in range(1 if program.way in ONCE else 2):
        try:
            arguments |= {"number": number, "last": STEPS[number], "resume": resume}
            found.append(ranks(program.ranks, lived, **arguments)[0])
        except RankError as error:
            print(by, number, str(error)[-3000:])
            found.append(next(raised for raised in error.raised if raised))
            break
        shutil.copytree(run, folder / f"{by}{number}", symlinks=True)
        if number == 0:
            there = [path for path in found[0]["saved"] if Path(path).exists()]
            resume = there[min(program.resumes, len(there) - 1)]
            if program.moves:
                (run / "moved").mkdir()
                resume = str(shutil.move(resume, run / "moved" / Path(resume).name))
    shutil.rmtree(run)
    return found


def check(program: Program, ours: list[Any], plain: list[Any], folder: Path, whole: Callable[[], list[float]]) -> None:
    """Compare what the processes have seen and left; `whole` returns the losses of a plain, uninterrupted process."""
    for number, (one, other) in enumerate(zip(ours, plain, strict=False)):
        if isinstance(other, tuple):
            assert isinstance(one, dict) or other[0] in (one[0], *re.findall(r"\((\w+): ", one[1]))
            return
        assert isinstance(one, dict), one
        # Plain may lose what is frozen, if it is told to; and the rounding of a merge is not in ours.
        loses = number > 0 and other["losses"] != one["losses"] == whole()[-len(other["losses"]) :]
        is_exact = number == 0 or not (program.merges or loses)
        assert loses or one["losses"] == pytest.approx(other["losses"], 0 if is_exact else 1e-4, 0)
        assert one["weights"] == other["weights"] or not is_exact
        for what in ("listed", "returned", "saved", "base"):
            assert one[what] == other[what], what
        check_folder(program, folder / f"ours{number}", folder / f"plain{number}", set(one["base"]), is_exact)


def check_folder(program: Program, ours: Path, plain: Path, base: set[str], is_exact: bool) -> None:
    mine, theirs = (
        {str(item.relative_to(folder)): item for item in sorted(folder.rglob("*")) if item.name != RECORD}
        for folder in (ours, plain)
    )
    for name in [name for name, item in theirs.items() if item.is_dir() and name in mine and mine[name].is_file()]:
        states = next(theirs[name].rglob("*model_states.pt"))  # and ours has the weights in a single file
        weights = {key.removeprefix("mine."): value for key, value in loaded(mine[name])["state_dict"].items()}
        check_states(program, told({"module": weights}), told({"module": dict(loaded(states)["module"])}), base)
        for inner in [inner for inner in theirs if inner.startswith(f"{name}/")]:
            del theirs[inner]
    assert mine.keys() == theirs.keys()
    for name, file in theirs.items() if is_exact else ():
        if name.endswith("_states.pt"):
            is_full = program.full and re.search(rf"(ckpt|step=?|-){program.full}\b|copies/{program.full}/", name)
            check_states(program, told(loaded(mine[name])), told(loaded(file)), set() if is_full else base)
        elif file.is_file() and mine[name].is_file():
            assert mine[name].read_bytes() == file.read_bytes(), name


def check_states(program: Program, ours: dict[str, str], plain: dict[str, str], base: set[str]) -> None:
    """Check that ours has all but the base, and of the base nothing."""
    free, left_out = {at for at in ours | plain if program.is_free(at)}, {f"/module/{name}" for name in base}
    if plain.get("/param_shapes") == "NoneType None":  # in stage 0, where ours has what DeepSpeed saves from ZeRO-1 on
        free |= {at for at in ours | plain if at.startswith("/param_shapes")}
    values = {at: value for at, value in plain.items() if at not in free | left_out and " (0,) " not in value}
    assert {at: ours.get(at) for at in values} == values
    names = plain.keys() - left_out - free
    assert ours.keys() - free >= names
    # Trainer's own saves of PEFT's models, and DeepSpeed's if they are told to, lack what is frozen, trained or not.
    assert not [at for at in ours.keys() - free - names if at in left_out or not at.startswith("/module/")]


def loaded(file: Path) -> Any:
    """What is in a file, but for the padding of ZeRO-3's partitions, which DeepSpeed does not initialize."""
    content = torch.load(file, weights_only=False)
    if (optimizer := content.get("optimizer_state_dict", {})).get("zero_stage") == 3:
        rank, ranks = int(re.findall(r"zero_pp_rank_(\d+)_", file.name)[0]), optimizer["partition_count"]
        groups = loaded(file.with_name(file.name.removeprefix("bf16_").replace("optim", "model")))["param_shapes"]
        flat, state = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]["state"]
        for number, shapes in enumerate(groups):
            sizes = [(-(-shape.numel() // ranks), shape.numel()) for shape in shapes.values()]
            is_value = torch.cat([torch.arange(rank * size, (rank + 1) * size) < numel for size, numel in sizes])
            for tensor in (flat[number], *(value for value in state[number].values() if value.dim())):
                tensor.detach()[~is_value] = 0
    return content


def live(ranks: Any, program: Program, folder: Path) -> None:
    """Run a program plain and under `patch()`, and compare."""
    plain, ours = (outcomes(ranks, program, folder, by) for by in ("plain", "ours"))
    print(program, *([seen if isinstance(seen, tuple) else "ran" for seen in by] for by in (plain, ours)))
    whole: Any = {"program": program, "folder": f"{folder}/whole", "number": 0, "last": STEPS[1]}
    check(program, ours, plain, folder, lambda: ranks(program.ranks, lived, **whole)[0]["losses"])


def shrunk(ranks: Any, program: Program, folder: Path) -> Program:
    """A program that is as simple as possible, and fails too."""
    for part in fields(Program):
        simple: Any = {part.name: part.default}
        simpler = replace(program, **simple)
        if simpler != program:
            try:
                live(ranks, simpler, folder / part.name)
            except AssertionError:
                program = simpler
    return program


FAILED = (
    Program(owner="transformers", merges="around saves"),
    Program(kind="Cartridge", has_seed=False),
    Program(owner="accelerate", way="automatic"),
    Program(owner="accelerate", way="automatic", path="changed cwd", resumes=0),
    Program(stage=0, is_wrapped=True, optimizer="all", hook="own state_dict"),
)
"""Programs that have failed once, shrunk."""


@pytest.mark.parametrize("program", FAILED, ids=str)
def test_a_program_that_failed_once(ranks: Any, tmp_path: Path, program: Program) -> None:
    live(ranks, program, tmp_path)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program(ranks: Any, tmp_path: Path, seed: int) -> None:
    program = Program.drawn(seed)
    try:
        live(ranks, program, tmp_path / "drawn")
    except AssertionError as error:
        raise AssertionError(f"{program} fails, and so does {shrunk(ranks, program, tmp_path)}") from error

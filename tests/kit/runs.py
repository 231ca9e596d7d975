"""The runs that the contract is about: a LoRA fine-tune by Trainer or Fabric, with what it leaves on disk.

Everything here runs inside a rank.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ds_frozen_patch.parameters import PREFIX
from kit.cell import FABRIC, PRECISION, TRAINER, DeepSpeedStrategy, Fabric, FabricDeepSpeed, ModelCheckpoint, pl

VOCABULARY = 96
BATCHES = 2  # per rank and epoch


class LoraRun(pl.LightningModule):
    """A small Llama with LoRA adapters, a buffer that training changes, and the losses it has seen."""

    model: Any
    seen: Any

    def __init__(self, seed: int = 1, tied: bool = True, hidden: int = 32, vocabulary: int = VOCABULARY, rank: int = 4):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
        lora = LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        self.model = get_peft_model(LlamaForCausalLM(config), lora)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch)
        self.seen += 1
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self(batch) + 0 * self.seen, sync_dist=True)

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("test_loss", self(batch) + 0 * self.seen, sync_dist=True)

    def predict_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.model(input_ids=batch).logits.float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def saving_more(layer: torch.nn.Module, value: float) -> torch.nn.Module:
    """Let a layer save entries below its weight's name without loading them, as those of `Linear4bit` do.

    A class of layers would do so everywhere, but DeepSpeed 0.10 does not restore a class whose base it has wrapped.
    """
    save = layer._save_to_state_dict

    def save_more(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save(destination, prefix, keep_vars)
        for name in ("absmax", "quant_state.bitsandbytes__nf4"):
            destination[f"{prefix}weight.{name}"] = torch.full((1,), value)

    layer._save_to_state_dict = save_more  # type: ignore[method-assign]
    return layer


class OnQuantized(LoraRun):
    """The run's model beside a frozen layer of that kind."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.base = saving_more(torch.nn.Linear(2, 2).requires_grad_(False), value)


def batches(world_size: int) -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (2 * BATCHES * world_size, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(tokens, batch_size=2)  # type: ignore[arg-type]


def config(stage: int, **extra: Any) -> dict[str, Any]:
    """A DeepSpeed config as people write it: what the strategy's constructor would have made is not filled in."""
    # DeepSpeed's default bucket is 2 GB in fp32, and old releases write to all of it.
    zero = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000_000, **extra}} if stage else {}
    return {**zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def trainer(
    out: str | Path, world_size: int, stage: int = 2, *, strategy: Any = None, epochs: int = 2, **options: Any
) -> pl.Trainer:
    # In stage 0 releases of DeepSpeed differ in what they make of bf16: some cannot train.
    options.setdefault("precision", PRECISION if stage else "32-true")
    if options.get("enable_checkpointing", True):
        options.setdefault("callbacks", [ModelCheckpoint(str(out), filename="{epoch}", save_top_k=-1)])
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DeepSpeedStrategy(config=config(stage)) if strategy is None else strategy,
        max_epochs=epochs,
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def trained_state(module: torch.nn.Module) -> dict[str, str]:
    """A digest of each whole parameter and buffer, partitioned or not."""
    found = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):  # of several, it takes all to have one dtype
            found[name] = digest(parameter)
    return found | {name: digest(buffer) for name, buffer in module.named_buffers()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def fabric(world_size: int, stage: int, precision: str = PRECISION, **strategy: Any) -> Fabric:
    made = Fabric(
        accelerator="cpu",
        devices=world_size,
        precision=precision,  # type: ignore[arg-type]
        strategy=FabricDeepSpeed(config=config(stage), **strategy),
    )
    made.launch()
    return made


def fabric_setup(made: Fabric, **model: Any) -> Any:
    module = LoraRun(**model)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    return made.setup(module, optimizer)


def fabric_epoch(made: Fabric, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for tokens in made.setup_dataloaders(batches(made.world_size)):
        loss = model(tokens)
        losses.append(loss.item())
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refusal(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The name and the text of what a call raises. It must raise on every rank, or the ranks fall out of step."""
    found = outcome(run, *args, **kwargs)
    assert found[0], "nothing was raised"
    return found


def outcome(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The name and the text of what a call raises, or two empty ones."""
    try:
        run(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error).replace(PREFIX, "")
    return "", ""


@contextmanager
def heard(*more: str) -> Iterator[list[str]]:
    """The messages of our loggers, those of more packages too, and all warnings, while this lasts."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname}: {record.getMessage()}")

    listener = Listener()
    names = ("ds_frozen_patch", *(f"{package}.ds_frozen_patch" for package in (TRAINER, FABRIC, *more)))
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(listener)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            messages.extend(f"{w.category.__name__}: {w.message}" for w in caught)
            for logger in loggers:
                logger.removeHandler(listener)


def small_llama(seed: int = 1, **changes: Any) -> Any:
    """Return a model with the sizes of `runs.LoraRun`'s, except for these values of its configuration."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **layers, **changes}))

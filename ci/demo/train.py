"""One LoRA fine-tune on CPU ranks, as the demo runs it.

Lightning starts the other ranks by running this program again.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ds_frozen_patch
from ds_frozen_patch.testing import cpu_strategy

RANKS = 2
EPOCHS = 4
SAVED_EPOCH = 2
STEPS_PER_EPOCH = 4

ds_frozen_patch.patch()  # the one line that a real program adds

DeepSpeedStrategy = cpu_strategy("lightning.pytorch")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


class LoraFineTune(pl.LightningModule):
    """A Llama of 23 million frozen parameters with tied embeddings, and LoRA adapters on its attention."""

    def __init__(self, quantized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same base at every start: a real program calls from_pretrained
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=6,
            tie_word_embeddings=True,
        )
        adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        base = LlamaForCausalLM(config)
        self.model = get_peft_model(in_nf4(base) if quantized else base, adapters)
        self.losses: list[float] = []

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-3)


def in_nf4(model: Any) -> Any:
    """Quantize a model's linear layers, as `from_pretrained(quantization_config=BitsAndBytesConfig(...))` does."""
    from bitsandbytes.nn import Linear4bit

    for name, linear in list(model.named_modules()):
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            shape = (linear.in_features, linear.out_features)
            # DeepSpeed up to 0.17 gathers no bytes in ZeRO-3, and so the packed weights look like bf16.
            kind = {"quant_type": "nf4", "quant_storage": torch.bfloat16, "compute_dtype": torch.bfloat16}
            quantized = Linear4bit(*shape, bias=False, **kind)
            quantized.weight.data = linear.weight.data.to(torch.bfloat16)
            quantized.support_avx512bf16_for_cpu = False  # else an evaluation repacks the weights for such a CPU
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, quantized.to("cpu"))  # which quantizes
    model.is_loaded_in_4bit = True  # for PEFT
    return model


def count(parameter: torch.nn.Parameter) -> int:
    """How many numbers a parameter is of, whether it is partitioned or packed."""
    if quantization := getattr(parameter, "quant_state", None):
        return int(quantization.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


class Save(pl.Callback):
    """Saves once, at the end of an epoch, each kind of checkpoint."""

    def __init__(self, out: Path, progress: Callable[[str], None]) -> None:
        self.out = out
        self.progress = progress

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress(f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}")
        if trainer.current_epoch + 1 == SAVED_EPOCH:
            trainer.save_checkpoint(self.out / "trainable-only.ckpt")
            with ds_frozen_patch.full_checkpoint():
                trainer.save_checkpoint(self.out / "full.ckpt")


def main() -> None:
    """Train, from the start or from a checkpoint, and write the losses of rank 0 to OUT/losses.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path, help="directory for checkpoints and losses")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2, help="ZeRO stage")
    parser.add_argument("--quantized", action="store_true", help="quantize the frozen linear layers to 4 bits")
    parser.add_argument("--ckpt-path", type=Path, help="checkpoint to resume from")
    options = parser.parse_args()
    _quiet()

    def progress(text: str) -> None:
        if trainer.is_global_zero:
            print(text, flush=True)

    tokens = torch.randint(32000, (2 * RANKS * STEPS_PER_EPOCH, 32), generator=torch.Generator().manual_seed(0))
    module = LoraFineTune(options.quantized)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DeepSpeedStrategy(stage=options.stage),
        precision="bf16-mixed" if options.quantized else "32-true",  # many CPUs compute in bf16 20 times slower
        max_epochs=EPOCHS,
        callbacks=[] if options.ckpt_path else [Save(options.out, progress)],
        default_root_dir=options.out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    progress("model built")
    trainer.fit(module, DataLoader(tokens, batch_size=2), ckpt_path=options.ckpt_path)  # type: ignore[arg-type]
    if trainer.is_global_zero:
        name = "resumed.json" if options.ckpt_path else "losses.json"
        facts: dict[str, Any] = {
            "losses": module.losses,
            "trainable": sum(count(p) for p in module.parameters() if p.requires_grad),
            "frozen": sum(count(p) for p in module.parameters() if not p.requires_grad),
        }
        (options.out / name).write_text(json.dumps(facts))
        progress("done")


def _quiet() -> None:
    """Other people's notes would bury the demo's own lines."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


if __name__ == "__main__":
    main()

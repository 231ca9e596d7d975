"""The bytes of a full and of a trainable-only checkpoint, as in the README's picture: a part of `nox -s bench`.

Both are saved after one step of a LoRA fine-tune of a Llama of the shape of Llama 3.2 1B, on one CPU rank with ZeRO-2.
It wants 8 GB of memory and 3 GB of disk.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from bench.finetune import Shape, fitted
from bench.timing import size
from tables import markdown

import ds_frozen_patch

ROUNDS = 1  # sizes do not vary
SHAPE = Shape(2048, 8192, 16, 128256, lora=16, tied=True, targets=("q_proj", "v_proj"), kv_heads=8)
ABOUT = "LoRA (r=16) on the shape of Llama 3.2 1B, bf16, ZeRO-2, AdamW"
KINDS = ("frozen weights", "trainable weights", "fp32 master weights", "optimizer state")


def measure(folder: Path, rounds: int) -> dict[str, dict[str, int]]:
    """Return the bytes of both by kind."""
    ds_frozen_patch.patch()
    trainer = fitted(SHAPE)
    found = {}
    for name in ("full", "trainable-only"):
        place = folder / f"{name}.ckpt"
        with ds_frozen_patch.full_checkpoint() if name == "full" else nullcontext():
            trainer.save_checkpoint(place)
        kinds = dict(ds_frozen_patch.inspect(place).kinds)
        found[name] = {kind: kinds.pop(kind, 0) for kind in KINDS} | {"all else": sum(kinds.values())}
    return found


def render(found: dict[str, dict[str, int]]) -> str:
    """Return a row for each kind of bytes."""
    columns = {name: {**kinds, "all": sum(kinds.values())} for name, kinds in found.items()}
    rows = [[kind, *(size(kinds[kind]) for kinds in columns.values())] for kind in (*KINDS, "all else", "all")]
    return f"{ABOUT}:\n\n{markdown(['', *columns], rows)}"

"""Draws the README's picture: the bytes of a full and of a trainable-only checkpoint, from two that are saved for it.

`nox -f ci/noxfile.py -s picture` takes one step of a LoRA fine-tune of a Llama of the shape of Llama 3.2 1B, on one CPU
rank with ZeRO-2, saves both, and lets `inspect` count. It wants 8 GB of memory and 3 GB of disk.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench import engine
from demo.picture import drawing

import ds_frozen_patch

PICTURE = Path(__file__).with_name("checkpoint.svg")
ABOUT = "LoRA (r=16) on the shape of Llama 3.2 1B, bf16, ZeRO-2, AdamW"


def main() -> None:
    """Save, count, draw."""
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        full, small = save(Path(folder))
        found = [ds_frozen_patch.inspect(checkpoint) for checkpoint in (full, small)]
    PICTURE.write_text(drawing(found[0].kinds, found[1].kinds, ABOUT), encoding="utf-8")
    print(f"Drawn into {PICTURE.name}: {found[0].size} and {found[1].size} bytes.")


def save(folder: Path) -> tuple[Path, Path]:
    """Save a full and a trainable-only checkpoint of one run."""
    ds_frozen_patch.patch()
    shape = engine.Shape(2048, 8192, 16, 128256, lora=16, tied=True, targets=("q_proj", "v_proj"), kv_heads=8)
    print("training one step of a Llama of 1.2 G parameters", file=sys.stderr)
    trainer = engine.fitted(shape)
    full, small = folder / "full.ckpt", folder / "trainable-only.ckpt"
    trainer.save_checkpoint(small)
    with ds_frozen_patch.full_checkpoint():
        trainer.save_checkpoint(full)
    return full, small


if __name__ == "__main__":
    main()

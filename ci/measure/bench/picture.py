"""Draws the README's picture: the bytes of a full and of a trainable-only checkpoint, from two that are saved for it.

`nox -f ci/noxfile.py -s picture` takes one step of a LoRA fine-tune of a Llama of the shape of Llama 3.2 1B, on one CPU
rank with ZeRO-2, saves both, and lets `inspect` count. It wants 8 GB of memory and 3 GB of disk.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench import engine
from bench.svg import CARD, MARGIN, page
from bench.words import size

import ds_frozen_patch

PICTURE = Path(__file__).with_name("checkpoint.svg")
COLOURS = {
    "frozen weights": "#b0b7bf",
    "trainable weights": "#0072b2",
    "fp32 master weights": "#009e73",
    "optimizer state": "#e69f00",
    "all else": "#cc79a7",
}
WIDTH, LEFT, BAR = CARD, MARGIN, 34


def main() -> None:
    """Save, count, draw."""
    with tempfile.TemporaryDirectory(prefix="picture-") as folder:
        full, small = save(Path(folder))
        kinds = [counted(ds_frozen_patch.inspect(checkpoint).kinds) for checkpoint in (full, small)]
    PICTURE.write_text(drawing(*kinds), encoding="utf-8")
    print(f"Drawn into {PICTURE.name}: {sum(kinds[0].values())} and {sum(kinds[1].values())} bytes.")


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


def counted(kinds: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes by the kinds that the picture shows."""
    shown = {kind: kinds.get(kind, 0) for kind in COLOURS}
    return {**shown, "all else": sum(kinds.values()) - sum(shown.values())}


def drawing(full: Mapping[str, int], small: Mapping[str, int]) -> str:
    """Both checkpoints to one scale as bars, and the small one magnified below."""
    most, least = sum(full.values()), sum(small.values())
    lines = [
        '<g font-size="14">',
        *bar(24, f"A full checkpoint: {size(most)}", full, most),
        *bar(96, f"The same, trainable-only: {size(least)}, {most / least:.0f} times smaller", small, most),
        *bar(168, f"The same, magnified {most / least:.0f} times:", small, least),
    ]
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 170 * (place % 3), 240 + 20 * (place // 3)
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 11}" font-size="12">{kind}</text>')
    about = "LoRA (r=16) on the shape of Llama 3.2 1B, bf16, ZeRO-2, AdamW"
    lines.append(f'<text x="{LEFT}" y="297" font-size="12" fill="#555555">{about}</text>')
    return page(WIDTH, 310, [*lines, "</g>"])


def bar(top: int, title: str, kinds: Mapping[str, int], scale: int) -> list[str]:
    """Return a title, and a bar of the kinds, `scale` bytes to the whole width."""
    lines, x = [f'<text x="{LEFT}" y="{top}">{title}</text>'], float(LEFT)
    for kind, colour in COLOURS.items():
        width = kinds[kind] / scale * (WIDTH - 2 * LEFT)
        lines.append(f'<rect x="{x:.2f}" y="{top + 8}" width="{width:.2f}" height="{BAR}" fill="{colour}"/>')
        x += width
    return lines


if __name__ == "__main__":
    main()

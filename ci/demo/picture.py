"""Draws the bytes of a full checkpoint and of the same one, trainable-only, as SVG."""

from __future__ import annotations

from collections.abc import Mapping

from ds_frozen_patch.common.text import human_bytes

COLOURS = {
    "frozen weights": "#b0b7bf",
    "trainable weights": "#0072b2",
    "fp32 master weights": "#009e73",
    "optimizer state": "#e69f00",
    "all else": "#cc79a7",
}
WIDTH, HEIGHT, LEFT, BAR = 520, 310, 14, 34


def drawing(full: Mapping[str, int], small: Mapping[str, int], about: str) -> str:
    """Both checkpoints to one scale as bars, and the small one magnified below.

    Args:
        full: bytes by kind, as `Inspection.kinds` has them.
        small: the same of the trainable-only checkpoint.
        about: what was trained, for the line at the bottom.
    """
    full, small = _shown(full), _shown(small)
    most, least = sum(full.values()), sum(small.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<rect width="100%" height="100%" rx="8" fill="white"/><g font-family="sans-serif" font-size="14">',
        *_bar(24, f"A full checkpoint: {human_bytes(most)}", full, most),
        *_bar(96, f"The same, trainable-only: {human_bytes(least)}, {most / least:.0f} times smaller", small, most),
        *_bar(168, f"The same, magnified {most / least:.0f} times:", small, least),
    ]
    for place, (kind, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 170 * (place % 3), 240 + 20 * (place // 3)
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 11}" font-size="12">{kind}</text>')
    lines.append(f'<text x="{LEFT}" y="297" font-size="12" fill="#555555">{about}</text>')
    return "\n".join([*lines, "</g></svg>"]) + "\n"


def _shown(kinds: Mapping[str, int]) -> dict[str, int]:
    """The bytes by the kinds that have a colour."""
    shown = {kind: kinds.get(kind, 0) for kind in COLOURS}
    return {**shown, "all else": sum(kinds.values()) - sum(shown.values())}


def _bar(top: int, title: str, kinds: Mapping[str, int], scale: int) -> list[str]:
    """A title, and a bar of the kinds, `scale` bytes to the whole width."""
    lines, x = [f'<text x="{LEFT}" y="{top}">{title}</text>'], float(LEFT)
    for kind, colour in COLOURS.items():
        width = kinds[kind] / scale * (WIDTH - 2 * LEFT)
        lines.append(f'<rect x="{x:.2f}" y="{top + 8}" width="{width:.2f}" height="{BAR}" fill="{colour}"/>')
        x += width
    return lines

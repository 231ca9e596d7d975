"""Plots of curves as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 330, 220
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A curve and how it is drawn: `style` are attributes of SVG such as its stroke."""

    name: str
    points: Sequence[Point]
    style: str


def page(width: int, height: int, lines: Sequence[str]) -> str:
    """Return a picture on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    begin = '<rect width="100%" height="100%" fill="white"/><g font-family="sans-serif" font-size="12">'
    return "\n".join([head, begin, *lines, "</g></svg>"]) + "\n"


def plot(x: int, y: int, title: str, curves: Sequence[Curve], unit: Point) -> list[str]:
    """Return one plot with its axes, which begin at zero and are labelled in multiples of `unit`."""
    right, top = (max(point[axis] for curve in curves for point in curve.points) for axis in (0, 1))
    lines = [
        f'<text x="{x}" y="{y - 12}" font-weight="bold">{title}</text>',
        f'<path d="M{x} {y} v{HEIGHT} h{WIDTH}" fill="none" stroke="black"/>',
    ]
    for share in (0, 0.5, 1):
        across, up = share * right / unit[0], share * top / unit[1]
        lines.append(f'<text x="{x - 6}" y="{y + (1 - share) * HEIGHT + 4:.0f}" text-anchor="end">{up:.3g}</text>')
        place = f'x="{x + share * WIDTH:.0f}" y="{y + HEIGHT + 16}"'
        lines.append(f'<text {place} text-anchor="middle">{across:.0f}</text>')
    for curve in curves:
        path = " ".join(f"{x + a / right * WIDTH:.1f},{y + (1 - b / top) * HEIGHT:.1f}" for a, b in curve.points)
        lines.append(f'<polyline points="{path}" fill="none" {curve.style}/>')
    return lines


def legend(x: int, y: int, curve: Curve) -> list[str]:
    """Return a curve's line and its name."""
    return [f'<path d="M{x} {y} h30" {curve.style}/>', f'<text x="{x + 36}" y="{y + 4}">{curve.name}</text>']

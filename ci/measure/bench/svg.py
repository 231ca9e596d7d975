"""Charts as SVG, on a white card that light and dark pages can show: curves, bars, and grids of yes and no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 330, 220
CARD, MARGIN = 520, 14  # of bars and grids, which a phone shows at two thirds
OURS, GREY = "#0072b2", "#b0b7bf"
STATES = {"yes": ("#0b7a5b", "✓"), "partly": ("#c98500", "~"), "no": ("#c2410c", "✗"), "": ("#e5e7eb", "")}
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A curve and how it is drawn: `style` are attributes of SVG such as its stroke."""

    name: str
    points: Sequence[Point]
    style: str


def page(width: int, height: int, lines: Sequence[str]) -> str:
    """Return a picture, which scales with the page."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    begin = '<rect width="100%" height="100%" rx="8" fill="white"/><g font-family="sans-serif" font-size="12">'
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
        label = f"{up:.0f}" if up >= 100 else f"{up:.3g}"
        lines.append(f'<text x="{x - 6}" y="{y + (1 - share) * HEIGHT + 4:.0f}" text-anchor="end">{label}</text>')
        place = f'x="{x + share * WIDTH:.0f}" y="{y + HEIGHT + 16}"'
        lines.append(f'<text {place} text-anchor="middle">{across:.0f}</text>')
    for curve in curves:
        path = " ".join(f"{x + a / right * WIDTH:.1f},{y + (1 - b / top) * HEIGHT:.1f}" for a, b in curve.points)
        lines.append(f'<polyline points="{path}" fill="none" {curve.style}/>')
    return lines


def legend(x: int, y: int, curve: Curve) -> list[str]:
    """Return a curve's line and its name."""
    return [f'<path d="M{x} {y} h30" {curve.style}/>', f'<text x="{x + 36}" y="{y + 4}">{curve.name}</text>']


def bars(y: int, title: str, rows: Sequence[tuple[str, float, str]], ours: int = 1) -> list[str]:
    """Return a bar for each label, value and what is said of it; the first ones are ours. Each takes 36 pixels."""
    most = max(value for _, value, _ in rows)
    lines = [f'<text x="{MARGIN}" y="{y}" font-size="14" font-weight="bold">{escape(title)}</text>']
    for place, (label, value, said) in enumerate(rows):
        top, width = y + 12 + 36 * place, max(2, value / most * (CARD - 2 * MARGIN - 70))
        colour = OURS if place < ours else GREY
        lines += [
            f'<text x="{MARGIN}" y="{top + 11}">{escape(label)}</text>',
            f'<rect x="{MARGIN}" y="{top + 16}" width="{width:.0f}" height="12" fill="{colour}"/>',
            f'<text x="{MARGIN + width + 6:.0f}" y="{top + 26}">{escape(said)}</text>',
        ]
    return lines


def grid(columns: Sequence[str], rows: Mapping[str, Sequence[str]], beside: int = 0, groups: Sequence[str] = ()) -> str:
    """Return a picture with a cell for each row and column: "yes", "no", "partly", or "" where it does not apply.

    Labels have `beside` pixels to the left of their row, or stand above it. `groups` has a heading for each column, or
    none; columns with the same one stand together.
    """
    left, step, head = MARGIN + beside, 20 if beside else 40, 40 if groups else 24
    gap = 6 if groups else 0
    names = list(dict.fromkeys(groups))
    width = (CARD - MARGIN - left - gap * max(len(names) - 1, 0)) / len(columns)
    shifts = [gap * names.index(group) for group in groups] or [0] * len(columns)
    middle = [left + (column + 0.5) * width + shift for column, shift in enumerate(shifts)]
    own = [[x for x, group in zip(middle, groups, strict=True) if group == name] for name in names]
    headings = [(sum(places) / len(places), 22, name) for places, name in zip(own, names, strict=True)]
    headings += [(x, head, column) for x, column in zip(middle, columns, strict=True)]
    lines = [
        f'<text x="{x:.0f}" y="{y}" font-size="11" font-weight="bold" text-anchor="middle">{escape(text)}</text>'
        for x, y, text in headings
    ]
    for place, (label, states) in enumerate(rows.items()):
        top = head + 10 + step * place + (0 if beside else 18)
        lines.append(f'<text x="{MARGIN}" y="{top + 12 if beside else top - 5}">{escape(label)}</text>')
        for x, state in zip(middle, states, strict=True):
            colour, mark = STATES[state]
            place_of = f'x="{x - width / 2 + 1:.1f}" y="{top}" width="{width - 2:.1f}" height="16" rx="2"'
            lines.append(
                f'<rect {place_of} fill="{colour}"/>'
                f'<text x="{x:.1f}" y="{top + 12}" text-anchor="middle" fill="white">{mark}</text>'
            )
    y = head + 10 + step * len(rows) + 20
    shown = {state: STATES[state] for state in STATES if any(state in states for states in rows.values())}
    lines += [
        f'<rect x="{MARGIN + 90 * place}" y="{y - 11}" width="14" height="14" rx="2" fill="{colour}"/>'
        f'<text x="{MARGIN + 90 * place + 7}" y="{y}" text-anchor="middle" fill="white">{mark}</text>'
        f'<text x="{MARGIN + 90 * place + 20}" y="{y}">{state or "not applicable"}</text>'
        for place, (state, (colour, mark)) in enumerate(shown.items())
    ]
    return page(CARD, y + 14, lines)

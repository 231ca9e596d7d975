"""The pictures of `docs/` and of the README, made of the figures of the tables: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from bench import checkpoint
from bench.finetune import FULL, OURS
from bench.timing import seconds, size
from matplotlib.figure import Figure
from readme import read, shown_case
from tables import CHARTS, README_PICTURE

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#b0b7bf"
KINDS = dict(zip((*checkpoint.KINDS, "all else"), (GREY, BLUE, "#009e73", "#e69f00", "#cc79a7"), strict=True))
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "ds_frozen_patch", "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
}  # fmt: skip


def saves(case: Mapping[str, Any]) -> Figure:
    """Draw bytes and seconds of a save of the large model, what people get first and in our colour."""
    ways = {OURS: case["ways"][OURS], **{way: cost for way, cost in case["ways"].items() if "floor" not in way}}
    figure = Figure((7, 5))
    for axes, title, figures, written in zip(
        figure.subplots(2),
        ("Size of a checkpoint", "Time of a save"),
        ([cost["bytes"][-1] for cost in ways.values()], [median(cost["seconds"]) for cost in ways.values()]),
        ([size(cost["bytes"][-1]) for cost in ways.values()], [seconds(cost) for cost in ways.values()]),
        strict=True,
    ):
        bars = axes.barh(range(len(ways)), figures, color=[BLUE, *[GREY] * (len(ways) - 1)])
        axes.bar_label(bars, written, padding=4)
        axes.set_yticks(range(len(ways)), [way.replace("`", "") for way in ways])
        axes.set(title=title, xticks=[], xlim=(0, 1.15 * max(figures)))
        axes.invert_yaxis()
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(left=False)
    return figure


def growth(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw seconds above and megabytes below, by the base and by what is trained."""
    figure = Figure((8, 5.6))
    plots = figure.subplots(2, 2)
    for (above, below), (what, points) in zip(plots.T, found.items(), strict=True):
        grows = [point["frozen_bytes" if what == "base" else "trainable"] / 1e6 for point in points]
        for way, colour, name in ((OURS, BLUE, "patch()"), (FULL, ORANGE, "plain Lightning")):
            costs = [point["ways"][way] for point in points]
            above.plot(grows, [median(cost["seconds"]) for cost in costs], color=colour, label=name)
            if way == OURS:
                first = [cost["first"]["seconds"] for cost in costs]
                above.plot(grows, first, "--", color=colour, label=f"{name}, first save")
            below.plot(grows, [cost["bytes"][-1] / 1e6 for cost in costs], color=colour, label=name)
        for axes, unit in ((above, "seconds of a save"), (below, "MB on disk")):
            axes.set(
                ylim=0, xlim=0, ylabel=unit, xlabel="MB of frozen weights" if what == "base" else "M trained parameters"
            )
    plots[0, 0].legend(frameon=False)
    return figure


def sizes(found: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw both checkpoints to one scale as bars, and the small one magnified below."""
    full, small = found["full"], found["trainable-only"]
    most, least = sum(full.values()), sum(small.values())
    bars = {
        f"A full checkpoint: {size(most)}": (full, most),
        f"The same, trainable-only: {size(least)}, {most / least:.0f} times smaller": (small, most),
        f"The same, magnified {most / least:.0f} times:": (small, least),
    }
    figure = Figure((7, 4))
    for axes, (title, (kinds, scale)) in zip(figure.subplots(3), bars.items(), strict=True):
        left = 0
        for kind, colour in KINDS.items():
            axes.barh(0, kinds[kind], left=left, color=colour, label=kind)
            left += kinds[kind]
        axes.set(xlim=(0, scale), ylim=(-0.4, 0.4))
        axes.set_title(title)
        axes.set_axis_off()
    style = {"loc": "outside lower left", "ncols": 3, "frameon": False, "alignment": "left"}
    figure.legend(*axes.get_legend_handles_labels(), title=checkpoint.ABOUT, **style)
    return figure


def main() -> None:
    """Draw all, each time with the same bytes."""
    bench, _ = read()
    with mpl.rc_context(STYLE):
        pictures: dict[Path, Figure] = {
            README_PICTURE: sizes(bench["checkpoint"]["found"]),
            CHARTS / "saves.svg": saves(shown_case(bench)),
            CHARTS / "growth.svg": growth(bench["growth"]["found"]),
        }
        for place, figure in pictures.items():
            figure.savefig(place, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()

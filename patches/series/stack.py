"""How the folders of the lines are made: of the stack, by an overlay for each older line.

The stack is the folder of the last line of an index. The overlay of a line is git's difference from the folder of the
next newer line to its own, in `overlays/`: it is all that is written for the line, its folder follows from it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from series.folder import Line, SeriesError, git, git_apply, read, write
from series.trial import PLAIN, contents, format_series, try_series

OVERLAYS = "overlays"
"""The folder beside those of the lines that has the overlays."""
Series = dict[str, str]
"""The texts of a line's patches by their names."""


def overlay_of(line: Line) -> Path:
    """Return the file that has a line's overlay; the stack has none."""
    return line.folder.parent / OVERLAYS / f"{line.folder.name}.diff"


def all_series(lines: list[Line]) -> Iterator[tuple[Line, Series | SeriesError]]:
    """Yield each line with its series, as the stack and the overlays make it: from the stack to the oldest line.

    Where an overlay does not apply, its error comes in place of the series of its line, and of all older ones.
    """
    series: Series | SeriesError = {}
    for line in reversed(lines):
        if line == lines[-1]:
            series = contents(line.patches)
        elif not isinstance(series, SeriesError):
            try:
                series = overlaid(series, read(overlay_of(line)))
            except SeriesError as error:
                series = SeriesError(f"{OVERLAYS}/{overlay_of(line).name} does not apply: {error}")
        yield line, series


def overlaid(newer: Series, overlay: str) -> Series:
    """Return the series that an overlay makes of that of the next newer line."""
    with tempfile.TemporaryDirectory() as folder:
        write_series(Path(folder), newer)
        if overlay:
            git_apply(Path(folder), overlay)
        return contents(list(Path(folder).iterdir()))


def difference(newer: Series, older: Series) -> str:
    """Return the overlay that makes one series of another."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        git(root, "init", "--quiet", "--template=", **PLAIN)
        for series in (newer, older):
            git(root, "rm", "-r", "--quiet", "--ignore-unmatch", ".", **PLAIN)
            write_series(root, series)
            git(root, "add", "--all", "--force", **PLAIN)
            git(root, "commit", "--quiet", "--allow-empty", "--message", "series", **PLAIN)
        copies = ("--find-renames=20", "--find-copies=20", "--find-copies-harder")
        return git(root, "diff", "--no-color", "--minimal", "--unified=1", *copies, "HEAD~", "HEAD", **PLAIN)


def write_line(lines: list[Line], line: Line, series: Series) -> None:
    """Write a line's folder and its overlay."""
    write_series(line.folder, series)
    write_overlay(lines, line)


def write_overlay(lines: list[Line], line: Line) -> None:
    """Write the overlay that makes a line's folder of that of the next newer line, if there is one."""
    at = lines.index(line)
    for newer in lines[at + 1 : at + 2]:
        file = overlay_of(line)
        file.parent.mkdir(exist_ok=True)
        text = difference(contents(newer.patches), contents(line.patches))
        write(file, text)


def renew(lines: list[Line], line: Line, repo: Path) -> str:
    """Make a line's folder anew after a change of the next newer line, as git exports it; returns the line's name."""
    newer = contents(lines[lines.index(line) + 1].patches)
    try:
        series = exported(line, overlaid(newer, read(overlay_of(line))), repo)
    except SeriesError as error:
        raise SeriesError(
            f"{line.place} cannot follow the change: {error}; make it in a checkout of {line.made_on} with git am"
            f" {line.folder}/*.patch, and record that with --line {line.folder.name}"
        ) from None
    write_line(lines, line, series)
    return line.folder.name


def exported(line: Line, series: Series, repo: Path) -> Series:
    """Return a series as git exports it from the release that its line was made on."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "series")
        write_series(folder, series)
        trial = try_series(repo, line.made_on, sorted(folder.iterdir()), Path(scratch, "trial"))
        if trial.failed:
            raise SeriesError(trial.failed)
        return contents(format_series(trial.root, trial.base, "HEAD", Path(scratch, "exported")))


def write_series(folder: Path, series: Series) -> None:
    """Write patches into a folder; those that it has are replaced or removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in series.items():
        write(folder / name, text)
    for file in folder.glob("*.patch"):
        if file.name not in series:
            file.unlink()

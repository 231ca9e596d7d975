"""Tables in Markdown, and the blocks of pages in `docs/` that nox sessions generate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def code() -> str:
    """Return the last commit that changed `src/`, with a "+" if it has changed since: what a table is about.

    Not `tested.py`: the matrix writes it when a release is added, and it decides nothing.
    """
    log, status = (("log", "-1", "--format=%h"), ("status", "--porcelain"))
    paths = ("src", ":(exclude)src/ds_frozen_patch/patching/tested.py")
    commit, changes = (
        subprocess.run(["git", *command, "--", *paths], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        for command in (log, status)
    )
    return commit.strip() + ("+" if changes else "")


@dataclass(frozen=True)
class Block:
    """A part of a page between two comments; the session of its name writes it."""

    session: str
    page: Path

    def read(self) -> str:
        """Return what the page has there, without the empty lines around it."""
        return self._parts()[1].strip()

    def write(self, text: str) -> None:
        """Replace what the page has there."""
        before, _, after = self._parts()
        self.page.write_text(f"{before}\n{text.strip()}\n\n{after}", encoding="utf-8")

    def link(self, place: Path) -> str:
        """Return the relative path of a file, as a link of the page has it."""
        return os.path.relpath(place, self.page.parent)

    def _parts(self) -> tuple[str, str, str]:
        begin = f"<!-- {self.session}: nox -f ci/noxfile.py -s {self.session} -->\n"
        end = f"<!-- end of {self.session} -->\n"
        text = self.page.read_text(encoding="utf-8")
        if not text.partition(begin)[2].partition(end)[1]:
            sys.exit(f"{self.page} has no block from {begin.strip()} to {end.strip()}: put both lines back")
        before, _, rest = text.partition(begin)
        inside, _, after = rest.partition(end)
        return before + begin, inside, end + after


# All that is written into pages: by the session of each name, or by `docs`.
README = Block("docs", ROOT / "README.md")
UPSTREAM = Block("docs", DOCS / "reference" / "upstream.md")
SETTINGS = Block("docs", DOCS / "reference" / "python.md")
COMMANDS = Block("docs", DOCS / "reference" / "command-line.md")
BENCHMARKS_PAGE = DOCS / "explanation" / "benchmarks.md"
BENCHMARKS = Block("bench", ROOT / "ci" / "measure" / "bench" / "tables.md")
COMPARISON = Block("compare", ROOT / "ci" / "measure" / "compare" / "tables.md")
PAIRS = Block("pairs", ROOT / "ci" / "measure" / "pairs.md")
COMPATIBILITY = Block("table", DOCS / "reference" / "compatibility.md")
RESULTS = {
    "settings": Block("settings", COMPATIBILITY.page),
    "quantized": Block("quantized", ROOT / "ci" / "matrix" / "quantized.md"),
    "faults": Block("faults", DOCS / "explanation" / "faults.md"),
    "scale": Block("scale", ROOT / "ci" / "matrix" / "scale.md"),
}
CHARTS = DOCS / "charts"
README_PICTURE = ROOT / "ci" / "measure" / "bench" / "checkpoint.svg"


class Notes(list[str]):
    """The notes below a table, which its cells refer to by number."""

    def marked(self, *notes: str) -> str:
        """Return what stands behind a text to refer to these notes, which are added if they are new; none is empty."""
        self += dict.fromkeys(note for note in notes if note and note not in self)
        return "".join(f" [{self.index(note) + 1}]" for note in notes if note)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table, with numbered notes below it if there are any."""
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def ranges(numbers: Iterable[int]) -> str:
    """Return [1, 2, 3, 5] as "1-3, 5"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def cases(suite: ElementTree.Element) -> Iterator[tuple[list[tuple[str, str]], str]]:
    """Yield the properties of each test in pytest's JUnit file, and why it was skipped; exits if a test failed."""
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('name')} failed, so there is no table")
        skipped = case.find("skipped")
        properties = [(item.get("name", ""), item.get("value", "")) for item in case.iter("property")]
        yield properties, "" if skipped is None else skipped.get("message", "")

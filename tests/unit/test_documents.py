"""Links between the documents resolve, and what they list is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import readme
import reference
from tables import COMMANDS, README, SETTINGS

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ci/**/*.md"), ROOT / "patches" / "README.md"]
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def without_blocks(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for place, anchor in LINK.findall(re.sub(r"`[^`\n]*`", "", without_blocks(page))):
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


def test_there_are_links() -> None:
    assert sum(len(LINK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 20


def test_the_reference_is_that_of_the_sources() -> None:
    for block, text in ((SETTINGS, reference.settings()), (COMMANDS, reference.commands())):
        assert block.read() == text.strip(), "write it again: nox -f ci/noxfile.py -s docs"


def test_the_readme_shows_the_results() -> None:
    assert README.read() == readme.text().strip(), "write it again: nox -f ci/noxfile.py -s docs"


def test_nothing_names_a_package_of_an_index() -> None:
    """There is none yet; a stranger's could be there one day."""
    texts = [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("ci/**/*.py")]
    named = re.compile(r"(pip install|uvx|uv add|uv tool install)[^\n`]*\bds[_-]frozen[_-]patch")
    assert [file for file in texts if named.search(file.read_text(encoding="utf-8"))] == []


def test_the_documents_stay_short() -> None:
    pages = [page for page in ROOT.glob("docs/**/*.md") if "```{include} ../" not in page.read_text(encoding="utf-8")]
    assert len(pages) <= 22
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (*pages, ROOT / "README.md")) <= 25_000
    assert (ROOT / "README.md").stat().st_size <= 9_000
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 8_000

"""Links between the documents resolve, and what they list is complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import readme
from tables import README

import ds_frozen_patch

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "patches" / "README.md"])
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


def test_every_option_of_patch_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)=", (ROOT / "docs" / "usage.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(inspect.signature(ds_frozen_patch.patch).parameters)


def test_the_readme_shows_the_results() -> None:
    assert README.read() == readme.text().strip(), "write it again: nox -f ci/noxfile.py -s docs"

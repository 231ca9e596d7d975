"""Settings of Sphinx for the documentation: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path
from typing import Any

_METADATA = ConfigParser()
_METADATA.read(Path(__file__).parent.parent / "setup.cfg")
_OUTSIDE = {"SECURITY.md": "security.md", "patches/README.md": "patches.md"}

project = "ds_frozen_patch"
version = release = _METADATA["metadata"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"ds_frozen_patch {version}"
html_copy_source = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(collections\.abc|pathlib|torch)\..*|Path")]  # of other packages


def _lead_to_pages(text: str) -> str:
    """Documents outside of `docs/` have a page that includes them; GitHub needs links to the documents themselves."""
    for document, page in _OUTSIDE.items():
        text = text.replace(f"](../{document}", f"]({page}").replace(f"]({document}", f"](docs/{page}")
    return text


def _read_page(app: Any, name: str, source: list[str]) -> None:
    source[0] = _lead_to_pages(source[0])


def _read_included(app: Any, path: Path, parent: str, source: list[str]) -> None:
    source[0] = _lead_to_pages(source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)

"""Settings of Sphinx for the documentation: `nox -f ci/noxfile.py -s docs`."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path
from typing import Any

_METADATA = ConfigParser()
_METADATA.read(Path(__file__).parent.parent / "setup.cfg")
_OUTSIDE = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "patches/README.md": "patches.md"}

project = "ds_frozen_patch"
version = release = _METADATA["metadata"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"ds_frozen_patch {version}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"
smartquotes_action = "qe"  # no dashes: an option begins with two hyphens
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(collections\.abc|pathlib|torch)\..*|Path")]  # of other packages


def _link_to_pages(*arguments: Any) -> None:
    """Link to the page that includes a document outside of `docs/`; on GitHub, links lead to the document itself."""
    source: list[str] = arguments[-1]
    for document, page in _OUTSIDE.items():
        source[0] = source[0].replace(f"](../../{document}", f"](../{page}").replace(f"]({document}", f"](docs/{page}")
    source[0] = source[0].replace("](../../ci/", "](path:../../ci/")  # to a file, also if it is Markdown


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_to_pages)
    app.connect("include-read", _link_to_pages)

"""What the package says of its releases elsewhere, written from `matrix.json`: ranges, classifiers, what was tested.

`nox -s lock`, `-s propose` and `-s table` write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from matrix import cells
from packaging.version import Version
from tables import ROOT

SETUP = ROOT / "setup.cfg"
PROBE = ROOT / "src" / "ds_frozen_patch" / "patching" / "tested.py"
MALICIOUS = {"lightning": ",!=2.6.2,!=2.6.3"}


def texts() -> dict[Path, str]:
    """Return the text that each file must have, as far as the matrix decides it; the rest is as it is."""
    served = [cell for cell in cells.read().values() if not cell.refused]
    pythons = sorted({cell.python for cell in served}, key=Version)
    setup = SETUP.read_text(encoding="utf-8")
    classifiers = "".join(f"    Programming Language :: Python :: {python}\n" for python in pythons)
    setup = re.sub(r"(    Programming Language :: Python :: 3\.\d+\n)+", classifiers, setup)
    setup = re.sub(r"(?m)^python_requires = .*$", f"python_requires = >={pythons[0]}", setup)
    newest = {}
    own, *of_tests = setup.partition("\ntest =\n")  # what the tests need is not what the package needs
    for package in ("lightning", "deepspeed", "torch", "wrapt", *cells.OWNERS):
        releases = sorted(released(package, served))
        oldest, newest[package] = releases[0], releases[-1]
        # wrapt has semantic versions. The others have no limit: `patch()` says what is newer than all that was tested.
        limit = f",<{newest[package].major + 1}" if package == "wrapt" else MALICIOUS.get(package, "")
        own = re.sub(rf"(?m)^    {package}>=.*$", f"    {package}>={oldest}{limit}", own)
    setup = own + "".join(of_tests)
    tested = {package: str(newest[package]) for package in ("lightning", "deepspeed", *cells.OWNERS)}
    probe = re.sub(r"(?m)^TESTED = .*$", f"TESTED = {json.dumps(tested)}", PROBE.read_text(encoding="utf-8"))
    return {SETUP: setup, PROBE: probe}


def released(package: str, served: Iterable[cells.Cell]) -> list[Version]:
    """Return the releases of a package in these cells, whether the matrix names them or their locks."""
    named = package not in cells.OWNERS
    releases = [getattr(cell, package).split()[-1] if named else cell.locked(package) for cell in served]
    return [Version(release) for release in releases if release]  # a new cell has no lock yet


def write() -> list[Path]:
    """Write the files that say something else; returns them."""
    stale = {file: text for file, text in texts().items() if file.read_text(encoding="utf-8") != text}
    for file, text in stale.items():
        file.write_text(text, encoding="utf-8")
    return list(stale)

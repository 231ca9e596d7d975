"""Upstream's own tests, before and after our patch series: `python -m series.upstream_tests CLONE TAG`.

It takes a release out of a clone of Lightning's or DeepSpeed's repository, and runs the tests in the environment of
this Python: Lightning's of DeepSpeed, and those of DeepSpeed's checkpoints that are fast on CPU ranks. It fails if a
test that passed does so no longer, if a new test fails, or if all variants of a new test are skipped.

Most of Lightning's need a GPU and skip: GPUs are hidden, to have the same everywhere. FutureWarnings, which are errors
in its tests, are none here: they are of packages newer than the release. This module is a plugin of that pytest too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from series.folder import (
    CODE,
    PATCHES,
    SeriesError,
    am,
    lay_out,
    line_for,
    lines,
    make_on_base,
    patches_of,
    repository_of,
    touched,
    version,
)

if TYPE_CHECKING:
    import pytest

Outcomes = dict[str, str]
"""By a test's name: "passed", "skipped", "failure" or "error"."""
KEPT = (*CODE, "pyproject.toml", "version.txt", "bin")
FAST = ("convert_checkpoint", "latest_checkpoint", "shared_weights", "sparse", "tag_validation")
SUITES = {  # patterns for the files of tests that are run together
    "Lightning": [[f"tests/{part}/**/test_deepspeed*.py"] for part in ("tests_pytorch", "tests_fabric")],
    "DeepSpeed": [[f"tests/unit/checkpoint/test_{name}.py" for name in FAST]],
}


def main(clone: Path, tag: str) -> None:
    """Run the tests on a release as it is, and then with the series that is for it; a commit gets the newest line."""
    repository = repository_of(PATCHES, clone, tag)
    line = line_for(repository.folder, tag) if version(tag) else lines(repository.folder)[-1]
    patches = patches_of(line)
    suites = SUITES[repository.name]
    with tempfile.TemporaryDirectory() as scratch:
        root, made = Path(scratch).resolve() / "root", Path(scratch, "made")
        lay_out(clone, tag, [*KEPT, *touched(patches)], root, *([made] if make_on_base(clone, line, made) else []))
        before = run_tests(root, suites)
        am(root, patches)
        added = [path for path in touched(patches) if Path(path).match("tests/unit/*/test_*.py")]
        after = run_tests(root, [*suites, added] if added else suites)
    for when, outcomes in (("before", before), ("after", after)):
        print(f"{tag}, {when}: {', '.join(f'{n} {what}' for what, n in sorted(Counter(outcomes.values()).items()))}")
    if wrong := compare(before, after):
        raise SeriesError("\n".join(f"{tag}: {item}" for item in wrong))


def run_tests(root: Path, suites: list[list[str]]) -> Outcomes:
    """Run suites of tests in a laid-out release; what pytest says goes to stderr."""
    found: Outcomes = {}
    for patterns in suites:
        code = (root / "src", root / "tests", root, PATCHES)
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, code)), "UPSTREAM_ROOT": str(root)}
        if (root / "deepspeed").is_dir():
            own |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}  # it runs tests on so many ranks
            shutil.copy(root / "version.txt", root / "tests")  # where it reads its own version
        files = [str(file) for pattern in patterns for file in sorted(root.glob(pattern))]
        plugin = ("-p", "series.upstream_tests", "-W", "ignore::FutureWarning", f"--junitxml={root / 'outcomes.xml'}")
        command = [sys.executable, "-m", "pytest", "-q", *plugin, "--timeout=600", *files]
        done = subprocess.run(command, cwd=root / "tests", env=os.environ | own, stdout=sys.stderr, check=False)
        if done.returncode not in (0, 1):
            raise SeriesError(f"pytest did not get through {', '.join(patterns)}: it ended with {done.returncode}")
        for case in ElementTree.parse(root / "outcomes.xml").iter("testcase"):
            kinds = {part.tag for part in case} & {"skipped", "failure", "error"}
            found[f"{case.get('classname')}::{case.get('name')}"] = min(kinds, default="passed")
    return found


def compare(before: Outcomes, after: Outcomes) -> list[str]:
    """Return what is wrong with the outcomes of one release."""
    lost = [test for test in before if before[test] == "passed" != after.get(test)]
    wrong = [f"{test} passed before, now: {after.get(test, 'it is gone')}" for test in lost]
    new = {test: outcome for test, outcome in after.items() if test not in before}
    wrong += [f"{test} is new and failed" for test, outcome in new.items() if outcome in ("failure", "error")]
    idle = {test.partition("[")[0] for test in new}
    idle -= {test.partition("[")[0] for test, outcome in new.items() if outcome != "skipped"}
    return wrong + [f"{name} is new and skipped in all of its variants" for name in sorted(idle)]


def pytest_load_initial_conftests() -> None:
    """Spare Lightning 2.0 its apps, which it always imports, with all that they need."""
    spec = find_spec("lightning")
    if spec and spec.origin and "\nimport lightning.app" in Path(spec.origin).read_text():
        sys.modules["lightning"] = package = module_from_spec(spec)
        package.__dict__["__version__"] = import_module("lightning.__version__").version


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check which code is imported, and run tests that require DeepSpeed and nothing else.

    Lightning 2.4 and 2.5 skip them on torch 2.4 and newer.
    """
    root = Path(os.environ["UPSTREAM_ROOT"])
    package = import_module("lightning.fabric" if (root / "src").is_dir() else "deepspeed").__path__[0]
    assert Path(package).is_relative_to(root), f"{package} is not what is to be tested"
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != "Requires: [Deepspeed]"]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except SeriesError as error:
        sys.exit(str(error))

"""Upstream's own tests, before and after our patch series: `python -m series.upstream_tests CLONE TAG`.

It takes a release out of a clone of Lightning's or DeepSpeed's repository, and runs the tests in the environment of
this Python: Lightning's of DeepSpeed, and those of DeepSpeed's checkpoints that are fast on CPU ranks. It fails if a
test that passed does so no longer, if a new test fails, or if all variants of a new test are skipped.

Most of Lightning's need a GPU and skip: GPUs are hidden, to have the same everywhere. FutureWarnings, which are errors
in its tests, are none here: they are of packages newer than the release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
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
        code = (root / "src", root / "tests", root, Path(__file__).resolve().parent)
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, code)), "UPSTREAM_ROOT": str(root)}
        if (root / "deepspeed").is_dir():
            own |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}  # it runs tests on so many ranks
            shutil.copy(root / "version.txt", root / "tests")  # where it reads its own version
        files = [str(file) for pattern in patterns for file in sorted(root.glob(pattern))]
        plugin = ("-p", "upstream_plugin", "-W", "ignore::FutureWarning", f"--junitxml={root / 'outcomes.xml'}")
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
    variants: dict[str, set[str]] = {}
    for test in after.keys() - before.keys():
        variants.setdefault(test.partition("[")[0], set()).add(after[test])
    wrong += [f"{name} is new and failed" for name, found in variants.items() if found & {"failure", "error"}]
    wrong += [
        f"{name} is new and skipped in all of its variants" for name, found in variants.items() if found == {"skipped"}
    ]
    return wrong


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except SeriesError as error:
        sys.exit(str(error))

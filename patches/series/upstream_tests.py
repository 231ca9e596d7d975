"""Upstream's own tests, before and after our patch series: `python -m series.upstream_tests CLONE TAG`.

It takes a release out of a clone of Lightning's or DeepSpeed's repository, and runs the tests in the environment of
this Python: Lightning's of DeepSpeed, and those of DeepSpeed's checkpoints that are fast on CPU ranks. It fails if a
test that passed does so no longer, if a new test fails, or if all variants of a new test are skipped.

Most of Lightning's need a GPU and skip: GPUs are hidden, to have the same everywhere. FutureWarnings, which are errors
in its tests, are none here: they are of packages newer than the release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version as installed
from pathlib import Path

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

Outcomes = dict[str, tuple[str, str]]
Suite = list[str]
"""Patterns for the files of tests that are run together."""
KEPT = (*CODE, "pyproject.toml", "version.txt", "bin")
LIGHTNING_SUITES: list[Suite] = [[f"tests/{part}/**/test_deepspeed*.py"] for part in ("tests_pytorch", "tests_fabric")]
FAST = ("convert_checkpoint", "latest_checkpoint", "shared_weights", "sparse", "tag_validation")
DEEPSPEED_SUITES: list[Suite] = [[f"tests/unit/checkpoint/test_{name}.py" for name in FAST]]


def main(clone: Path, tag: str) -> None:
    """Run the tests on a release as it is, and then with the series that is for it; print both.

    A commit gets the newest line.
    """
    repository = repository_of(PATCHES, clone, tag)
    line = line_for(repository.folder, tag) if version(tag) else lines(repository.folder)[-1]
    patches = patches_of(line)
    suites = DEEPSPEED_SUITES if repository.name == "DeepSpeed" else LIGHTNING_SUITES
    with tempfile.TemporaryDirectory() as scratch:
        root, made = Path(scratch).resolve() / "root", Path(scratch, "made")
        lay_out(clone, tag, [*KEPT, *touched(patches)], root, *([made] if make_on_base(clone, line, made) else []))
        before = run_tests(root, suites)
        am(root, patches)
        added = [path for path in touched(patches) if Path(path).match("tests/unit/*/test_*.py")]
        after = run_tests(root, [*suites, added] if added else suites)
    known, wrong = compare(before, after)
    environment = [Path(sys.prefix).name, *(f"{name} {installed(name)}" for name in ("deepspeed", "torch"))]
    print("\n- ".join([f"\n{tag}, {', '.join(environment)}:\n", *known]))
    if wrong:
        raise SeriesError("\n".join(f"{tag}: {item}" for item in wrong))


def run_tests(root: Path, suites: list[Suite]) -> Outcomes:
    """Run suites of tests in a laid-out release; what pytest says goes to stderr."""
    found: Outcomes = {}
    for patterns in suites:
        code = (root / "src", root / "tests", root, Path(__file__).resolve().parent)
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, code))}
        own |= {"UPSTREAM_OUTCOMES": str(root / "outcomes.json")}
        if (root / "deepspeed").is_dir():
            own |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}  # it runs tests on so many ranks
            shutil.copy(root / "version.txt", root / "tests")  # where it reads its own version
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-W", "ignore::FutureWarning"]
        files = [str(file) for pattern in patterns for file in sorted(root.glob(pattern))]
        done = subprocess.run(
            [*command, "--timeout=600", *files],
            cwd=root / "tests",
            env=os.environ | own,
            stdout=sys.stderr,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise SeriesError(f"pytest did not get through {', '.join(patterns)}: it ended with {done.returncode}")
        found |= json.loads((root / "outcomes.json").read_text())
    return found


def compare(before: Outcomes, after: Outcomes) -> tuple[list[str], list[str]]:
    """Return the outcomes of one release, and what is wrong with them."""
    new = {test: outcome for test, outcome in after.items() if test not in before}
    known = []
    for when, tests in (("before", before), ("after", after), ("new", new)):
        count = Counter(outcome for outcome, _ in tests.values())
        known.append(f"{when}: {count['passed']} passed, {count['skipped']} skipped, {count['failed']} failed")
    lost = [test for test in before if before[test][0] == "passed" and after.get(test, ("gone", ""))[0] != "passed"]
    wrong = [f"{test} passed before, now {': '.join(after.get(test, ['it is gone']))}" for test in lost]
    wrong += [f"{test} is new and failed: {why}" for test, (outcome, why) in new.items() if outcome == "failed"]
    variants: dict[str, Counter[tuple[str, str]]] = {}
    for test, (outcome, why) in new.items():
        variants.setdefault(test.partition("[")[0], Counter())[outcome, why] += 1
    for name, found in variants.items():
        words = [f"{count} {outcome}" + (f" ({why})" if why else "") for (outcome, why), count in found.items()]
        known.append(f"new: `{name}`: {', '.join(words)}")
        if {outcome for outcome, _ in found} == {"skipped"}:
            wrong.append(f"{name} is new and skipped in all of its variants: {', '.join(words)}")
    known += [f"failed before: `{test}`: {why}" for test, (outcome, why) in before.items() if outcome == "failed"]
    return known, wrong


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except SeriesError as error:
        sys.exit(str(error))

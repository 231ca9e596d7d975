"""Lightning's own tests of DeepSpeed, before and after our patch series.

`python -m series.upstream_tests run CLONE TAG FOLDER` runs them on a release out of a clone of Lightning's repository,
in the environment of this Python, and keeps what became of them in FOLDER. `... table FOLDER` compares all that is kept
there. It fails if a test that passed does so no longer, if a new test fails, or if all variants of one are skipped.

Most of them need a GPU and skip: GPUs are hidden, to have the same everywhere. FutureWarnings, which are errors in
Lightning's tests, are none here: they are of packages newer than the release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from series.folder import PATCHES, SeriesError, git, read_index, touched
from series.trial import PLAIN, lay_out
from tables import markdown

HEADER = ("tag", "environment", "before: passed / skipped / failed", "after", "new", "regressions")
Outcomes = dict[str, tuple[str, str]]


def run(clone: Path, tag: str, folder: Path) -> None:
    """Run the tests on a release as it is, and then with the series that the index names for it."""
    patches = next((line.patches for line in read_index(PATCHES) if tag in line.tags), [])
    if not patches:
        raise SeriesError(f"there are no patches for {tag}; name a release of patches/index.json")
    cell = [Path(sys.prefix).name, *(f"{name} {version(name)}" for name in ("deepspeed", "torch"))]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch).resolve()
        lay_out(clone, tag, ["src", "tests", "pyproject.toml", *touched(patches)], root)
        before = run_tests(root)
        git(root, "am", "--quiet", *map(str, patches), **PLAIN)
        after = run_tests(root)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"tag": tag, "environment": ", ".join(cell), "before": before, "after": after}
    (folder / f"{tag}.json").write_text(json.dumps(kept, indent=1))


def run_tests(root: Path) -> Outcomes:
    """Run Lightning's tests of DeepSpeed in a laid-out release; what pytest says goes to stderr."""
    found: Outcomes = {}
    for part in ("tests_pytorch", "tests_fabric"):
        paths = os.pathsep.join(map(str, (root / "src", root / "tests", Path(__file__).resolve().parent)))
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, "UPSTREAM_OUTCOMES": str(root / "outcomes.json")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_plugin", "-W", "ignore::FutureWarning"]
        command += ["--timeout=600", *map(str, sorted((root / "tests" / part).rglob("test_deepspeed*.py")))]
        done = subprocess.run(command, cwd=root / "tests", env=os.environ | own, stdout=sys.stderr, check=False)
        if done.returncode not in (0, 1):
            raise SeriesError(f"pytest did not get through {part}, as it says above: it ended with {done.returncode}")
        found |= json.loads((root / "outcomes.json").read_text())
    return found


def compare(before: Outcomes, after: Outcomes) -> tuple[list[str], list[str], list[str]]:
    """Return the numbers of one release for the table, what is to be known of single tests, and what is wrong."""
    new = {test: outcome for test, outcome in after.items() if test not in before}
    lost = [test for test in before if before[test][0] == "passed" and after.get(test, ("gone", ""))[0] != "passed"]
    wrong = [f"{test} passed before, now {': '.join(after.get(test, ['it is gone']))}" for test in lost]
    wrong += [f"{test} is new and failed: {why}" for test, (outcome, why) in new.items() if outcome == "failed"]
    variants: dict[str, Counter[tuple[str, str]]] = {}
    for test, (outcome, why) in new.items():
        variants.setdefault(test.partition("[")[0], Counter())[outcome, why] += 1
    known = []
    for name, found in variants.items():
        words = [f"{count} {outcome}" + (f" ({why})" if why else "") for (outcome, why), count in found.items()]
        known.append(f"new: `{name}`: {', '.join(words)}")
        if {outcome for outcome, _ in found} == {"skipped"}:
            wrong.append(f"{name} is new and skipped in all of its variants: {', '.join(words)}")
    known += [f"failed before: `{test}`: {why}" for test, (outcome, why) in before.items() if outcome == "failed"]
    counts = [Counter(outcome for outcome, _ in tests.values()) for tests in (before, after, new)]
    numbers = [" / ".join(str(count[outcome]) for outcome in ("passed", "skipped", "failed")) for count in counts]
    return [*numbers, str(len(lost))], known, wrong


def table(folder: Path) -> None:
    """Print the table in Markdown and what is to be known of single tests; exits with what is wrong."""
    kept: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    if not kept:
        sys.exit(f"{folder} holds no outcomes; make some with `run`")
    found = {release["tag"]: compare(release["before"], release["after"]) for release in kept}
    # The tag can be a commit.
    rows = [[release["tag"][:12], release["environment"], *found[release["tag"]][0]] for release in kept]
    print(markdown(HEADER, rows), end="")
    for tag, (_, known, _) in found.items():
        print("\n".join([f"\n{tag}:\n", *(f"- {item}" for item in known)]))
    if wrong := [f"{tag}: {item}" for tag, (_, _, items) in found.items() for item in items]:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["table"] and len(sys.argv) == 3:
            table(Path(sys.argv[2]))
        elif sys.argv[1:2] == ["run"] and len(sys.argv) == 5:
            run(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
        else:
            sys.exit(__doc__)
    except SeriesError as error:
        sys.exit(str(error))

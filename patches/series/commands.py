"""The patch series for the repositories of Lightning and DeepSpeed, in `patches/`: `python patches --help`.

For who keeps a fork: `apply` and `remove`. For who keeps the series: `check`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version
from series.folder import (
    PATCHES,
    ROOT,
    Repository,
    SeriesError,
    am,
    apply_to_package,
    git,
    lay_out,
    line_for,
    lines,
    make_on_base,
    patches_of,
    read,
    repository_of,
    subject,
    touched,
    version,
)

COMMAND = "python patches"
MALICIOUS = ("2.6.2", "2.6.3")  # uploads to the package index, which are to be installed nowhere
WHEELS = ("lightning", "pytorch_lightning")
Row = tuple[str, str, str]  # a release, the name of its line, and what is wrong or ""


def apply(patches: Path, checkout: Path, name: str | None = None) -> str:
    """Commit the series for a checkout's release on top of it, completely or not at all; returns what was done."""
    root = clean_checkout(checkout)
    repository = repository_of(patches, root)
    line = line_for(repository.folder, name or release_of(repository, root))
    if there := commits_of(repository, root):
        raise SeriesError(
            f"{root} has {len(there)} patches of the series as commits ({'; '.join(there)}); take them off first:"
            f" {COMMAND} remove {root}"
        )
    with tempfile.TemporaryDirectory() as folder:
        if made := make_on_base(root, line, Path(folder)):
            git(root, "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", folder, "HEAD")
    try:
        am(root, patches_of(line))
    except SeriesError as error:
        advice = "" if made else "run git fetch --tags in it, which git needs to merge"
        by_hand = f"cd {root}, git am --3way {line}/*.patch, resolve each conflict, git add, git am --continue"
        raise SeriesError(
            f"the patches of {line} do not apply to {root}, nothing was changed: {error}; {advice or by_hand}"
        ) from None
    return f"applied the patches of {line} to {root}; {COMMAND} remove {root} takes them off again"


def remove(patches: Path, checkout: Path) -> str:
    """Take a series off a checkout by commits that undo it, completely or not at all; returns what was done."""
    root = clean_checkout(checkout)
    there = list(commits_of(repository_of(patches, root), root).values())
    if not there:
        raise SeriesError(f"{root} has no commits of the series; there is nothing to do")
    try:
        git(root, "revert", "--no-edit", *there)
    except SeriesError as error:
        if (root / git(root, "rev-parse", "--git-path", "REVERT_HEAD").strip()).exists():
            git(root, "revert", "--abort")
        by_hand = f"cd {root}, git revert {' '.join(commit[:10] for commit in there)}"
        raise SeriesError(f"nothing was changed: {error}; by hand: {by_hand}") from None
    return f"reverted {len(there)} patches in {root}"


def clean_checkout(checkout: Path) -> Path:
    """Return the root of a checkout without unfinished work; SeriesError if it is none."""
    try:
        root = Path(git(checkout, "rev-parse", "--show-toplevel").strip())
    except SeriesError:
        raise SeriesError(f"{checkout} is no git checkout; name a clone of Lightning's or DeepSpeed's") from None
    for started in ("rebase-apply", "rebase-merge", "CHERRY_PICK_HEAD", "REVERT_HEAD", "MERGE_HEAD"):
        if (root / git(root, "rev-parse", "--git-path", started).strip()).exists():
            raise SeriesError(f"a git am, merge, rebase or revert is under way in {root}; finish or abort it first")
    if git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules").strip():
        raise SeriesError(f"{root} has uncommitted changes; commit or stash them first")
    return root


def release_of(repository: Repository, root: Path) -> str:
    """Return the release that a checkout says it is."""
    return git(root, "show", f"HEAD:{repository.version}").strip()


def commits_of(repository: Repository, root: Path) -> dict[str, str]:
    """Return the commits of any series that a checkout has and has not reverted, by subject, from new to old."""
    own = {subject(read(patch)) for line in lines(repository.folder) for patch in patches_of(line)}
    newest: dict[str, str] = {}  # the last word on each patch: its commit, or ""
    for entry in git(root, "log", "--topo-order", "--format=%H %s", "HEAD").splitlines():
        commit, _, title = entry.partition(" ")
        reverted = False
        while match := re.fullmatch(r'(Revert|Reapply) "(.*)"', title):
            reverted ^= match[1] == "Revert"
            title = match[2]
        if title in own:
            newest.setdefault(title, "" if reverted else commit)
    return {title: commit for title, commit in newest.items() if commit}


def check(patches: Path, clone: Path | None) -> str:
    """Apply every line to all of its releases: the tags of a clone, or else Lightning's wheels."""
    rows = _of_clone(repository_of(patches, clone), clone) if clone else _of_wheels(patches)
    failed = []
    for release, line, problem in rows:
        print(f"{release}, patches {line}: {problem or 'ok'}", flush=True)
        failed += [release] if problem else []
    if failed:
        raise SeriesError(f"the patches are not for {', '.join(failed)}")
    return "the patches apply to all of them"


def _of_clone(repository: Repository, clone: Path) -> Iterator[Row]:
    """Commit each line's patches on each of its releases that a clone has, and the newest on its HEAD."""
    refs = [(tag, line_for(repository.folder, tag)) for tag in _releases(git(clone, "tag").split(), repository.folder)]
    *_, newest = lines(repository.folder)
    if version(newest.name):  # no line is for a branch
        newest = line_for(repository.folder, release_of(repository, clone))
    for ref, line in [*refs, ("HEAD", newest)]:
        with tempfile.TemporaryDirectory() as folder:
            made, root, paths = Path(folder, "made"), Path(folder, "root"), touched(patches_of(line))
            try:
                lay_out(clone, ref, paths, root, *([made] if make_on_base(clone, line, made) else []))
                am(root, patches_of(line))
                problem = _broken(root, paths)
            except SeriesError as error:
                problem = str(error)
        yield ref, line.name, problem


def _of_wheels(patches: Path) -> Iterator[Row]:
    """Apply each line's patches to both packages of each of its releases on the package index."""
    tools = ROOT / ".nox" / "tools" / "bin" / "python"
    if not tools.exists():
        raise SeriesError(f"there is no {tools}; run nox -f ci/noxfile.py -s patches")
    listed = _run(str(tools), "-m", "pip", "index", "versions", "lightning", "--disable-pip-version-check")
    names = re.search(r"(?m)^Available versions: (.*)$", listed)
    install = (str(tools), "-m", "uv", "--quiet", "pip", "install", "--python", sys.executable, "--no-deps")
    for release in _releases(names[1].split(", ") if names else [], patches):
        line, problems = line_for(patches, release), []
        with tempfile.TemporaryDirectory() as folder:
            wanted = [f"{package.replace('_', '-')}=={release}" for package in WHEELS]
            try:
                _run(*install, "--only-binary", ":all:", "--target", folder, *wanted)
                for package in WHEELS:
                    problems.append(_broken(Path(folder), apply_to_package(line, Path(folder), package)))
            except SeriesError as error:
                problems.append(str(error))
        yield release, line.name, "; ".join(filter(None, problems))


def _releases(names: list[str], folder: Path) -> list[str]:
    """Return the names that are final releases and have a line, from old to new."""
    oldest = Version(lines(folder)[0].name)
    known = [(parsed, name) for name in names if (parsed := version(name)) and parsed >= oldest]
    return [name for parsed, name in sorted(known) if not parsed.is_prerelease and name not in MALICIOUS]


def _broken(root: Path, paths: list[str]) -> str:
    """Return the Python files that do not compile, and why."""
    problems = []
    for path in paths:
        try:
            compile(read(root / path) if path.endswith(".py") else "", path, "exec", dont_inherit=True)
        except SyntaxError as error:
            problems.append(f"{path} does not compile: {error}")
    return "; ".join(problems)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SeriesError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout


def parser(patches: Path) -> argparse.ArgumentParser:
    """Return the command line; each command has what it does as `run`."""
    made = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    command = commands.add_parser("apply", help="commit the series for a checkout's release on top of it")
    command.add_argument("checkout", type=Path)
    command.add_argument("--line", metavar="FOLDER", help="the folder of patches; without it, that of its release")
    command.set_defaults(run=lambda given: apply(patches, given.checkout, given.line))
    command = commands.add_parser("remove", help="take it off again, by commits that undo it")
    command.add_argument("checkout", type=Path)
    command.set_defaults(run=lambda given: remove(patches, given.checkout))
    command = commands.add_parser("check", help="apply every line to all of its releases")
    command.add_argument("--repo", type=Path, metavar="CLONE", help="a clone; without it, Lightning's wheels are taken")
    command.set_defaults(run=lambda given: check(patches, given.repo))
    return made


def main(arguments: list[str] | None = None, patches: Path = PATCHES) -> None:
    """Run a command; exits with a sentence on what cannot be done."""
    given = parser(patches).parse_args(arguments)
    try:
        print(given.run(given))
    except SeriesError as error:
        sys.exit(str(error))

"""What becomes of each line's patches on each of its releases, in a clone or in Lightning's wheels."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from series.folder import (
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
    touched,
    version,
)

MALICIOUS = ("2.6.2", "2.6.3")  # uploads to the package index, which are to be installed nowhere
WHEELS = ("lightning", "pytorch_lightning")
Row = tuple[str, str, str]
"""A release, the name of its line, and what is wrong or ""."""


def of_clone(repository: Repository, clone: Path) -> Iterator[Row]:
    """Commit each line's patches on each of its releases that a clone has, and the newest on its HEAD."""
    refs = [(tag, line) for tag in _releases(git(clone, "tag").split()) if (line := _line(repository.folder, tag))]
    *_, newest = lines(repository.folder)
    if version(newest.name):  # no line is for a branch
        newest = line_for(repository.folder, git(clone, "show", f"HEAD:{repository.version}").strip())
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


def of_wheels(patches: Path) -> Iterator[Row]:
    """Apply each line's patches to both packages of each of its releases on the package index."""
    tools = ROOT / ".nox" / "tools" / "bin" / "python"
    if not tools.exists():
        raise SeriesError(f"there is no {tools}; run nox -f ci/noxfile.py -s patches")
    listed = _run(str(tools), "-m", "pip", "index", "versions", "lightning", "--disable-pip-version-check")
    names = re.search(r"(?m)^Available versions: (.*)$", listed)
    install = (str(tools), "-m", "uv", "--quiet", "pip", "install", "--python", sys.executable, "--no-deps")
    for release in _releases(names[1].split(", ") if names else []):
        if not (line := _line(patches, release)):
            continue
        problems = []
        with tempfile.TemporaryDirectory() as folder:
            wanted = [f"{package.replace('_', '-')}=={release}" for package in WHEELS]
            try:
                _run(*install, "--only-binary", ":all:", "--target", folder, *wanted)
                for package in WHEELS:
                    problems.append(_broken(Path(folder), apply_to_package(line, Path(folder), package)))
            except SeriesError as error:
                problems.append(str(error))
        yield release, line.name, "; ".join(filter(None, problems))


def _releases(names: list[str]) -> list[str]:
    """Return the names that are final releases, from old to new."""
    known = {name: parsed for name in names if (parsed := version(name)) and not parsed.is_prerelease}
    return sorted(known.keys() - set(MALICIOUS), key=lambda name: known[name])


def _line(folder: Path, release: str) -> Path | None:
    try:
        return line_for(folder, release)
    except SeriesError:
        return None  # it is older than the oldest line


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

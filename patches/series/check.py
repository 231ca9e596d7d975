"""The checks of `patches/`: the form of its files, and what becomes of each series on each release of its line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from series import stack
from series.folder import (
    OF_DEEPSPEED,
    ROOT,
    Line,
    Repository,
    SeriesError,
    already_applied,
    apply_to_package,
    diffs,
    for_package,
    git,
    read,
    read_index,
    repository_of,
    subject,
    texts,
)
from series.trial import Landing, contents, format_series, landing, syntax_error, try_series, unlike

TRAILER = re.compile(r"[A-Z][\w-]*: *\S.*")
OWN = ("series", "__pycache__", OF_DEEPSPEED, stack.OVERLAYS)  # what is no line's folder
WHEELS = ("lightning", "pytorch_lightning")
RECORD_ANEW = "record the series anew: python patches record"
# What a patch must match or must not, and what is wrong otherwise.
FORM = (
    (r"\AFrom 0{40} Mon Sep 17 00:00:00 2001\n", True, f"does not begin with a commit of zeros, {RECORD_ANEW}"),
    (r"(?m)^From: .", True, f"has no From: header, {RECORD_ANEW}"),
    (r"(?m)^Date: .", True, f"has no Date: header, {RECORD_ANEW}"),
    (r"(?m)^Subject: \[PATCH\] .", True, f"has no Subject: that begins with [PATCH], {RECORD_ANEW}"),
    (r"(?m)^-- $", False, f"has git's signature, {RECORD_ANEW}"),
    (r"(?m)^index (?![0-9a-f]{40}\.\.[0-9a-f]{40}( \d+)?$)", False, f"has a shortened index line, {RECORD_ANEW}"),
    (r"(?m)^(GIT binary patch|Binary files )", False, "changes a binary file, which a series must not"),
    (r"(?m)^diff --git ", True, "changes nothing, remove it"),
    (r"(?m)^diff --git a/tests/", True, "changes nothing in tests/, add a test to the commit"),
)


Checks = list[list[str] | None]
"""What is wrong, for each column of a table; None where it was not checked."""


@dataclass
class Report:
    """A table of what was checked, and what is wrong: `problems` are sentences that begin with what has them."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, place: tuple[str, ...], name: str, checks: Checks) -> None:
        """Add a row; what could not be checked any more is missing at the end of `checks`."""
        missing = len(self.header) - len(place) - len(checks)
        marks = ["-" if found is None else "no" if found else "yes" for found in [*checks, *[None] * missing]]
        self.rows.append((*place, *marks))
        self.problems += [f"{name}: {problem}" for found in checks for problem in found or ()]

    def __str__(self) -> str:
        """Return the table in Markdown."""
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.header, ["---"] * len(self.header), *self.rows))


def lint(patches: Path) -> list[str]:
    """Return what is wrong with the files in a folder with an index: "file: what, what to do"."""
    repository = repository_of(patches)
    try:
        lines = read_index(patches)
    except SeriesError as error:
        return [str(error)]
    problems = [f"index.json: {problem}" for problem in _index_problems(patches, lines)]
    for folder in sorted({line.folder for line in lines if line.folder.is_dir()}):
        files = sorted(folder.iterdir())
        if not files:
            problems.append(f"{folder.name}: has no patches, make them: python patches export")
        for number, file in enumerate(files, 1):
            problems += [
                f"{folder.name}/{file.name}: {problem}" for problem in _patch_problems(file, number, repository)
            ]
    return problems + [f"{line.folder.name}: {problem}" for line, problem in _not_made(lines)]


def _not_made(lines: list[Line]) -> Iterator[tuple[Line, str]]:
    """Yield the lines whose folders are not what the stack and the overlays make."""
    for line, series in stack.all_series(lines):
        if isinstance(series, SeriesError):
            yield line, f"cannot be made: {series}, record the line anew: python patches record"
        elif series != contents(line.patches):
            yield line, "is not what the stack and its overlay make, make it anew: python patches export"


def _index_problems(patches: Path, lines: list[Line]) -> Iterator[str]:
    folders = Counter(line.folder.name for line in lines)
    there = {folder.name for folder in patches.iterdir() if folder.is_dir() and folder.name not in OWN}
    yield from (
        f"has the folder {name} {count} times, remove all but one" for name, count in folders.items() if count > 1
    )
    yield from (f"has {name}, which is no folder, make or remove it" for name in folders if name not in there)
    yield from (
        f"does not list the folder {name}, add it or remove the folder" for name in sorted(there - folders.keys())
    )
    tags = Counter(tag for line in lines for tag in (*line.tags, *line.untagged))
    yield from (f"has {tag} {count} times, keep it in one line" for tag, count in tags.items() if count > 1)
    for line in lines:
        if line.made_on not in line.tags:
            yield f"says that {line.folder.name} was made on {line.made_on}, which is not one of its tags, name one"


def _patch_problems(file: Path, number: int, repository: Repository) -> Iterator[str]:
    if not re.fullmatch(r"\d{4}-.+\.patch", file.name):
        yield "is not a patch named like 0001-slug.patch, remove it"
        return
    text = read(file)
    title = subject(text).removeprefix("[PATCH] ")
    if file.name != (due := f"{number:04}-{slug(title)[:52]}.patch"):
        yield f"should be named {due} by its place and its subject, {RECORD_ANEW}"
    for pattern, wanted, problem in FORM:
        if bool(re.search(pattern, text)) != wanted:
            yield problem
    if repository.has_changelog and not re.search(r"(?m)^diff --git .*/CHANGELOG\.md$", text):
        yield "changes no CHANGELOG.md, add an entry to the commit"
    message, _, changes = text.partition("\ndiff --git ")
    yield from _message_problems(message.partition("\n\n")[2])
    for line in re.findall(r"(?m)^\+.*[ \t\r]$", changes):
        yield f"adds trailing whitespace in {line.strip()!r}, remove it in the commit"
    own = (repository.source, *repository.beside)
    yield from (
        f"changes {path}, a series is for {', '.join(own)}" for path, _ in diffs(text) if not path.startswith(own)
    )


def slug(subject: str) -> str:
    """Return a subject as `git format-patch` has it in a file's name."""
    return re.sub(r"\.+", ".", re.sub(r"[^A-Za-z0-9._]+", "-", subject)).strip("-").rstrip(".-")


def _message_problems(body: str) -> Iterator[str]:
    if re.search(r"(?m)^---$", body):
        yield f"has a summary between --- and its changes, {RECORD_ANEW}"
    last = body.rstrip().rpartition("\n\n")[2]
    if all(TRAILER.fullmatch(line) for line in last.splitlines()):
        yield "has trailers at the end of its message, remove them: who sends a patch signs it off"
    elif all(paragraph.startswith("    ") for paragraph in body.strip("\n").split("\n\n")):
        yield "has no text that says why, write it into the commit's message"
    if not re.search(r"(?m)^    \S", body):
        yield "has no program that shows what is wrong, write it into the commit's message, indented by four spaces"


def check_clone(lines: list[Line], repo: Path, say: Callable[[str], None]) -> Report:
    """Apply each series to each tag of its line that a clone of the repository has."""
    try:
        repo = Path(git(repo, "rev-parse", "--absolute-git-dir").strip())
    except SeriesError:
        raise SeriesError(f"{repo} is no git repository; name a clone with --repo") from None
    report = Report(("tag", "folder", "applies", "same places", "compiles", "detected", "re-export"))
    for line in lines:
        checked: dict[str, Checks] = {}
        made: Landing | None = None
        for tag in sorted(line.tags, key=lambda tag: tag != line.made_on):  # what the others are compared with first
            say(f"{line.folder.name} on {tag}")
            with tempfile.TemporaryDirectory() as folder:
                checked[tag], found = _check_tag(line, tag, made, repo, Path(folder, "repository"))
            made = found if tag == line.made_on else made
        for tag in line.tags:
            report.add((tag, line.folder.name), tag, checked[tag])
    return report


def _check_tag(line: Line, tag: str, made: Landing | None, repo: Path, scratch: Path) -> tuple[Checks, Landing | None]:
    """Return what is wrong, and where the changes are."""
    try:
        git(repo, "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}")
    except SeriesError:
        return [["is not in this clone, fetch it: git fetch --tags"]], None
    trial = try_series(repo, tag, line.patches, scratch)
    if trial.failed:
        return [[f"{line.place} does not apply: {trial.failed}"]], None
    checks: Checks = [
        [],
        _elsewhere(line, trial.landing if tag == line.made_on else made, trial.landing),
        _broken(trial.after),
        [] if already_applied(trial.root, line.patches) else ["is not detected as patched afterwards"],
    ]
    if tag == line.made_on:
        files = format_series(trial.root, trial.base, "HEAD", scratch.with_name("export"))
        same = contents(files) == contents(line.patches)
        checks.append([] if same else [f"{line.place} is not what git would export, {RECORD_ANEW}"])
    return checks, trial.landing


def _elsewhere(line: Line, made: Landing | None, found: Landing) -> list[str]:
    """Return the places that were changed otherwise than on the release that a series was made on."""
    if made is None:
        return [f"there is no {line.made_on} to compare with"]
    places = unlike(made, found)
    return [f"changes other places than on {line.made_on}: {places}"] if places else []


def _broken(after: dict[str, str]) -> list[str]:
    """Return the Python files that do not compile, and why."""
    errors = {path: syntax_error(text) for path, text in after.items() if path.endswith(".py")}
    return [f"{path} does not compile: {error}" for path, error in errors.items() if error]


def check_wheels(lines: list[Line], say: Callable[[str], None]) -> Report:
    """Apply each series to both packages of each release of its line, and import what can be imported."""
    install = _installer()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(4) as pool:
        checked = {
            (line, release): pool.submit(_check_release, line, release, Path(temporary, release), install, say)
            for line in lines
            for release in line.releases
        }
        outcomes = {key: future.result() for key, future in checked.items()}
        say("imports")
        imported = _import_all(Path(temporary), [release for _, release in outcomes])
    report = Report(("release", "folder", "package", "applies", "same places", "compiles", "imports"))
    for (line, release), by_package in outcomes.items():
        for package, outcome in by_package.items():
            checks: Checks = [outcome.failed]
            if not outcome.failed:
                made = outcomes[line, line.made_on][package].landing if (line, line.made_on) in outcomes else None
                wrong = [f"cannot be imported: {imported[release]}"] if imported[release] else []
                checks += [_elsewhere(line, made, outcome.landing), outcome.broken]
                checks.append(None if package == "lightning" else wrong)
            report.add((release, line.folder.name, package), f"{package} {release}", checks)
    return report


@dataclass
class Outcome:
    """The result of a series on an installed package."""

    failed: list[str] = field(default_factory=list)
    landing: Landing = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def _check_release(
    line: Line, release: str, site: Path, install: list[str], say: Callable[[str], None]
) -> dict[str, Outcome]:
    """Install both packages of a release into a folder and apply the series to them."""
    say(f"{line.folder.name} on the wheels of {release}")
    wanted = [f"{package.replace('_', '-')}=={release}" for package in WHEELS]
    done = subprocess.run([*install, "--target", str(site), *wanted], capture_output=True, text=True, check=False)
    outcomes = {}
    for package in WHEELS:
        outcome = outcomes[package] = Outcome()
        try:
            if done.returncode:
                raise SeriesError(f"cannot be installed: {_last_line(done.stderr)}")
            paths = [path for file in line.patches for path, _ in diffs(for_package(read(file), package))]
            before = texts(site, paths)
            apply_to_package(line.folder, site, package)
            after = texts(site, paths)
            outcome.landing, outcome.broken = landing(before, after), _broken(after)
        except SeriesError as error:
            outcome.failed = [str(error)]
    return outcomes


def _installer() -> list[str]:
    """Return a command that installs wheels, by the tools' uv, which has a cache."""
    uv = ROOT / ".nox" / "tools" / "bin" / "uv"
    if not uv.exists():
        raise SeriesError(f"there is no {uv}; run nox -f ci/noxfile.py -s patches")
    return [str(uv), "--quiet", "pip", "install", "--python", sys.executable, "--no-deps", "--only-binary", ":all:"]


def _import_all(folder: Path, releases: list[str]) -> dict[str, str]:
    """Return what is wrong when patched releases of pytorch-lightning are imported; "" where nothing is."""
    result = folder / "imported.json"
    result.write_text("{}")
    program = [sys.executable, str(Path(__file__).with_name("imports.py")), str(result)]
    folders = {release: str(folder / release) for release in releases}
    done = subprocess.run([*program, *folders.values()], capture_output=True, text=True, check=False)
    found = json.loads(result.read_text())
    ended = f"the process ended: {_last_line(done.stderr)}"
    return {release: found.get(place, ended) for release, place in folders.items()}


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["no reason given"])[-1]

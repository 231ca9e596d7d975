"""Try a series on a release, in a repository of its own, and see where its changes land.

Patches have one line of context only, so that one series serves many releases. What they could do unnoticed is land
in a wrong place; therefore each release's landing is compared with that of the release that the series was made on.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from series.folder import SeriesError, diffs, git, read, texts, touched

# Nobody's settings, hooks or templates: the same for everybody.
PLAIN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_DIFF_OPTS": "",
    "GIT_AUTHOR_NAME": "series",
    "GIT_AUTHOR_EMAIL": "series@example.invalid",
    "GIT_COMMITTER_NAME": "series",
    "GIT_COMMITTER_EMAIL": "series@example.invalid",
}
FORMAT = ("--zero-commit", "--full-index", "--no-signature", "--no-stat", "-N", "-U1")

# The lines of each class, function or section that was changed, before and after, by its path and its name.
Landing = dict[tuple[str, str], tuple[list[str], list[str]]]


@dataclass(frozen=True)
class Trial:
    """The result of a series on one release: commits in `root`, or git's error."""

    root: Path
    base: str
    failed: str
    before: dict[str, str]
    after: dict[str, str]

    @property
    def landing(self) -> Landing:
        """Where its changes are."""
        return landing(self.before, self.after)


def lay_out(repo: Path, ref: str, paths: list[str], root: Path) -> None:
    """Lay files and folders of a tag or commit, as far as it has them, into a new repository in the folder `root`."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "--quiet", "--template=", **PLAIN)
    # Not a checkout, because it takes longer, and because clones without all files are of use too.
    listing = git(repo, "ls-tree", "-r", "-z", "--name-only", "--full-tree", f"{ref}^{{commit}}", "--", *paths)
    if there := [path for path in listing.split("\0") if path]:
        archive = git(repo, "archive", "--format=tar", ref, *there).encode("utf-8", "surrogateescape")
        subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)
    git(root, "add", "--all", "--force", **PLAIN)
    git(root, "commit", "--quiet", "--allow-empty", "--message", ref, **PLAIN)


def try_series(repo: Path, ref: str, patches: list[Path], root: Path) -> Trial:
    """`git am` a series on the files of a tag or commit that it touches, in a new repository in the folder `root`."""
    paths = touched(patches)
    lay_out(repo, ref, paths, root)
    base, before, failed = git(root, "rev-parse", "HEAD").strip(), texts(root, paths), ""
    try:
        if not patches:
            raise SeriesError("there are no patches")
        git(root, "am", "--quiet", *map(str, patches), **PLAIN)
    except SeriesError as error:
        failed = str(error)
    return Trial(root, base, failed, before, texts(root, paths))


def conflicts(repo: Path, ref: str, made: Trial, root: Path) -> str:
    """Merge the commits of a trial into the files of a tag or commit by three-way, in a new repository in `root`.

    Returns how many hunks conflict, and in which files; "" if none does.
    """
    lay_out(repo, ref, sorted(made.after), root)
    count: Counter[str] = Counter()
    hunks = 0
    git(root, "fetch", "--quiet", "--no-tags", str(made.root), "HEAD", **PLAIN)
    for commit in git(root, "rev-list", "--reverse", f"{made.base}..FETCH_HEAD").split():
        own = dict(diffs(git(root, "show", "--format=", "--no-renames", "--unified=1", commit, **PLAIN)))
        hunks += sum(map(_hunks, own.values()))
        try:
            cherry_pick(root, commit, **PLAIN)
        except SeriesError:
            # Go on with the marks of the conflicts, to find those of the next commits.
            for path in git(root, "diff", "--name-only", "--diff-filter=U", **PLAIN).split():
                marks = len(re.findall(r"(?m)^<<<<<<< ", read(root / path)))
                count[path] = max(marks, count[path] + 1) if marks else count[path] + _hunks(own[path])
            git(root, "add", "--all", "--force", **PLAIN)
            git(root, "commit", "--quiet", "--allow-empty", "--message", "conflicts", **PLAIN)
    places = ", ".join(f"{number} in {path}" for path, number in count.items())
    return f"{count.total()} of {hunks} hunks conflict: {places}" if count else ""


def cherry_pick(root: Path, commits: str, **environment: str) -> None:
    """Merge commits into a checkout by three-way; a changelog keeps the entries of both sides."""
    with tempfile.NamedTemporaryFile("w") as attributes:
        attributes.write("CHANGELOG.md merge=union\n")
        attributes.flush()
        union = ("-c", f"core.attributesFile={attributes.name}")
        git(root, *union, "cherry-pick", "--allow-empty", "--keep-redundant-commits", commits, **environment)


def _hunks(diff: str) -> int:
    return len(re.findall(r"(?m)^@@ ", diff))


def landing(before: dict[str, str], after: dict[str, str]) -> Landing:
    """Return where changes are, in terms that do not depend on line numbers and on how the two texts are aligned."""
    found: Landing = {}
    for path in before:
        old, new = (lines_by_name(path, text, before[path]) for text in (before[path], after[path]))
        for name in old.keys() | new.keys():
            if old.get(name, []) != new.get(name, []):
                found[path, name] = old.get(name, []), new.get(name, [])
    return found


def unlike(one: Landing, other: Landing) -> str:
    """Return the places that were not changed in the same way in two landings; "" if all were."""
    both = sorted(one.keys() | other.keys())
    places = [place for place in both if _effect(place, one, other) != _effect(place, other, one)]
    named = [f"{name} in {path}" if name else path for path, name in places]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")


def _effect(place: tuple[str, str], own: Landing, other: Landing) -> object:
    """Return what came out of a place; where the two did not begin with the same, the lines removed and those added."""
    (old, new), (other_old, _) = own.get(place, ([], [])), other.get(place, ([], []))
    return new if old == other_old else (Counter(old) - Counter(new), Counter(new) - Counter(old))


def lines_by_name(path: str, text: str, unpatched: str) -> dict[str, list[str]]:
    """Return a file's lines, but for those that are empty or only dashes, by what they are part of."""
    lines = text.split("\n")
    if path.endswith(".py"):
        names = _python_names(lines)
    elif path.endswith(".md"):
        names = _markdown_names(lines, unpatched.split("\n"))
    elif path.endswith(".rst"):
        known = {title: title for title in _rst_titles(unpatched.split("\n")) if title}
        names = _section_names(_rst_titles(lines), known)
    else:
        names = [""] * len(lines)
    found: dict[str, list[str]] = {}
    for name, line in zip(names, lines, strict=True):
        if line.strip(" \t\r-"):  # a new section takes over the rule that ends the one above it
            found.setdefault(name, []).append(line)
    return found


def _python_names(lines: list[str]) -> list[str]:
    """Return the innermost class or function of each line, decorators included, such as "Strategy.save"."""
    names = [""] * len(lines)

    def name_all(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = above
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{above}.{child.name}".lstrip(".")
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                last = child.end_lineno or first
                names[first - 1 : last] = [name] * (last - first + 1)
            name_all(child, name)

    text = "\n".join(lines)
    if not syntax_error(text):
        name_all(ast.parse(text), "")
    return names


def syntax_error(text: str) -> str:
    """Return why a text is not Python; "" if it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as on escapes, which are Lightning's
        try:
            compile(text, "", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
    return ""


def _markdown_names(lines: list[str], unpatched: list[str]) -> list[str]:
    """Return the section of each line of a changelog. Releases are numbered from the newest, as titles differ."""
    releases = [line for line in unpatched if line.startswith("## ")]
    known = {line: f"release {number}" for number, line in reversed(list(enumerate(releases, 1)))}
    names, title = [], ""
    titles = [line if line.startswith("## ") else "" for line in lines]
    for line, release in zip(lines, _section_names(titles, known), strict=True):
        title = line if line.startswith("### ") else "" if line.startswith("## ") else title
        names.append(f"{release} {title}".strip())
    return names


def _rst_titles(lines: list[str]) -> list[str]:
    """Return the title in each line, "" where there is none."""
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    return [line.strip() if re.fullmatch(r"([-=*^~#\"'+])\1{2,}\s*", below) else "" for line, below in pairs]


def _section_names(titles: list[str], known: dict[str, str]) -> list[str]:
    """Return the section of each line, from the title in each. A new section is named after the one before it."""
    names, name, last = [], "", "the head"
    for title in titles:
        if title in known:
            name = last = known[title]
        elif title:
            name = f"{title} after {last}"
        names.append(name)
    return names


def format_series(repo: Path, since: str, until: str, into: Path) -> list[Path]:
    """Write the commits after one and up to another as patches, whatever the repository's settings are."""
    ends = [git(repo, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip() for ref in (since, until)]
    objects = (repo / git(repo, "rev-parse", "--git-path", "objects").strip()).resolve()
    with tempfile.TemporaryDirectory() as bare:
        git(Path(bare), "init", "--quiet", "--bare", "--template=", **PLAIN)
        alternates = Path(bare, "objects", "info", "alternates")
        alternates.parent.mkdir(parents=True, exist_ok=True)
        alternates.write_text(f"{objects}\n")
        into.mkdir(parents=True, exist_ok=True)
        git(
            Path(bare),
            "format-patch",
            "--quiet",
            *FORMAT,
            "--output-directory",
            str(into.resolve()),
            "..".join(ends),
            **PLAIN,
        )
    return sorted(into.glob("*.patch"))


def contents(files: list[Path]) -> dict[str, str]:
    """Files' texts by name, to compare series."""
    return {file.name: read(file) for file in files}

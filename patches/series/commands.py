"""The patch series for the repositories of Lightning and DeepSpeed, in `patches/`: `python patches --help`.

For who keeps a fork: `apply`. For who keeps the series: `lint`, `check`, `export`, `record` and `new`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from packaging.version import Version
from series import check as series_check
from series import stack
from series.folder import (
    DEEPSPEED,
    LIGHTNING,
    OF_DEEPSPEED,
    PATCHES,
    Line,
    SeriesError,
    already_applied,
    git,
    read,
    read_index,
    repository_of,
    subject,
    version,
    write_index,
)
from series.trial import Trial, cherry_pick, conflicts, contents, format_series, try_series, unlike

COMMAND = "python patches"


def apply(patches: Path, checkout: Path) -> str:
    """Apply the series that is for a checkout's release to it, completely or not at all; returns what was done.

    It is merged by three-way where git cannot apply it as it is, or would in other places, and where no line has the
    release: then it is that of the nearest line.
    """
    root = clean_checkout(checkout)
    patches = patches_for(patches, root)
    line, other = line_of(patches, root)
    if not line.patches:
        raise SeriesError(f"{line.folder} has no patches; get them from the repository that this program is from")
    refuse_applied(root, line)
    name = f"{repository_of(patches).name} {other}".strip()
    own = f"{line.folder}, the nearest to {name}," if other else str(line.folder)
    with tempfile.TemporaryDirectory() as scratch:
        trial = try_series(root, "HEAD", line.patches, Path(scratch, "trial"))
        made, problem = None, trial.failed
        if has_commit(root, line.made_on):
            made = as_made(root, line, Path(scratch, "made"))
            problem = problem or unlike(made.landing, trial.landing)
        if made and (problem or other):
            why = f"there is no series for {name}" if other else f"the checkout differs from the releases of {name}"
            merge(root, line, made, why, Path(scratch, "merged"))
            return f"merged {len(line.patches)} patches of {own} into {root}; now run the tests that they add"
    if problem:
        what = f"this checkout differs from {name} there: apply them by hand with git am -3 {line.folder}/*.patch"
        raise SeriesError(f"the patches of {own} do not apply, nothing was changed: {problem}; {what}")
    try:
        git(root, "am", "--quiet", *map(str, line.patches))
    except SeriesError as error:
        abort_am(root)
        raise SeriesError(f"git am failed and was aborted, nothing was changed: {error}") from None
    note = ""
    if not made:
        note = f"; {line.made_on} is not in this clone, so the places of the changes were not compared with it"
    return f"applied {len(line.patches)} patches of {own} to {root}{note}"


def as_made(root: Path, line: Line, scratch: Path) -> Trial:
    """Return a series on the release that it was made on; SeriesError if it does not apply there."""
    made = try_series(root, line.made_on, line.patches, scratch)
    if made.failed:
        raise SeriesError(
            f"{line.folder} does not apply to {line.made_on} itself ({made.failed}); make it anew: {COMMAND} export"
        )
    return made


def merge(root: Path, line: Line, made: Trial, why: str, scratch: Path) -> None:
    """Merge the series of a line into a checkout by three-way, completely or not at all.

    `made` is the series on the release that it was made on.
    """
    if found := conflicts(root, "HEAD", made, scratch):
        raise SeriesError(
            f"{why}, and the patches of {line.folder} cannot be merged into {root}: {found}; nothing was changed. Merge"
            f" them by hand in a worktree: {COMMAND} new {root} HEAD --from {line.folder.name}"
        )
    git(root, "fetch", "--quiet", "--no-tags", str(made.root), "HEAD")
    try:
        cherry_pick(root, f"{made.base}..FETCH_HEAD")
    except SeriesError as error:
        git(root, "cherry-pick", "--abort")
        raise SeriesError(f"the merge failed and was aborted, nothing was changed: {error}") from None


def clean_checkout(checkout: Path) -> Path:
    """Return the root of a checkout without unfinished work; SeriesError if it is none."""
    try:
        root = Path(git(checkout, "rev-parse", "--show-toplevel").strip())
    except SeriesError:
        raise SeriesError(
            f"{checkout} is no git checkout; name a clone of Lightning's or DeepSpeed's repository"
        ) from None
    if not any((root / repository.source).is_dir() for repository in (LIGHTNING, DEEPSPEED)):
        raise SeriesError(
            f"{root} has no src/lightning and no deepspeed; name a clone of Lightning's repository, at release 2.0 or"
            " newer, or of DeepSpeed's"
        )
    for started in ("rebase-apply", "rebase-merge", "CHERRY_PICK_HEAD"):
        if (root / git(root, "rev-parse", "--git-path", started).strip()).exists():
            raise SeriesError(f"a git am, rebase or cherry-pick is under way in {root}; finish or abort it first")
    if git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules").strip():
        raise SeriesError(f"{root} has uncommitted changes; commit or stash them first")
    return root


def patches_for(patches: Path, clone: Path) -> Path:
    """Return the folder with the series for the repository of a clone, which may be bare."""
    try:
        is_deepspeed = bool(git(clone, "ls-tree", "HEAD", DEEPSPEED.source.rstrip("/")))
    except SeriesError:
        return patches  # it is said elsewhere what is wrong with it
    return patches / OF_DEEPSPEED if is_deepspeed else patches


def line_of(patches: Path, root: Path) -> tuple[Line, str]:
    """Return the line of the release that a checkout is at: by its commit, its tags, or what it says of itself.

    With it comes "", or the name of the release if no line has it: then the line is the nearest one.
    """
    lines, repository = read_index(patches), repository_of(patches)
    head, *tags = git(root, "rev-parse", "HEAD").split() + git(root, "tag", "--points-at", "HEAD").split()
    own = read(root / repository.version).strip()
    parsed = version(own)
    public = parsed.public if parsed else own  # a fork may call it 2.5.2+fork
    for name in (head, *tags, own, public, f"v{public}"):  # DeepSpeed's tags are v0.19.5
        for line in lines:
            if name in (*line.tags, *line.untagged):
                return line, ""
    tag = next((tag for tag in tags if version(tag)), None)
    return nearest(lines, tag or own), tag or head[:10]


def nearest(lines: list[Line], name: str) -> Line:
    """Return the line that is likely to serve a release: the last one that begins before it.

    It is the last of all for a commit, and for a version between releases of a line: master is called so.
    """
    wanted = version(name)
    if wanted is None:
        return lines[-1]
    line = max((line for line in lines if begin(line) <= wanted), key=begin, default=lines[0])
    later = [release for release in line.releases if Version(release) > wanted]
    return lines[-1] if later and line is not lines[0] else line


def begin(line: Line) -> Version:
    """Return the first release of a line; that of a line of commits comes after all releases."""
    return version(line.tags[0]) or Version("9999")


def refuse_applied(root: Path, line: Line) -> None:
    """Raise SeriesError if a checkout has the series, or a part of it."""
    if already_applied(root, line.patches):
        raise SeriesError(f"{root} has the patches of {line.folder} already; there is nothing to do")
    own = [subject(read(patch)).removeprefix("[PATCH] ") for patch in line.patches]
    made = set(git(root, "log", "--format=%s", "HEAD").splitlines())
    if there := [name for name in own if name in made]:
        which = "all" if len(there) == len(own) else f"{len(there)} of the {len(own)}"
        what = "remove them first, or apply the rest by hand with git am"
        raise SeriesError(f"{root} has {which} patches of {line.folder} as commits ({'; '.join(there)}); {what}")


def has_commit(root: Path, name: str) -> bool:
    """Whether a clone has a tag or commit."""
    try:
        git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except SeriesError:
        return False
    return True


def abort_am(root: Path) -> None:
    """Undo a `git am` that failed."""
    if (root / git(root, "rev-parse", "--git-path", "rebase-apply").strip()).exists():
        git(root, "am", "--abort")


def export(patches: Path, names: list[str]) -> str:
    """Write the folders of lines, or of all, as the stack and the overlays make them."""
    indexes = [folder for folder in (patches, patches / OF_DEEPSPEED) if (folder / "index.json").is_file()]
    lines = [line for folder in indexes for line in stack.all_series(read_index(folder))]
    there = {line.folder.name: (line, series) for line, series in lines}
    if unknown := [name for name in names if name not in there]:
        raise SeriesError(f"there is no line {', '.join(unknown)}; there are {', '.join(there)}")
    chosen = [there[name] for name in names or there]
    for line, series in chosen:
        stack.write_series(line.folder, whole(series))
    return f"wrote the patches of {', '.join(line.place for line, _ in chosen)}"


def whole(series: stack.Series | SeriesError) -> stack.Series:
    """Return a series; raises the error that is in its place."""
    if isinstance(series, SeriesError):
        raise series
    return series


def record(patches: Path, checkout: Path, folder: str, since: str | None = None) -> str:
    """Write the commits of a checkout as the series of a line, which is new if the index has no such folder.

    A change of a line is a change of those that are older: their folders are made anew.
    """
    root = clean_checkout(checkout)
    patches = patches_for(patches, root)
    lines = read_index(patches)
    line = next((line for line in lines if line.folder.name == folder), None)
    if line is None and since is None:
        names = ", ".join(line.folder.name for line in lines)
        raise SeriesError(
            f"there is no line {folder} (there are {names}); for a new one, name its release with --since"
        )
    if line is None and Path(folder).name != folder:
        raise SeriesError(f"{folder} cannot be a folder of patches/; name it as the line of releases")
    since = since or (line.made_on if line else "")
    series = commits(root, since)
    anew = []
    if line is None:
        line = Line(patches / folder, since, (since,))
        lines = sorted([*lines, line], key=begin)
        write_index(patches, lines)
        stack.write_line(lines, line, series)
        for older in lines[: lines.index(line)][-1:]:
            stack.write_overlay(lines, older)  # it was one of another line
    else:
        stack.write_line(lines, line, series)
        anew = [stack.renew(lines, older, root) for older in reversed(lines[: lines.index(line)])]
    renewed = f", and made {', '.join(anew)} anew" if anew else ""
    now = f"{COMMAND} lint, and {COMMAND} check --repo {root}"
    return f"wrote {len(series)} patches into {line.folder}{renewed}; now: {now}"


def commits(root: Path, since: str) -> stack.Series:
    """Return the commits of a checkout that follow a tag or commit, as patches."""
    if not has_commit(root, since):
        raise SeriesError(f"{root} has no {since}; fetch it with git fetch --tags, or name another with --since")
    found = git(root, "rev-list", "--parents", f"{since}..HEAD").splitlines()
    base = git(root, "rev-parse", f"{since}^{{commit}}")
    if not found or git(root, "merge-base", since, "HEAD") != base:
        raise SeriesError(f"{root} is not at commits that follow {since}; check out the branch that has the series")
    if any(len(commit.split()) != 2 for commit in found):
        raise SeriesError(f"there are merge commits after {since} in {root}; rebase them away")
    with tempfile.TemporaryDirectory() as scratch:
        return contents(format_series(root, since, "HEAD", Path(scratch)))


def new(patches: Path, checkout: Path, tag: str, source: str | None = None) -> str:
    """See whether a line's series serves one more release. If so, add that to the index; else begin a series for it.

    `source` is the folder to begin with; without it, that of the nearest line is taken.
    """
    root = clean_checkout(checkout)
    patches = patches_for(patches, root)
    lines = read_index(patches)
    if not has_commit(root, tag):
        raise SeriesError(f"{root} has no {tag}; fetch it with git fetch --tags")
    if version(tag) is None or not has_commit(root, f"refs/tags/{tag}"):
        tag = git(root, "rev-parse", f"{tag}^{{commit}}").strip()
    if found := [line.place for line in lines if tag in line.tags]:
        raise SeriesError(f"{found[0]} is for {tag} already; there is nothing to do")
    line = next((line for line in lines if line.folder.name == source), None) if source else nearest(lines, tag)
    if line is None:
        raise SeriesError(f"there is no line {source}; there are {', '.join(line.folder.name for line in lines)}")
    if not has_commit(root, line.made_on):
        raise SeriesError(
            f"{root} has no {line.made_on}, which {line.folder} was made on; fetch it with git fetch --tags"
        )
    with tempfile.TemporaryDirectory() as scratch:
        made = as_made(root, line, Path(scratch, "made"))
        trial = try_series(root, tag, line.patches, Path(scratch, "trial"))
        places = "" if trial.failed else unlike(made.landing, trial.landing)
        if not trial.failed and not places:
            tags = tuple(sorted([*line.tags, tag], key=lambda name: version(name) or Version("9999")))
            untagged = tuple(name for name in line.untagged if name != tag)
            more = replace(line, tags=tags, untagged=untagged)
            write_index(patches, [more if one == line else one for one in lines])
            return f"{line.place} applies to {tag} unchanged; added {tag} to {line.place.rpartition('/')[0]}/index.json"
        # With these, git am -3 finds the files that the patches were made from.
        git(root, "fetch", "--quiet", "--no-tags", str(made.root), "HEAD")
    return begin_series(root, line, lines, tag, trial.failed or f"it changes other places: {places}")


def begin_series(root: Path, line: Line, lines: list[Line], tag: str, why: str) -> str:
    """Begin a series for a release, in a worktree beside a checkout, with that of a line; returns what to do next."""
    parsed = version(tag)
    minor = f"{parsed.major}.{parsed.minor}" if parsed else tag[:10]
    folder = tag if any(line.folder.name == minor for line in lines) else minor
    tree = root.with_name(f"{root.name}-{folder}")
    if tree.exists():
        raise SeriesError(f"{tree} exists already; remove it with git -C {root} worktree remove {tree}")
    git(root, "worktree", "add", "--quiet", "-b", f"series-{folder}", str(tree), tag)
    try:
        git(tree, "am", "--quiet", "-3", *map(str, line.patches))
        left = "all patches are applied; check them, and amend what is wrong"
    except SeriesError as error:
        left = f"git am stopped there ({error}): resolve, git add, git am --continue, until all patches are applied"
    return (
        f"{line.place} does not apply to {tag} unchanged ({why}).\n"
        f"{tree} has the branch series-{folder} for a series of its own; {left}.\n"
        f"Then: {COMMAND} record {tree} --line {folder} --since {tag}"
    )


def say(text: str) -> None:
    """Print what is being done."""
    sys.stderr.write(f"{text}\n")  # in one go: threads tell


def check(patches: Path, repo: Path | None) -> str:
    """Check every series on all releases of its line, in a clone or else in Lightning's wheels."""
    lines = read_index(patches_for(patches, repo) if repo else patches)
    report = series_check.check_clone(lines, repo, say) if repo else series_check.check_wheels(lines, say)
    print(report, flush=True)
    if report.problems:
        raise SeriesError("\n".join(report.problems))
    return ""


def lint(patches: Path) -> str:
    """Check the form of the files in `patches/`."""
    problems = series_check.lint(patches)
    if (patches / OF_DEEPSPEED).is_dir():
        problems += [f"{OF_DEEPSPEED}/{problem}" for problem in series_check.lint(patches / OF_DEEPSPEED)]
    if problems:
        raise SeriesError("\n".join(problems))
    return "all patches are in order"


def parser(patches: Path) -> argparse.ArgumentParser:
    """Return the command line; each command has what it does as `run`."""
    made = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)

    def add(name: str, about: str, run: Callable[[argparse.Namespace], str]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about)
        command.set_defaults(run=run)
        return command

    add("lint", "check the form of the files in patches/", lambda _: lint(patches))
    one = add("check", "check each series on all releases of its line", lambda g: check(patches, g.repo))
    clone = "a clone of Lightning's or DeepSpeed's repository; without it Lightning's wheels are checked"
    one.add_argument("--repo", type=Path, metavar="CLONE", help=clone)
    about = "apply the series that is for a checkout's release to it"
    one = add("apply", about, lambda g: apply(patches, g.checkout))
    one.add_argument("checkout", type=Path)
    one = add(
        "export",
        "write the folders of lines as the stack and the overlays make them",
        lambda g: export(patches, g.lines),
    )
    one.add_argument("lines", metavar="LINE", nargs="*", help="the name of its folder; without any, all lines")
    about = "write a checkout's commits as the series of a line"
    one = add("record", about, lambda g: record(patches, g.checkout, g.line, g.since))
    one.add_argument("checkout", type=Path)
    one.add_argument("--line", metavar="FOLDER", required=True)
    one.add_argument("--since", metavar="REF", help="what the commits follow; without it, what the line was made on")
    about = "see whether a series serves one more release, or begin one for it"
    one = add("new", about, lambda g: new(patches, g.checkout, g.tag, g.source))
    one.add_argument("checkout", type=Path)
    one.add_argument("tag")
    source = "the series to begin with; without it, the nearest"
    one.add_argument("--from", dest="source", metavar="FOLDER", help=source)
    return made


def main(arguments: list[str] | None = None, patches: Path = PATCHES) -> None:
    """Run a command; exits with a sentence on what cannot be done."""
    given = parser(patches).parse_args(arguments)
    try:
        done = given.run(given)
    except SeriesError as error:
        sys.exit(str(error))
    if done:
        print(done)

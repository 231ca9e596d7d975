"""The patch series of `patches/`: a folder of patches for each line of Lightning's releases, named after its first one.

Those for DeepSpeed are in `patches/deepspeed/` in the same way. This module finds them and applies them.
"""

from __future__ import annotations

import email.header
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
# By which names a wheel has the code of a repository.
PREFIXES = {
    "lightning": {"src/lightning/": "lightning/"},
    "pytorch_lightning": {
        "src/lightning/pytorch/": "pytorch_lightning/",
        "src/lightning/fabric/": "lightning_fabric/",
    },
    "deepspeed": {"deepspeed/": "deepspeed/"},
}
# Where both repositories have their code and tests, and what is needed to build the code or to check a patch.
CODE = (
    "src",
    "tests",
    "docs/source-pytorch/advanced",
    "requirements",
    "deepspeed",
    "op_builder",
    "accelerator",
    "csrc",
)
# What tells git which repository it is in, where it was started by another git.
INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_COMMON_DIR")
# The commits are made by nobody in particular, on machines where git knows nobody too.
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "ds_frozen_patch"), ("EMAIL", "ds_frozen_patch@users.noreply.example"))
}
# What somebody may have set, and what must not decide whether a series applies.
PLAIN = ("-c", "commit.gpgSign=false", "-c", "rerere.enabled=false", "-c", "core.safecrlf=false")


class SeriesError(Exception):
    """An error for the user: what cannot be done, and what to do about it."""


@dataclass(frozen=True)
class Repository:
    """A repository that there are series for: the folder that has them, and the file that has its version."""

    name: str
    folder: Path
    version: str


def repositories(patches: Path) -> tuple[Repository, Repository]:
    """Return Lightning's and DeepSpeed's repository."""
    return (
        Repository("Lightning", patches, "src/version.info"),
        Repository("DeepSpeed", patches / "deepspeed", "version.txt"),
    )


def repository_of(patches: Path, clone: Path, ref: str = "HEAD") -> Repository:
    """Return which repository a clone is of, which may be bare."""
    try:
        found = [one for one in repositories(patches) if git(clone, "ls-tree", ref, one.version)]
    except SeriesError as error:
        raise SeriesError(f"{clone} is no git repository, or has no commit ({error})") from None
    if not found:
        raise SeriesError(f"{clone} has no src/version.info or version.txt; name a clone of Lightning or DeepSpeed")
    return found[0]


def lines(folder: Path) -> list[Path]:
    """Return the folders of a repository's lines, from old releases to new ones; a branch such as master is last."""
    named = {line.name: line for line in folder.glob("*/") if any(line.glob("*.patch"))}
    return [named[name] for name in sorted(named, key=lambda name: version(name) or Version("9999"))]


def line_for(folder: Path, release: str) -> Path:
    """Return the line of a name, or else the one that serves a release: the last that begins at it or before it."""
    there, wanted = lines(folder), version(release)
    named = [line for line in there if line.name == release]
    begun = [line for line in there if wanted and (first := version(line.name)) and first <= wanted]
    if not named and not begun:
        names = ", ".join(line.name for line in there)
        raise SeriesError(f"there are no patches for {release!r}: the lines are {names}; name one with --line")
    return (named or begun)[-1]


def patches_of(line: Path) -> list[Path]:
    """Return the patches of a line, in their order."""
    return sorted(line.glob("*.patch"))


def version(name: str) -> Version | None:
    """Return the version that a name is, such as a tag; None if it is none."""
    try:
        return Version(name)
    except InvalidVersion:
        return None


def subject(patch: str) -> str:
    """Return the subject of the commit that a patch is of."""
    header = re.search(r"(?m)^Subject: (.*(?:\n[ \t].*)*)", patch)
    text = re.sub(r"\n\s*", " ", header[1]) if header else ""
    return str(email.header.make_header(email.header.decode_header(text))).removeprefix("[PATCH] ")


def diffs(patch: str) -> Iterator[tuple[str, str]]:
    """The changed files of a patch: the path of each and its part of the patch."""
    for text in re.split(r"(?m)^(?=diff --git )", patch)[1:]:
        yield text.partition("\n")[0].rpartition(" b/")[2], text


def touched(patches: Iterable[Path]) -> list[str]:
    """Return the paths of all files that some patches change, add or remove."""
    return sorted({path for patch in patches for path, _ in diffs(read(patch))})


def read(file: Path) -> str:
    """Return a file's text as it is: whatever its ends of lines, and none if it is not there."""
    return file.read_bytes().decode("utf-8", "surrogateescape") if file.is_file() else ""


def git(folder: Path, *arguments: str, stdin: str = "", **environment: str) -> str:
    """Run git in a folder and return what it prints; SeriesError with its words if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
    try:
        done = subprocess.run(
            ["git", *PLAIN, "-C", str(folder), *arguments],
            input=stdin.encode("utf-8", "surrogateescape"),
            capture_output=True,
            env=inherited | IDENTITY | {"LC_ALL": "C"} | environment,
            check=False,
        )
    except FileNotFoundError:
        raise SeriesError("there is no git on the PATH; install it") from None
    output = done.stdout.decode("utf-8", "surrogateescape")
    if done.returncode:
        said = (output + done.stderr.decode("utf-8", "replace")).strip().splitlines()
        important = [line for line in said if re.match("error: |fatal: |Patch failed at|CONFLICT", line)]
        words = [re.sub("^(error|fatal): ", "", line) for line in important or said]
        raise SeriesError("; ".join(words[:4]) or f"git {arguments[0]} failed")
    return output


def am(root: Path, patches: list[Path]) -> None:
    """Commit patches in a checkout, with three-way merges where they do not apply as they are; all or none of them.

    Entries of changelogs are kept from both sides.
    """
    union = f"core.attributesFile={Path(__file__).with_name('merge.attributes')}"
    options = ("--3way", "--no-keep-cr", "--whitespace=nowarn", "--no-gpg-sign")
    try:
        git(root, "-c", union, "am", *options, *map(str, patches))
    except SeriesError:
        if (root / git(root, "rev-parse", "--git-path", "rebase-apply").strip()).exists():
            git(root, "am", "--abort")
        raise


def make_on_base(clone: Path, line: Path, root: Path) -> bool:
    """Commit a line's patches on the release that they were made on, in a new repository in the folder `root`.

    A merge of the second patch needs the files that the first one makes there, which no clone has. Returns False if
    the clone has no such release.
    """
    patches = patches_of(line)
    recorded = re.search(r"(?m)^base-commit: (\w+)$", read(patches[0]))
    for ref in (recorded[1] if recorded else line.name, f"v{line.name}"):
        try:
            lay_out(clone, ref, touched(patches), root)
            am(root, patches)
        except SeriesError:
            continue
        return True
    return False


def lay_out(clone: Path, ref: str, paths: list[str], root: Path, *beside: Path) -> None:
    """Check files and folders of a tag or commit out, as far as it has them, in a new repository in the folder `root`.

    It shares the objects of the clone and of repositories beside it. A clone without all of them is of use too.
    """
    listing = git(clone, "ls-tree", "-r", "-z", "--full-tree", f"{ref}^{{commit}}", "--", *paths)
    root.mkdir(exist_ok=True)
    git(root, "init", "--quiet", "--template=")
    objects = [(one / git(one, "rev-parse", "--git-path", "objects").strip()).resolve() for one in (clone, *beside)]
    (root / ".git" / "objects" / "info" / "alternates").write_text("".join(f"{place}\n" for place in objects))
    git(root, "update-index", "-z", "--index-info", stdin=listing)
    git(root, "commit", "--quiet", "--allow-empty", "--message", ref)
    git(root, "reset", "--quiet", "--hard")


def for_package(patch: str, package: str) -> str:
    """Return the part of a patch that is for an installed package, by the names that this package has for the code.

    pytorch_lightning, whose wheel brings lightning_fabric, is made from Lightning's code by renaming it.
    """
    found = []
    for path, text in diffs(patch):
        if path.startswith(("tests/", "docs/")) or path.endswith("/CHANGELOG.md"):
            continue
        prefix = next((prefix for prefix in PREFIXES[package] if path.startswith(prefix)), None)
        if prefix is None:
            raise SeriesError(f"{path} is not in {package}; a series can change {', '.join(PREFIXES[package])} only")
        text = text.replace(f" a/{prefix}", f" a/{PREFIXES[package][prefix]}")
        text = text.replace(f" b/{prefix}", f" b/{PREFIXES[package][prefix]}")
        if package == "pytorch_lightning":
            # As Lightning's own .actions/assistant.py does it.
            text = re.sub(r"(?m)(?<![_/@])lightning\.pytorch(?=[^\w/]|$)", "pytorch_lightning", text)
            text = re.sub(r"(?m)(?<![_/@])lightning\.fabric(?=[^\w/]|$)", "lightning_fabric", text)
        found.append(text)
    return "".join(found)


def apply_to_package(line: Path, site_packages: Path, package: str) -> list[str]:
    """Apply a series to an installed "lightning", "pytorch_lightning" or "deepspeed", completely or not at all.

    Returns the paths in `site_packages` that it changed.
    """
    patch = "".join(for_package(read(file), package) for file in patches_of(line))
    paths = sorted({path for path, _ in diffs(patch)})
    if not paths:
        raise SeriesError(f"{line} has no patch that changes {package}; name the folder of a series")
    before = {path: read(site_packages / path) for path in paths}
    try:
        # Inside a repository, git would silently leave alone what that repository ignores: let it see none. There are
        # no three-way merges outside of one, so that one line of context has to do.
        git(site_packages, "apply", "-C1", "--whitespace=nowarn", "-", stdin=patch, GIT_DIR=os.devnull)
    except SeriesError as error:
        raise SeriesError(f"{line} does not apply to the {package} of {site_packages}: {error}") from None
    if unchanged := [path for path in paths if read(site_packages / path) == before[path]]:
        raise SeriesError(f"git says that it applied {line}, but did not change {', '.join(unchanged)}")
    return paths

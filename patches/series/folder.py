"""The patch series of `patches/`: a folder for each line of Lightning's releases, and `patches/index.json`.

Those of DeepSpeed are in `patches/deepspeed/` in the same way. What is here reads them and applies them.
"""

from __future__ import annotations

import email
import email.header
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
OF_DEEPSPEED = "deepspeed"
"""The folder in `patches/` that has the series of DeepSpeed, and their index."""
COMMIT = re.compile(r"[0-9a-f]{40}")
MALICIOUS = ("2.6.2", "2.6.3")
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


class SeriesError(Exception):
    """An error for the user: what cannot be done, and what to do about it."""


@dataclass(frozen=True)
class Repository:
    """What is different in the repositories that there are series for.

    `source` is where the code is, `version` the file that has it, and `beside` what else a series can change.
    """

    name: str
    source: str
    version: str
    beside: tuple[str, ...]
    has_changelog: bool


LIGHTNING = Repository("Lightning", "src/lightning/", "src/version.info", ("tests/", "docs/"), has_changelog=True)
DEEPSPEED = Repository("DeepSpeed", "deepspeed/", "version.txt", ("tests/",), has_changelog=False)


@dataclass(frozen=True)
class Line:
    """A line of releases that one series is for: a line of the index.

    `tags` are tags or commits of the repository, from old to new; the series was made on one of them.
    `untagged` are releases on the package index that have no tag.
    """

    folder: Path
    made_on: str
    tags: tuple[str, ...]
    untagged: tuple[str, ...] = ()

    @property
    def patches(self) -> list[Path]:
        """Its patches, in their order."""
        return sorted(self.folder.glob("*.patch"))

    @property
    def place(self) -> str:
        """Its folder, as messages name it: "patches/2.5.0"."""
        return "/".join(self.folder.parts[-3 if self.folder.parent.name == OF_DEEPSPEED else -2 :])

    @property
    def releases(self) -> list[str]:
        """The releases of it that the package index has."""
        return [name for name in (*self.tags, *self.untagged) if not COMMIT.fullmatch(name)]


def repository_of(patches: Path) -> Repository:
    """Return the repository that the series in a folder with an index are for."""
    return DEEPSPEED if patches.name == OF_DEEPSPEED else LIGHTNING


def read_index(patches: Path) -> list[Line]:
    """Return the lines of `index.json`, in its order: from old releases to new ones."""
    file = patches / "index.json"
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["lines"]
        lines = [
            Line(patches / entry["folder"], entry["made_on"], tuple(entry["tags"]), tuple(entry.get("untagged", ())))
            for entry in entries
        ]
    except FileNotFoundError:
        raise SeriesError(f"{file}: there is no such file; name the lines of releases in it") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        what = 'it must be {"lines": [{"folder": ..., "made_on": ..., "tags": [...]}, ...]}'
        raise SeriesError(f"{file}: cannot be read ({type(error).__name__}: {error}); {what}") from None
    for line in lines:
        for name in (*line.tags, *line.untagged):
            if name in MALICIOUS:
                raise SeriesError(f"{file}: lists {name}, which was a malicious upload; remove it")
            if version(name) is None and not COMMIT.fullmatch(name):
                raise SeriesError(f"{file}: {name} is neither a release nor a whole commit; name one")
    return lines


def write_index(patches: Path, lines: Iterable[Line]) -> None:
    """Write `index.json`, a line of text for each list."""
    entries = []
    for line in lines:
        untagged = {"untagged": list(line.untagged)} if line.untagged else {}
        values = {"folder": line.folder.name, "made_on": line.made_on, "tags": list(line.tags), **untagged}
        rows = [json.dumps({key: value})[1:-1] for key, value in values.items()]
        entries.append("    {" + ",\n     ".join([", ".join(rows[:2]), *rows[2:]]) + "}")
    text = '{\n  "lines": [\n' + ",\n".join(entries) + "\n  ]\n}\n"
    (patches / "index.json").write_text(text, encoding="utf-8")


def version(name: str) -> Version | None:
    """Return the version that a tag, or the text of `version.info`, is; None if it is none."""
    if COMMIT.fullmatch(name):
        return None
    try:
        return Version(name)
    except InvalidVersion:
        return None


def subject(patch: str) -> str:
    """Return the subject of the commit that a patch is of, as it is in the patch: after "[PATCH] "."""
    header = email.message_from_string(re.split(r"(?m)^diff --git ", patch)[0]).get("Subject", "")
    return str(email.header.make_header(email.header.decode_header(re.sub(r"\n\s*", " ", header))))


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


def write(file: Path, text: str) -> None:
    """Write what `read` has returned."""
    file.write_bytes(text.encode("utf-8", "surrogateescape"))


def texts(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the texts of some files by path."""
    return {path: read(root / path) for path in paths}


def git(folder: Path, *arguments: str, stdin: str | bytes = b"", **environment: str) -> str:
    """Run git in a folder and return what it prints; SeriesError with its words if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name not in INHERITED}
    data = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, env=inherited | {"LC_ALL": "C"} | environment, check=False
        )
    except FileNotFoundError:
        raise SeriesError("there is no git on the PATH; install it") from None
    output = done.stdout.decode("utf-8", "surrogateescape")
    if done.returncode:
        said = (output + done.stderr.decode("utf-8", "replace")).strip().splitlines()
        important = [line for line in said if re.match("error: |fatal: |Patch failed at", line)]
        places = [line for line in important if not line.endswith("patch does not apply")]  # said of each file as well
        words = [re.sub("^(error|fatal): ", "", line) for line in places or important or said]
        raise SeriesError("; ".join(words[:3]) or f"git {arguments[0]} failed")
    return output


def git_apply(folder: Path, patch: str, *, reverse: bool = False) -> None:
    """Apply a patch, completely or not at all, to files that need not be in a repository."""
    # Inside a repository, git would silently leave alone what that repository ignores: let it see none.
    arguments = ("apply", "--whitespace=nowarn", *(["--reverse"] if reverse else []), "-")
    git(folder, *arguments, stdin=patch, GIT_DIR=os.devnull)


def already_applied(root: Path, patches: list[Path]) -> bool:
    """Whether a source tree has all changes of a series: whether they can be taken back, the last one first."""
    with tempfile.TemporaryDirectory() as copy:
        for path in touched(patches):
            if (root / path).is_file():
                target = Path(copy, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, target)
        try:
            for patch in reversed(patches):
                git_apply(Path(copy), "".join(text for _, text in diffs(read(patch))), reverse=True)
        except SeriesError:
            return False
    return True


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


def apply_to_package(folder: Path, site_packages: Path, package: str) -> list[str]:
    """Apply a series to an installed "lightning", "pytorch_lightning" or "deepspeed", completely or not at all.

    Returns the paths in `site_packages` that it changed.
    """
    patch = "".join(for_package(read(file), package) for file in sorted(folder.glob("*.patch")))
    paths = sorted({path for path, _ in diffs(patch)})
    if not paths:
        raise SeriesError(f"{folder} has no patch that changes {package}; name the folder of a series")
    before = texts(site_packages, paths)
    try:
        git_apply(site_packages, patch)
    except SeriesError as error:
        raise SeriesError(f"{folder} does not apply to the {package} of {site_packages}: {error}") from None
    if unchanged := [path for path, text in texts(site_packages, paths).items() if text == before[path]]:
        raise SeriesError(f"git says that it applied {folder}, but did not change {', '.join(unchanged)}")
    return paths

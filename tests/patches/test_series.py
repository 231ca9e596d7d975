"""The commands of `patches/` on tiny repositories with Lightning's and DeepSpeed's layout; the real folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from series import commands as series
from series.folder import (
    PATCHES,
    SeriesError,
    apply_to_package,
    diffs,
    git,
    line_for,
    lines,
    patches_of,
    read,
    repositories,
    subject,
    touched,
)

pytestmark = [pytest.mark.everyday, pytest.mark.once]
STRATEGY = '''"""DeepSpeed."""
from lightning.fabric.utilities import (
    things,
)


class Strategy:
    def __init__(self, stage=2):
        self.stage = stage
        self.config = None

    def save(self, path):
        things.save(
            path,
        )
{more}
    def load(self, path):
        things.load(
            path,
        )
'''
CHANGELOG = "# Changelog\n\n## [{tag}] - 2025-01-01\n\n### Fixed\n\n- Fixed something\n"
BETWEEN = "\n    def {name}(self, path):\n        things.{name}(\n            path,\n        )\n"
SUBJECTS = ("fabric: leave out `frozen` parameters (when asked to), a long subject", "pytorch: leave out frozen ones")
PYTORCH = "src/lightning/pytorch/strategies.py"
FABRIC = "src/lightning/fabric/strategies.py"


@dataclass
class World:
    """A clone of the tiny repository and a folder with its series, each test's own."""

    clone: Path
    patches: Path

    @property
    def line(self) -> Path:
        return self.patches / "2.5"

    @property
    def tree(self) -> str:
        return git(self.clone, "rev-parse", "HEAD^{tree}")

    def at(self, tag: str) -> None:
        git(self.clone, "switch", "--quiet", "--detach", tag)

    def run(self, command: str, *arguments: str) -> None:
        series.main([command, str(self.clone), *arguments], self.patches)

    def refuses(self, command: str, *arguments: str) -> str:
        """The one sentence that a command is refused with; nothing is changed."""
        before = git(self.clone, "rev-parse", "HEAD"), git(self.clone, "status", "--porcelain", "--branch")
        with pytest.raises(SystemExit) as refused:
            self.run(command, *arguments)
        assert before == (git(self.clone, "rev-parse", "HEAD"), git(self.clone, "status", "--porcelain", "--branch"))
        assert isinstance(refused.value.code, str)
        return refused.value.code

    def has_series(self) -> bool:
        """Whether the code of both parts has the change, in `save` and not in a function with lines like its own."""
        texts = [read(self.clone / path) for path in (FABRIC, PYTORCH)]
        in_save = ["exclude=self.exclude" in text.partition("def save(")[2].partition("def ")[0] for text in texts]
        assert len({*in_save, *("exclude" in text for text in texts)}) == 1
        return in_save[0]


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def edit(file: Path, old: str, new: str) -> None:
    text = read(file)
    assert old in text
    file.write_text(text.replace(old, new, 1))


def commit(root: Path, subject: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--no-gpg-sign", "--message", subject, GIT_AUTHOR_NAME="Somebody")


def release(root: Path, tag: str, more: str = "") -> None:
    files = {f"src/lightning/{part}/CHANGELOG.md": CHANGELOG.format(tag=tag) for part in ("fabric", "pytorch")}
    files |= {path: STRATEGY.format(more=more) for path in (FABRIC, PYTORCH)}
    write(root, files | {"src/version.info": f"{tag}\n", "docs/frozen.rst": "Title\n=====\n\nText\n"})
    commit(root, f"Release {tag}")
    git(root, "tag", tag)


def change(root: Path, part: str, subject: str) -> None:
    """A commit of the series: an argument, a line in `save` with context that `load` has as well, a new test."""
    file = root / f"src/lightning/{part}/strategies.py"
    edit(file, "stage=2)", "stage=2, exclude=False)")
    edit(file, "            path,\n", "            path,\n            exclude=self.exclude,\n")
    edit(file, "self.config = None\n", "self.config = None\n        self.exclude = exclude\n")
    edit(file, "    things,\n", "    things,\n    more,  # not lightning.pytorchx\n")
    edit(root / f"src/lightning/{part}/CHANGELOG.md", "### Fixed\n", "### Fixed\n\n- Added exclude\n")
    if part == "pytorch":  # a second change to the same line, which merges need the first one for
        edit(root / FABRIC, "self.exclude = exclude\n", "self.exclude = bool(exclude)\n")
    write(root, {f"tests/tests_{part}/test_exclude.py": f"from lightning.{part} import strategies\n"})
    commit(root, subject)


@pytest.fixture(autouse=True, scope="module")
def _git_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Git that knows no name and must not guess one, as on a fresh machine, with settings that must not matter."""
    config = tmp_path_factory.mktemp("home") / "gitconfig"
    settings = "[user]\nuseConfigOnly = true\n[init]\ndefaultBranch = main\ntemplateDir =\n[am]\nkeepcr = true\n"
    config.write_text(settings + "[diff]\nnoprefix = true\n[apply]\nwhitespace = error\n[commit]\ngpgSign = true\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(config))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Releases, and a series of two patches that was made on 2.5.1, as README.md says that one is exported.

    It serves 2.5.0 to 2.6.0, where other functions are around; on 2.7.0 it conflicts. The clone lacks its commits.
    """
    folder = tmp_path_factory.mktemp("original")
    git(folder, "init", "--quiet", "maker")
    maker, world = folder / "maker", World(folder / "clone", folder / "patches")
    release(maker, "2.4.0")
    release(maker, "2.5.0")
    release(maker, "2.5.1", BETWEEN.format(name="check"))
    git(maker, "branch", "series")
    release(maker, "2.5.2", BETWEEN.format(name="check") + BETWEEN.format(name="verify"))
    for path in (FABRIC, PYTORCH):
        edit(maker / path, "    def save(", f"{BETWEEN.format(name='first').lstrip(chr(10))}\n    def save(")
    write(maker, {"src/version.info": "2.6.0\n"})
    commit(maker, "Release 2.6.0")
    git(maker, "tag", "2.6.0")
    edit(maker / PYTORCH, "stage=2)", "stage=3)")
    write(maker, {"src/version.info": "2.7.0\n"})
    commit(maker, "Release 2.7.0")
    git(maker, "tag", "2.7.0")
    git(folder, "clone", "--quiet", "maker", "clone")
    git(maker, "switch", "--quiet", "series")
    change(maker, "fabric", f"{SUBJECTS[0]}\n\nFrozen parameters need not be saved.\n")
    change(maker, "pytorch", f"{SUBJECTS[1]}\n\nFrozen parameters need not be saved.\n")
    options = ("--zero-commit", "--full-index", "--no-signature", "--no-stat", "--quiet", "--src-prefix=a/")
    base = git(maker, "rev-parse", "2.5.1^{commit}").strip()
    git(maker, "format-patch", "-N", *options, "--dst-prefix=b/", f"--base={base}", "-o", str(world.line), "2.5.1")
    return world


@pytest.fixture
def world(original: World, tmp_path: Path) -> World:
    return World(
        shutil.copytree(original.clone, tmp_path / "clone"), shutil.copytree(original.patches, tmp_path / "patches")
    )


@pytest.mark.parametrize("tag", ["2.5.0", "2.5.1", "2.5.2", "2.6.0"])
def test_apply_remove_and_apply_again(world: World, tag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name for git; into the right places, where there are functions like `save` before it too."""
    world.at(tag)
    (world.clone / "notes.txt").write_text("untracked files do not matter")
    plain = world.tree
    world.run("apply")
    assert capsys.readouterr().out.startswith(f"applied the patches of {world.line} to {world.clone}")
    assert git(world.clone, "log", "--format=%an, %cn", "-2").splitlines() == ["Somebody, ds_frozen_patch"] * 2
    assert world.has_series()
    patched = world.tree
    assert world.refuses("apply").endswith(f"patches remove {world.clone}")
    for _ in range(2):
        world.run("remove")
        assert world.tree == plain
        assert world.refuses("remove").endswith("there is nothing to do")
        world.run("apply")
        assert world.tree == patched
    assert git(world.clone, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(world.clone, "fsck", "--no-dangling", "--connectivity-only") == ""


@pytest.mark.parametrize("tag", ["2.5.1", "2.6.0"])
def test_ends_of_lines_are_converted(world: World, tag: str) -> None:
    """By `core.autocrlf`, as on Windows; never in the patches themselves."""
    assert git(PATCHES, "check-attr", "text", "2.6/0001.patch") == "2.6/0001.patch: text: unset\n"
    git(world.clone, "config", "core.autocrlf", "true")
    git(world.clone, "config", "core.safecrlf", "true")
    world.at(tag)
    git(world.clone, "rm", "--quiet", "-r", "--cached", ".")
    git(world.clone, "reset", "--quiet", "--hard")
    plain = world.tree
    assert b"\r\n" in (world.clone / PYTORCH).read_bytes()
    world.run("apply")
    assert world.has_series()
    assert "\r" not in git(world.clone, "show", f"HEAD:{PYTORCH}")
    assert git(world.clone, "status", "--porcelain") == ""
    world.run("remove")
    assert world.tree == plain


def test_a_fork_with_commits_before_and_after(world: World) -> None:
    """A version and a branch of its own, and another way to take the series off, in between."""
    git(world.clone, "switch", "--quiet", "--create", "fork", "2.5.0")
    write(world.clone, {"src/version.info": "2.5.0+fork\n", "src/lightning/own.py": ""})
    edit(world.clone / "src/lightning/pytorch/CHANGELOG.md", "### Fixed\n", "### Fixed\n\n- Fixed our thing\n")
    commit(world.clone, "Our own")
    series.main(["apply", str(world.clone / "src")], world.patches)
    assert world.has_series()
    assert "- Added exclude\n" in (changes := read(world.clone / "src/lightning/pytorch/CHANGELOG.md"))
    assert "- Fixed our thing\n" in changes
    edit(world.clone / PYTORCH, "self.exclude = exclude\n", "self.exclude = exclude\n        self.own = 1\n")
    commit(world.clone, "Our own, beside it")
    assert "has 2 patches of the series as commits" in (refusal := world.refuses("apply"))
    assert refusal.endswith(f"python patches remove {world.clone}")
    git(world.clone, "reset", "--quiet", "--hard", "HEAD~")
    git(world.clone, "revert", "--no-edit", "HEAD~2..HEAD")
    world.run("apply")
    assert world.has_series()
    write(world.clone, {"src/lightning/own.py": "more = 1\n"})
    commit(world.clone, "Our own, after it")
    world.run("remove")
    assert not world.has_series()
    assert read(world.clone / "src/lightning/own.py") == "more = 1\n"


def test_half_a_series(world: World) -> None:
    world.at("2.5.1")
    git(world.clone, "am", "--quiet", "--no-keep-cr", str(patches_of(world.line)[0]))
    assert f"has 1 patches of the series as commits ({SUBJECTS[0]})" in world.refuses("apply")
    world.run("remove")
    world.run("apply")
    assert world.has_series()


def test_the_advice_for_a_conflict(world: World) -> None:
    """It names the patch and the file; what it says to do ends with a fork that can be patched again."""
    world.at("2.7.0")
    refusal = world.refuses("apply")
    assert f"do not apply to {world.clone}, nothing was changed: " in refusal
    assert f"CONFLICT (content): Merge conflict in {PYTORCH}" in refusal
    assert refusal.endswith(
        f"cd {world.clone}, git am --3way {world.line}/*.patch, resolve each conflict, git add, git am --continue"
    )
    with pytest.raises(SeriesError, match="Patch failed at 0002"):
        git(world.clone, "am", "--no-keep-cr", "--3way", *map(str, patches_of(world.line)))
    assert "is under way" in world.refuses("apply")
    merged = "    def __init__(self, stage=3, exclude=False):\n"
    text, count = re.subn(r"<<<<<<<.*\n.*\n=======\n.*\n>>>>>>>.*\n", merged, read(world.clone / PYTORCH))
    assert count == 1
    (world.clone / PYTORCH).write_text(text)
    git(world.clone, "add", "--all")
    git(world.clone, "am", "--continue")
    assert world.has_series()
    world.run("remove")
    assert not world.has_series()


def test_what_git_cannot_merge_without_the_tags(world: World, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", "--branch=2.6.0", f"file://{world.clone}", "shallow")
    shallow = World(tmp_path / "shallow", world.patches)
    assert shallow.refuses("apply").endswith("run git fetch --tags in it, which git needs to merge")


def test_a_dirty_tree(world: World) -> None:
    world.at("2.5.0")
    (world.clone / "src" / "version.info").write_text("2.5.0 ")
    assert "has uncommitted changes; commit or stash them first" in world.refuses("apply")


def test_nothing_is_left_half_applied(world: World) -> None:
    """Even where git refuses only the second patch."""
    world.at("2.5.0")
    hook = world.clone / ".git" / "hooks" / "applypatch-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\n! grep -q ^pytorch "$1"\n')
    hook.chmod(0o755)
    assert "nothing was changed" in world.refuses("apply")
    assert not (world.clone / ".git" / "rebase-apply").exists()


def test_lines_and_their_releases(world: World, tmp_path: Path) -> None:
    """A line serves what is released before the next one begins; a branch has a name, and is asked for by it."""
    world.at("2.4.0")
    assert "there are no patches for '2.4.0': the lines are 2.5" in world.refuses("apply")
    assert "there are no patches for 'main': the lines are 2.5" in world.refuses("apply", "--line", "main")
    world.run("apply", "--line", "2.5")
    assert world.has_series()
    assert [line.name for line in lines(PATCHES)][-2:] == ["2.6", "master"]
    for release, name in (("2.0.0", "2.0"), ("2.3.3", "2.2"), ("2.5.4", "2.5.0"), ("2.5.5+own", "2.5.5"), ("3", "2.6")):
        assert line_for(PATCHES, release).name == name
    with pytest.raises(SystemExit, match=f"{tmp_path} is no git checkout"):
        series.main(["apply", str(tmp_path)], world.patches)


def test_check(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the tags, and the HEAD, which is 2.7.0 and conflicts."""
    with pytest.raises(SystemExit, match=r"the patches are not for 2\.7\.0, HEAD"):
        series.main(["check", "--repo", str(world.clone)], world.patches)
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [f"{tag}, patches 2.5: ok" for tag in ("2.5.0", "2.5.1", "2.5.2", "2.6.0")]
    assert all("CONFLICT" in line for line in said[4:])


def test_check_finds_what_does_not_compile(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    edit(patches_of(world.line)[1], "+from lightning.pytorch", "+fromm lightning.pytorch")
    with pytest.raises(SystemExit):
        series.main(["check", "--repo", str(world.clone)], world.patches)
    assert "2.5.1, patches 2.5: tests/tests_pytorch/test_exclude.py does not compile" in capsys.readouterr().out


def test_deepspeed(tmp_path: Path) -> None:
    """Whose patches are in a folder of their own, found by what the checkout has."""
    git(tmp_path, "init", "--quiet", "clone")
    world = World(tmp_path / "clone", tmp_path / "patches")
    engine = "def save(path):\n    write(\n        path,\n    )\n"
    write(world.clone, {"version.txt": "0.19.5\n", "deepspeed/engine.py": engine})
    commit(world.clone, "0.19.5")
    git(world.clone, "tag", "v0.19.5")
    edit(world.clone / "deepspeed/engine.py", "path,", "path, small=True,")
    commit(world.clone, "Leave out frozen parameters")
    place = world.patches / "deepspeed" / "0.19"
    git(world.clone, "format-patch", "--quiet", "--src-prefix=a/", "--dst-prefix=b/", "-o", str(place), "v0.19.5")
    world.at("v0.19.5")
    world.run("apply")
    assert "small=True" in read(world.clone / "deepspeed/engine.py")
    series.main(["check", "--repo", str(world.clone)], world.patches)
    world.run("remove")
    assert read(world.clone / "deepspeed/engine.py") == engine


def site_packages(world: World, folder: Path, package: str) -> Path:
    """What the wheels of a release have, as if in an environment inside of a repository that ignores it."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    write(folder, {".gitignore": "*\n"})
    site = folder / "env" / "site-packages"
    names = {
        "lightning": ("lightning/fabric", "lightning/pytorch"),
        "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
    }
    world.at("2.5.0")
    for part, name in zip(("fabric", "pytorch"), names[package], strict=True):
        text = read(world.clone / f"src/lightning/{part}/strategies.py")
        text = text.replace("lightning.fabric", "lightning_fabric") if package == "pytorch_lightning" else text
        write(site, {f"{name}/strategies.py": text})
    return site


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_apply_to_package(world: World, tmp_path: Path, package: str) -> None:
    site = site_packages(world, tmp_path / "project", package)
    before = {file: read(file) for file in site.rglob("*.py")}
    for number, file in enumerate(before):
        os.link(file, tmp_path / f"cached{number}")
    changed = apply_to_package(world.line, site, package)
    assert sorted(site / path for path in changed) == sorted(before)
    assert all("        self.exclude = " in read(file) for file in before)
    # A file that the package installer's cache shares is not written to.
    assert [read(tmp_path / f"cached{number}") for number in range(2)] == list(before.values())
    with pytest.raises(SeriesError, match=f"does not apply to the {package} of"):
        apply_to_package(world.line, site, package)


def test_apply_to_package_wholly_or_not_at_all(world: World, tmp_path: Path) -> None:
    site = site_packages(world, tmp_path / "project", "lightning")
    (site / "lightning/pytorch/strategies.py").write_text("another release\n")
    before = read(site / "lightning/fabric/strategies.py")
    with pytest.raises(SeriesError, match=r"lightning/pytorch/strategies\.py"):
        apply_to_package(world.line, site, "lightning")
    assert read(site / "lightning/fabric/strategies.py") == before


REAL = [
    patch for repository in repositories(PATCHES) for line in lines(repository.folder) for patch in patches_of(line)
]


def test_the_real_patches_are_as_git_exports_them() -> None:
    """And as upstream takes them: each has a test and is told as a pull request; those of Lightning have changelogs."""
    for patch in REAL:
        text, name = read(patch), f"{patch.parent.name}/{patch.name}"
        assert re.match(r"From 0{40} Mon Sep 17 00:00:00 2001\nFrom: .*\nDate: .*\nSubject: \[PATCH\] .", text), name
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", subject(text)).strip("-")[:52]
        assert re.fullmatch(rf"\d{{4}}-{re.escape(slug)}\.patch", patch.name), name
        paths = [path for path, _ in diffs(text)]
        assert any(path.startswith("tests/") for path in paths), name
        assert patch.parent.parent.name == "deepspeed" or any(path.endswith("CHANGELOG.md") for path in paths), name
        parts = re.split(r"(?m)^\*\*(.*?)\*\*", text.partition("\ndiff --git ")[0])
        about = [part.strip(".") for part in parts[1::2]]
        assert about[-4:] == ["What is wrong", "How to see it", "What this does", "What it does not"], name
        program = "\n".join(line[4:] for line in parts[-5].splitlines() if line.startswith("    "))
        assert compile(program, name, "exec").co_names, f"{name}: no program shows what is wrong"
        assert not re.search(r"(?m)^\+.*[ \t\r]$|^(GIT binary patch|Binary files |Signed-off-by: )", text), name


def test_the_real_series_on_the_installed_deepspeed(tmp_path: Path) -> None:
    """In a copy of its code."""
    installed = version("deepspeed")
    folder = PATCHES / "deepspeed"
    if installed not in (line.name for line in lines(folder)):
        pytest.skip(f"DeepSpeed {installed} is installed, and there is no series that was made on it")
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    line = line_for(folder, installed)
    for path in touched(patches_of(line)):
        if (source := Path(spec.origin).parents[1] / path).is_file():
            write(tmp_path, {path: read(source)})
    for path in apply_to_package(line, tmp_path, "deepspeed"):
        compile(read(tmp_path / path), path, "exec")

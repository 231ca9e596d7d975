"""The tool for `patches/`, on a tiny repository that has the layout of Lightning's, and the real folder's form."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from series import check as series_check
from series import commands as series
from series.folder import PATCHES, SeriesError, already_applied, apply_to_package, git, read, read_index
from series.trial import contents

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
CHANGELOG = """# Changelog

## [{tag}] - 2025-01-01

### Fixed

- Fixed something

## [2.4.0] - 2024-01-01

### Fixed

- Fixed something
"""
MESSAGE = """{subject}

Frozen parameters need not be saved.

    save()
"""
BETWEEN = """
    def {name}(self, path):
        things.{name}(
            path,
        )
"""


@dataclass
class World:
    """A clone of the tiny repository and a folder with its series, each test's own."""

    clone: Path
    patches: Path

    @property
    def state(self) -> tuple[str, str, str]:
        """What a refused command must leave alone: the checkout's commit, what is changed in it, and the patches."""
        files = sorted(file for file in self.patches.rglob("*") if file.is_file())
        status = git(self.clone, "status", "--porcelain", "--branch")
        return git(self.clone, "rev-parse", "HEAD"), status, "".join(f"{file}\n{read(file)}" for file in files)

    def lines(self) -> dict[str, list[str]]:
        return {line.folder.name: list(line.tags) for line in read_index(self.patches)}

    def refuses(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        """The one sentence that a command line is refused with; nothing is changed."""
        before = self.state
        with pytest.raises(SystemExit) as refused:
            series.main(list(arguments), self.patches)
        assert self.state == before
        assert isinstance(refused.value.code, str)
        assert "Traceback" not in capsys.readouterr().err
        return refused.value.code


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
    git(root, "commit", "--quiet", "--message", MESSAGE.format(subject=subject))


def release(root: Path, tag: str, more: str = "") -> None:
    files = {f"src/lightning/{part}/CHANGELOG.md": CHANGELOG.format(tag=tag) for part in ("fabric", "pytorch")}
    files |= {f"src/lightning/{part}/strategies.py": STRATEGY.format(more=more) for part in ("fabric", "pytorch")}
    tests = {f"tests/tests_{part}/test_strategies.py": "def test():\n    pass\n" for part in ("fabric", "pytorch")}
    write(root, files | tests | {"src/version.info": f"{tag}\n", "docs/frozen.rst": "Title\n=====\n\nText\n"})
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
    if part == "pytorch":  # a second change to the same line
        edit(root / "src/lightning/fabric/strategies.py", "self.exclude = exclude\n", "self.exclude = bool(exclude)\n")
    write(root, {f"tests/tests_{part}/test_exclude.py": f"from lightning.{part} import strategies\n"})
    commit(root, subject)


@pytest.fixture(autouse=True, scope="module")
def _plain_git(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Git as somebody has it who has set things that must not matter."""
    config = tmp_path_factory.mktemp("home") / "gitconfig"
    settings = (
        "[user]\nname = Fork Keeper\nemail = keeper@example.invalid\n[init]\ndefaultBranch = main\ntemplateDir =\n"
        "[diff]\ncontext = 7\nnoprefix = true\n[format]\nnumbered = true\nsignature = me\nsubjectPrefix = FORK\n"
        "[core]\nabbrev = 8\n[am]\nthreeWay = true\n[apply]\nwhitespace = fix\n"
    )
    config.write_text(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(config))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Releases, and a series of two patches that was made on 2.5.1.

    It serves 2.5.0 and 2.5.2 alike; on 2.6.0 it applies, but `save` is no longer where it was; on 2.7.0 it conflicts.
    """
    folder = tmp_path_factory.mktemp("original")
    world = World(folder / "clone", folder / "patches")
    git(folder, "init", "--quiet", "clone")
    release(world.clone, "2.4.0")
    release(world.clone, "2.5.0")
    release(world.clone, "2.5.1", BETWEEN.format(name="check"))
    git(world.clone, "branch", "series")
    release(world.clone, "2.5.2", BETWEEN.format(name="check") + BETWEEN.format(name="verify"))
    git(world.clone, "switch", "--quiet", "--create", "elsewhere")
    for part in ("fabric", "pytorch"):
        file = world.clone / f"src/lightning/{part}/strategies.py"
        edit(
            file,
            "    def save(",
            "    def first(self, path):\n        things.first(\n            path,\n        )\n\n    def save(",
        )
    commit(world.clone, "Release 2.6.0")
    git(world.clone, "tag", "2.6.0")
    git(world.clone, "switch", "--quiet", "--detach", "2.5.2")
    edit(world.clone / "src/lightning/pytorch/strategies.py", "stage=2)", "stage=3)")
    commit(world.clone, "Release 2.7.0")
    git(world.clone, "tag", "2.7.0")
    git(world.clone, "switch", "--quiet", "series")
    change(world.clone, "fabric", "fabric: leave out `frozen` parameters (when asked to), which is a long subject")
    change(world.clone, "pytorch", "pytorch: leave out frozen parameters")
    world.patches.mkdir()
    index = {"lines": [{"folder": "2.5", "made_on": "2.5.1", "tags": ["2.5.0", "2.5.1"]}]}
    (world.patches / "index.json").write_text(json.dumps(index))
    series.record(world.patches, world.clone, "2.5")
    git(world.clone, "gc", "--quiet")  # fewer files to copy
    return world


@pytest.fixture
def patches(original: World, tmp_path: Path) -> Path:
    """The folder with the series, each test's own."""
    return shutil.copytree(original.patches, tmp_path / "patches")


@pytest.fixture
def world(original: World, patches: Path, tmp_path: Path) -> World:
    return World(shutil.copytree(original.clone, tmp_path / "clone"), patches)


def test_the_real_patches_are_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of DeepSpeed too."""
    series.main(["lint"], PATCHES)
    assert capsys.readouterr().out == "all patches are in order\n"


def test_the_real_index_has_every_release_but_the_malicious_ones() -> None:
    releases = [name for line in read_index(PATCHES) for name in (*line.tags, *line.untagged)]
    assert len(releases) == len(set(releases))
    assert {"2.0.0", "2.0.9.post0", "2.2.0.post0", "2.4.0", "2.5.4", "2.5.5", "2.6.6"} <= set(releases)
    assert not {"2.6.2", "2.6.3"} & set(releases)


def test_record_is_the_same_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a clone that the series was applied to, with other settings, at another time: byte for byte."""
    before = world.state[2]
    at(world, "2.5.1")
    series.apply(world.patches, world.clone)
    git(world.clone, "config", "diff.algorithm", "patience")
    git(world.clone, "config", "format.attach", "true")
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=5")
    (world.patches / "2.5" / "0003-old.patch").write_text("no longer in the series")
    series.record(world.patches, world.clone, "2.5")
    assert world.state[2] == before


def at(world: World, tag: str) -> None:
    git(world.clone, "switch", "--quiet", "--detach", tag)


def assert_in_save(world: World) -> None:
    """The change of `save` is there, and not in a function that has lines like its own."""
    text = read(world.clone / "src/lightning/fabric/strategies.py")
    assert "exclude=self.exclude" in text.partition("def save(")[2].partition("def load(")[0]


@pytest.mark.parametrize("tag", ["2.5.0", "2.5.1"])
def test_apply(world: World, tag: str) -> None:
    at(world, tag)
    (world.clone / "notes.txt").write_text("untracked files do not matter")
    assert series.apply(world.patches, world.clone).startswith("applied 2 patches")
    assert git(world.clone, "log", "--format=%an %cn", "-2").splitlines() == ["Fork Keeper Fork Keeper"] * 2
    assert_in_save(world)
    assert git(world.clone, "status", "--porcelain", "--untracked-files=no") == ""


def test_apply_to_a_fork(world: World) -> None:
    """Commits of its own, a version of its own, another branch, from a folder inside of it."""
    git(world.clone, "switch", "--quiet", "--create", "fork", "2.5.0")
    write(world.clone, {"src/version.info": "2.5.0+fork\n", "src/lightning/own.py": ""})
    commit(world.clone, "Our own")
    series.main(["apply", str(world.clone / "src")], world.patches)
    assert already_applied(world.clone, read_index(world.patches)[0].patches)


def test_apply_refuses_a_dirty_tree(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    (world.clone / "src" / "version.info").write_text("2.5.0 ")
    assert "has uncommitted changes; commit or stash them first" in world.refuses(capsys, "apply", str(world.clone))


def test_apply_refuses_while_an_am_is_under_way(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.7.0")
    with pytest.raises(SeriesError, match="Patch failed at 0002"):
        git(world.clone, "am", "--no-3way", *map(str, read_index(world.patches)[0].patches))
    assert "finish or abort it first" in world.refuses(capsys, "apply", str(world.clone))
    assert (world.clone / ".git" / "rebase-apply").exists()


def test_apply_refuses_what_cannot_be_merged(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how many hunks conflict, and where."""
    at(world, "2.7.0")
    refusal = world.refuses(capsys, "apply", str(world.clone))
    assert refusal.startswith("there is no series for Lightning 2.7.0, and the patches of ")
    assert "1 of 11 hunks conflict: 1 in src/lightning/pytorch/strategies.py; nothing was changed" in refusal
    assert refusal.endswith(f"in a worktree: python patches new {world.clone} HEAD --from 2.5")


@pytest.mark.parametrize("tag", ["2.4.0", "2.6.0"])
def test_apply_merges_into_an_unknown_release(world: World, tag: str) -> None:
    """From the nearest line, and into the right places: in 2.6.0 another function has lines like those of `save`."""
    at(world, tag)
    done = series.apply(world.patches, world.clone)
    assert done.startswith(f"merged 2 patches of {world.patches}/2.5, the nearest to Lightning {tag}, into")
    assert git(world.clone, "log", "--format=%an %cn", "-2").splitlines() == ["Fork Keeper Fork Keeper"] * 2
    assert_in_save(world)


def test_apply_merges_changelogs(world: World) -> None:
    """Entries of both sides are kept."""
    at(world, "2.5.2")
    file = world.clone / "src/lightning/pytorch/CHANGELOG.md"
    edit(file, "### Fixed\n", "### Fixed\n\n- Fixed another thing\n")
    commit(world.clone, "Upstream goes on")
    series.apply(world.patches, world.clone)
    assert "- Added exclude\n" in read(file)
    assert "- Fixed another thing\n" in read(file)


def test_apply_merges_into_what_has_a_part_of_it(world: World) -> None:
    """Which `git am` alone refuses."""
    at(world, "2.5.2")
    file = world.clone / "src/lightning/pytorch/strategies.py"
    edit(file, "    things,\n", "    things,\n    more,  # not lightning.pytorchx\n")
    commit(world.clone, "Upstream goes on")
    (line,) = read_index(world.patches)
    with pytest.raises(SeriesError, match="Patch failed at 0002"):
        git(world.clone, "am", "--no-3way", *map(str, line.patches))
    git(world.clone, "am", "--abort")
    series.apply(world.patches, world.clone)
    assert read(file).count("more,") == read(file).count("self.exclude = exclude") == 1


def test_apply_refuses_what_is_patched(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    series.apply(world.patches, world.clone)
    assert "has the patches of" in (refusal := world.refuses(capsys, "apply", str(world.clone)))
    assert refusal.endswith("already; there is nothing to do")
    git(world.clone, "reset", "--quiet", "--soft", "2.5.0")
    git(world.clone, "commit", "--quiet", "--message", "all in one")
    assert world.refuses(capsys, "apply", str(world.clone)).endswith("already; there is nothing to do")


def test_apply_refuses_half_a_series(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    git(world.clone, "am", "--quiet", str(read_index(world.patches)[0].patches[0]))
    refusal = world.refuses(capsys, "apply", str(world.clone))
    assert "has 1 of the 2 patches of" in refusal
    assert "(fabric: leave out `frozen` parameters" in refusal


def test_apply_does_not_land_elsewhere(world: World) -> None:
    """In 2.6.0 `git am` changes the function before `save`, although the index says that the series is for it."""
    at(world, "2.6.0")
    edit(world.patches / "index.json", '"2.5.0"', '"2.6.0"')
    assert series.apply(world.patches, world.clone).startswith(f"merged 2 patches of {world.patches}/2.5 into")
    assert_in_save(world)


def test_apply_leaves_nothing_half_applied(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where git refuses only the second patch, and only in the checkout itself."""
    at(world, "2.5.0")
    hook = world.clone / ".git" / "hooks" / "applypatch-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\n! grep -q ^pytorch "$1"\n')
    hook.chmod(0o755)
    assert "git am failed and was aborted, nothing was changed" in world.refuses(capsys, "apply", str(world.clone))
    assert not (world.clone / ".git" / "rebase-apply").exists()


def test_record_of_a_new_line(world: World) -> None:
    at(world, "2.5.0")
    series.apply(world.patches, world.clone)
    series.record(world.patches, world.clone, "2.5.0", since="2.5.0")
    assert world.lines() == {"2.5.0": ["2.5.0"], "2.5": ["2.5.0", "2.5.1"]}
    assert len(list((world.patches / "2.5.0").iterdir())) == 2


@pytest.fixture
def two_lines(world: World) -> World:
    """The series for 2.5, and below it a line 2.4 which has other names in one place, both from the same stack."""
    at(world, "2.4.0")
    series.apply(world.patches, world.clone)
    edit(world.clone / "src/lightning/pytorch/strategies.py", "exclude=False", "exclude=None")
    git(world.clone, "commit", "--quiet", "--all", "--amend", "--no-edit")
    series.record(world.patches, world.clone, "2.4", since="2.4.0")
    return world


def test_a_line_is_an_overlay(two_lines: World) -> None:
    """Its folder is made of it, byte for byte; it has what differs, and not the rest."""
    patches = two_lines.patches
    before = two_lines.state[2]
    assert two_lines.lines() == {"2.4": ["2.4.0"], "2.5": ["2.5.0", "2.5.1"]}
    (overlay,) = (patches / "overlays").iterdir()
    added = [line for line in read(overlay).splitlines() if line.startswith("++")]
    assert "++    def __init__(self, stage=2, exclude=None):" in added
    assert not [line for line in added if "import strategies" in line]
    shutil.rmtree(patches / "2.4")
    series.main(["export", "2.4"], patches)
    assert two_lines.state[2] == before
    (patches / "2.4" / "0009-own.patch").touch()
    assert any("2.4: is not what the stack and its overlay" in problem for problem in series_check.lint(patches))
    series.main(["export"], patches)
    assert two_lines.state[2] == before
    assert series_check.lint(patches) == []


def test_a_change_of_the_stack_is_one_of_older_lines(two_lines: World) -> None:
    git(two_lines.clone, "switch", "--quiet", "series")
    edit(two_lines.clone / "tests/tests_pytorch/test_exclude.py", "strategies", "strategies  # more")
    git(two_lines.clone, "commit", "--quiet", "--all", "--amend", "--no-edit")
    overlay = read(two_lines.patches / "overlays" / "2.4.diff")
    assert ", and made 2.4 anew" in series.record(two_lines.patches, two_lines.clone, "2.5")
    text = read(two_lines.patches / "2.4" / "0002-pytorch-leave-out-frozen-parameters.patch")
    assert "+from lightning.pytorch import strategies  # more\n" in text
    assert "exclude=None" in text
    assert read(two_lines.patches / "overlays" / "2.4.diff").count("\n") == overlay.count("\n")
    assert series_check.lint(two_lines.patches) == []
    assert series_check.check_clone(read_index(two_lines.patches), two_lines.clone, lambda _: None).problems == []


def test_a_change_that_an_older_line_cannot_follow(two_lines: World) -> None:
    """It says which, and what to do; the older line stays as it was, and the check of the files finds it."""
    git(two_lines.clone, "switch", "--quiet", "series")
    edit(two_lines.clone / "src/lightning/pytorch/strategies.py", "exclude=False", "exclude=0")
    git(two_lines.clone, "commit", "--quiet", "--all", "--amend", "--no-edit")
    old = contents(list((two_lines.patches / "2.4").iterdir()))
    with pytest.raises(SeriesError, match=r"2\.4 cannot follow the change: .*, and record that with --line 2\.4"):
        series.record(two_lines.patches, two_lines.clone, "2.5")
    assert contents(list((two_lines.patches / "2.4").iterdir())) == old
    assert any(line.startswith("2.4: cannot be made: overlays/2.4") for line in series_check.lint(two_lines.patches))
    with pytest.raises(SeriesError, match=r"overlays/2\.4\.diff does not apply"):
        series.export(two_lines.patches, ["2.4"])


def test_record_that_fails_leaves_the_old_series(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[Path]:
        raise SeriesError("the disk is full")

    monkeypatch.setattr(series, "format_series", fail)
    assert world.refuses(capsys, "record", str(world.clone), "--line", "2.5") == "the disk is full"


def test_new_release_that_a_series_serves(world: World) -> None:
    assert "patches/2.5 applies to 2.5.2 unchanged" in series.new(world.patches, world.clone, "2.5.2")
    assert world.lines() == {"2.5": ["2.5.0", "2.5.1", "2.5.2"]}
    assert series_check.lint(world.patches) == []


def test_new_release_that_conflicts(world: World) -> None:
    """From what `new` says to do, to a line of its own that passes the checks."""
    at(world, "2.5.1")
    git(world.clone, "branch", "--delete", "--force", "series")  # nobody else has what the patches were made from
    git(world.clone, "reflog", "expire", "--expire=now", "--all")
    git(world.clone, "gc", "--quiet", "--prune=now")
    done = series.new(world.patches, world.clone, "2.7.0", "2.5")
    tree = world.clone.with_name("clone-2.7")
    assert "patches/2.5 does not apply to 2.7.0 unchanged (Patch failed at 0002" in done
    assert done.endswith(f"python patches record {tree} --line 2.7 --since 2.7.0")
    assert world.lines() == {"2.5": ["2.5.0", "2.5.1"]}
    file = tree / "src/lightning/pytorch/strategies.py"
    merged = "    def __init__(self, stage=3, exclude=False):\n"
    text, count = re.subn(r"<<<<<<<.*\n.*\n=======\n.*\n>>>>>>>.*\n", merged, read(file))
    assert count == 1  # not only refused, but merged: git found the files that the patches were made from
    file.write_text(text)
    git(tree, "add", "--all")
    git(tree, "am", "--continue")
    series.main(done.partition("python patches ")[2].split(), world.patches)
    assert world.lines() == {"2.5": ["2.5.0", "2.5.1"], "2.7": ["2.7.0"]}
    assert series_check.lint(world.patches) == []
    report = series_check.check_clone(read_index(world.patches), world.clone, lambda _: None)
    assert report.problems == []


def test_new_release_where_it_lands_elsewhere(world: World) -> None:
    done = series.new(world.patches, world.clone, "2.6.0")
    assert "does not apply to 2.6.0 unchanged (it changes other places: Strategy.first in src/lightning/fabric" in done
    assert "all patches are applied; check them, and amend what is wrong" in done
    assert world.lines() == {"2.5": ["2.5.0", "2.5.1"]}


def test_check(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    series.main(["check", "--repo", str(world.clone)], world.patches)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 2.5.0 | 2.5 | yes | yes | yes | yes | - |",
        "| 2.5.1 | 2.5 | yes | yes | yes | yes | yes |",
    ]


@pytest.mark.parametrize(
    ("key", "old", "new", "row", "said"),
    [
        ("tags", "2.5.0", "2.7.0", "2.7.0: no - - - -", "2.7.0: patches/2.5 does not apply: Patch failed at 0002"),
        ("tags", "2.5.0", "2.6.0", "2.6.0: yes no yes yes -", "2.6.0: changes other places than on 2.5.1: Strategy.fi"),
        ("tags", "2.5.0", "2.5.9", "2.5.9: no - - - -", "2.5.9: is not in this clone, fetch it"),
        ("made_on", "2.5.1", "2.5.0", "2.5.0: yes yes yes yes no", "2.5.0: patches/2.5 is not what git would export"),
        ("made_on", "2.5.1", "2.5.8", "2.5.0: yes no yes yes -", "2.5.0: there is no 2.5.8 to compare with"),
    ],
)
def test_check_finds(
    world: World, capsys: pytest.CaptureFixture[str], key: str, old: str, new: str, row: str, said: str
) -> None:
    before, _, after = read(world.patches / "index.json").partition(f'"{key}"')
    (world.patches / "index.json").write_text(f'{before}"{key}"{after.replace(old, new, 1)}')
    with pytest.raises(SystemExit) as refused:
        series.main(["check", "--repo", str(world.clone)], world.patches)
    tag, _, cells = row.partition(": ")
    assert f"| {tag} | 2.5 | {' | '.join(cells.split())} |" in capsys.readouterr().out.splitlines()
    assert said in str(refused.value.code)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("index.json", ', "2.5.1"]', "]", "index.json: says that 2.5 was made on 2.5.1, which is not one"),
        ("index.json", '"2.5.0", ', '"2.5.1", ', "index.json: has 2.5.1 2 times, keep it in one line"),
        ("index.json", '"2.5.0", ', '"2.6.3", ', "index.json: lists 2.6.3, which was a malicious upload; remove it"),
        ("index.json", '"2.5.0", ', '"main", ', "index.json: main is neither a release nor a whole commit"),
        ("index.json", '"2.5"', '"2.6"', "index.json: has 2.6, which is no folder"),
        ("index.json", '"2.5"', '"2.6"', "index.json: does not list the folder 2.5"),
        ("index.json", '"tags"', '"tag"', "index.json: cannot be read (KeyError: 'tags'); it must be"),
        ("index.json", "}", "", "index.json: cannot be read (JSONDecodeError"),
        ("0002", "From 0000", "From 1000", "does not begin with a commit of zeros"),
        ("0002", "\nDate:", "\nWhen:", "has no Date: header"),
        ("0002", "\nFrom:", "\nBy:", "has no From: header"),
        ("0002", "[PATCH]", "[FORK 2/2]", "has no Subject: that begins with [PATCH]"),
        ("0002", "leave out", "leave away", "should be named 0002-pytorch-leave-away-frozen-parameters.patch"),
        ("0002", "Frozen parameters need not be saved.\n", "", "has no text that says why"),
        ("0002", "    save()\n", "", "has no program that shows what is wrong"),
        ("0002", "    save()\n", "    save()\n\nBug: none\nForwarded: no\n", "has trailers at the end of its message"),
        ("0002", "\ndiff --git", "\n---\n a.py | 2 +-\n\ndiff --git", "has a summary between --- and its changes"),
        ("0002", r"(index [0-9a-f]{10})[0-9a-f]{30}", r"\1", "has a shortened index "),
        ("0002", r"\Z", "-- \n2.40.0\n", "has git's signature"),
        ("0002", "self.exclude = exclude", "self.exclude = exclude ", "adds trailing whitespace in '+"),
        ("0002", "src/lightning/pytorch/st", "src/pytorch/st", "changes src/pytorch/strategies.py, a series"),
        ("0002", "tests/tests_pytorch/", "docs/", "changes nothing in tests/"),
        ("0002", "CHANGELOG.md", "CHANGES.md", "changes no CHANGELOG.md"),
        ("0002", r"\Z", "diff --git a/docs/a.png b/docs/a.png\nGIT binary patch\n", "changes a binary file"),
        ("0002", r"(?s)diff --git.*", "", "changes nothing, remove it"),
    ],
)
def test_lint_finds(patches: Path, file: str, old: str, new: str, said: str) -> None:
    (found,) = patches.rglob(f"{file}*")
    pattern = old if re.match(r"\\|\(", old) else re.escape(old)
    text = re.sub(pattern, new, read(found))
    assert text != read(found)
    found.write_text(text)
    problems = series_check.lint(patches)
    assert [problem for problem in problems if said in problem], problems
    assert all(": " in problem for problem in problems)


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
    at(world, "2.5.0")
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
    changed = apply_to_package(world.patches / "2.5", site, package)
    assert sorted(site / path for path in changed) == sorted(before)
    assert all("        self.exclude = " in read(file) for file in before)
    # A file that the package installer's cache shares is not written to.
    assert [read(tmp_path / f"cached{number}") for number in range(2)] == list(before.values())
    with pytest.raises(SeriesError, match=f"does not apply to the {package} of"):
        apply_to_package(world.patches / "2.5", site, package)


def test_apply_to_package_wholly_or_not_at_all(world: World, tmp_path: Path) -> None:
    site = site_packages(world, tmp_path / "project", "lightning")
    (site / "lightning/pytorch/strategies.py").write_text("another release\n")
    before = read(site / "lightning/fabric/strategies.py")
    with pytest.raises(SeriesError, match=r"lightning/pytorch/strategies\.py"):
        apply_to_package(world.patches / "2.5", site, "lightning")
    assert read(site / "lightning/fabric/strategies.py") == before

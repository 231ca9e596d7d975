"""The tool for `patches/`, on a tiny repository that has the layout of Lightning's, and the real folder's form."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from series import check as series_check
from series import commands as series
from series.folder import PATCHES, SeriesError, already_applied, apply_to_package, for_package, git, read, read_index
from series.trial import contents, landing, unlike

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


def test_record_is_in_order(original: World) -> None:
    names = [
        "0001-fabric-leave-out-frozen-parameters-when-asked-to-whi.patch",
        "0002-pytorch-leave-out-frozen-parameters.patch",
    ]
    assert sorted(file.name for file in (original.patches / "2.5").iterdir()) == names
    assert series_check.lint(original.patches) == []


def test_record_is_the_same_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a clone that the series was applied to, with other settings, at another time: byte for byte."""
    before = world.state[2]
    git(world.clone, "switch", "--quiet", "--detach", "2.5.1")
    series.apply(world.patches, world.clone)
    git(world.clone, "config", "diff.algorithm", "patience")
    git(world.clone, "config", "format.attach", "true")
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=5")
    (world.patches / "2.5" / "0003-old.patch").write_text("no longer in the series")
    series.record(world.patches, world.clone, "2.5")
    assert world.state[2] == before


@pytest.mark.parametrize("tag", ["2.5.0", "2.5.1"])
def test_apply(world: World, tag: str) -> None:
    git(world.clone, "switch", "--quiet", "--detach", tag)
    (world.clone / "notes.txt").write_text("untracked files do not matter")
    assert series.apply(world.patches, world.clone).startswith("applied 2 patches")
    assert git(world.clone, "log", "--format=%an %cn", "-2").splitlines() == ["Fork Keeper Fork Keeper"] * 2
    assert "exclude=self.exclude" in read(world.clone / "src/lightning/fabric/strategies.py")
    assert git(world.clone, "status", "--porcelain", "--untracked-files=no") == ""


def test_apply_to_a_fork(world: World) -> None:
    """Commits of its own, a version of its own, another branch, from a folder inside of it."""
    git(world.clone, "switch", "--quiet", "--create", "fork", "2.5.0")
    write(world.clone, {"src/version.info": "2.5.0+fork\n", "src/lightning/own.py": ""})
    commit(world.clone, "Our own")
    series.main(["apply", str(world.clone / "src")], world.patches)
    assert already_applied(world.clone, read_index(world.patches)[0].patches)


def at(world: World, tag: str) -> None:
    git(world.clone, "switch", "--quiet", "--detach", tag)


def test_apply_refuses_what_is_no_checkout(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no git checkout; name a clone" in world.refuses(capsys, "apply", str(world.patches))
    assert "is no git checkout; name a clone" in world.refuses(capsys, "apply", str(world.clone / "nothing"))


def test_apply_refuses_another_repository(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "other")
    refusal = world.refuses(capsys, "apply", str(tmp_path / "other"))
    assert "other has no src/lightning and no deepspeed; name a clone" in refusal


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
    text = read(world.clone / "src/lightning/fabric/strategies.py")
    assert "exclude=self.exclude" in text.partition("def save(")[2].partition("def load(")[0]


def test_apply_merges_no_part_of_a_series(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one that does not apply to the release that it was made on either."""
    at(world, "2.5.0")
    edit(read_index(world.patches)[0].patches[1], "         self.config = None", "         self.config = 0")
    refusal = world.refuses(capsys, "apply", str(world.clone))
    assert "2.5 does not apply to 2.5.1 itself (Patch failed at 0002" in refusal
    assert refusal.endswith("make it anew: python patches export")


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


def test_apply_merges_no_file_that_is_gone(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.2")
    git(world.clone, "mv", "src/lightning/pytorch/strategies.py", "src/lightning/pytorch/others.py")
    commit(world.clone, "Upstream moves things")
    assert "in src/lightning/pytorch/strategies.py" in world.refuses(capsys, "apply", str(world.clone))


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


def test_apply_refuses_patched_code_that_was_changed_since(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    series.apply(world.patches, world.clone)
    edit(world.clone / "src/lightning/pytorch/strategies.py", "self.exclude = exclude", "self.exclude = bool(exclude)")
    commit(world.clone, "Our own")
    assert "has all patches of" in world.refuses(capsys, "apply", str(world.clone))


def test_apply_refuses_other_code(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    edit(world.clone / "src/lightning/pytorch/strategies.py", "self.config = None", "self.config = {}")
    commit(world.clone, "Our own")
    refusal = world.refuses(capsys, "apply", str(world.clone))
    assert refusal.startswith("the checkout differs from the releases of Lightning, and the patches of ")
    assert "1 of 11 hunks conflict: 1 in src/lightning/pytorch/strategies.py; nothing was changed" in refusal


def test_apply_does_not_land_elsewhere(world: World) -> None:
    """In 2.6.0 `git am` changes the function before `save`, although the index says that the series is for it."""
    at(world, "2.6.0")
    edit(world.patches / "index.json", '"2.5.0"', '"2.6.0"')
    assert series.apply(world.patches, world.clone).startswith(f"merged 2 patches of {world.patches}/2.5 into")
    text = read(world.clone / "src/lightning/fabric/strategies.py")
    assert "exclude=self.exclude" in text.partition("def save(")[2].partition("def load(")[0]


def test_apply_says_what_it_could_not_compare(world: World) -> None:
    at(world, "2.5.0")
    git(world.clone, "tag", "--delete", "2.5.1")
    assert "2.5.1 is not in this clone" in series.apply(world.patches, world.clone)


def test_apply_leaves_nothing_half_applied(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where git refuses only the second patch, and only in the checkout itself."""
    at(world, "2.5.0")
    hook = world.clone / ".git" / "hooks" / "applypatch-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\n! grep -q ^pytorch "$1"\n')
    hook.chmod(0o755)
    assert "git am failed and was aborted, nothing was changed" in world.refuses(capsys, "apply", str(world.clone))
    assert not (world.clone / ".git" / "rebase-apply").exists()


def test_apply_refuses_a_folder_without_patches(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    at(world, "2.5.0")
    shutil.rmtree(world.patches / "2.5")
    assert "has no patches; get them" in world.refuses(capsys, "apply", str(world.clone))


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
    assert [
        problem for problem in series_check.lint(patches) if "2.4: is not what the stack and its overlay" in problem
    ]
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
    with pytest.raises(
        SeriesError, match=r"patches/2\.4 cannot follow the change: .*, and record that with --line 2\.4"
    ):
        series.record(two_lines.patches, two_lines.clone, "2.5")
    assert contents(list((two_lines.patches / "2.4").iterdir())) == old
    assert [
        line for line in series_check.lint(two_lines.patches) if line.startswith("2.4: cannot be made: overlays/2.4")
    ]
    with pytest.raises(SeriesError, match=r"overlays/2\.4\.diff does not apply"):
        series.export(two_lines.patches, ["2.4"])


def test_export_refuses_an_unknown_line(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.refuses(capsys, "export", "2.8") == "there is no line 2.8; there are 2.5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--line", "2.8"], "there is no line 2.8 (there are 2.5); for a new one, name its release with --since"),
        (["--line", "../2.8", "--since", "2.5.0"], "../2.8 cannot be a folder of patches/"),
        (["--line", "2.5", "--since", "nothing"], "has no nothing; fetch it with git fetch --tags"),
        (["--line", "2.5", "--since", "2.7.0"], "is not at commits that follow 2.7.0"),
        (["--line", "2.5", "--since", "series"], "is not at commits that follow series"),
    ],
)
def test_record_refuses(world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in world.refuses(capsys, "record", str(world.clone), *arguments)


def test_record_refuses_merges(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    git(world.clone, "merge", "--quiet", "--no-edit", "--strategy", "ours", "2.5.2")
    assert "there are merge commits after 2.5.1" in world.refuses(capsys, "record", str(world.clone), "--line", "2.5")


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


def test_new_release_that_had_no_tag(world: World) -> None:
    edit(world.patches / "index.json", '"2.5.1"]', '"2.5.1"], "untagged": ["2.5.2"]')
    series.new(world.patches, world.clone, "2.5.2")
    (line,) = read_index(world.patches)
    assert (line.tags, line.untagged) == (("2.5.0", "2.5.1", "2.5.2"), ())


def test_new_commit(world: World) -> None:
    commit = git(world.clone, "rev-parse", "2.5.2").strip()
    series.new(world.patches, world.clone, commit[:8])
    assert world.lines() == {"2.5": ["2.5.0", "2.5.1", commit]}


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["2.5.1"], "patches/2.5 is for 2.5.1 already"),
        (["9.9.9"], "has no 9.9.9; fetch it"),
        (["2.5.2", "--from", "2.8"], "there is no line 2.8; there are 2.5"),
    ],
)
def test_new_refuses(world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in world.refuses(capsys, "new", str(world.clone), *arguments)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("2.5.7", "2.5"),
        ("2.6.0rc1", "2.5"),
        ("2.7.0", "2.6"),
        ("2.6.2", "master"),
        ("1.9", "2.5"),
        ("7f0c3436cd", "master"),
        ("1".zfill(40), "master"),
    ],
)
def test_nearest(tmp_path: Path, name: str, folder: str) -> None:
    tags = {"2.5": ["2.5.0", "2.5.6"], "2.6": ["2.6.0", "2.6.5"], "master": ["7f" * 20]}
    lines = [{"folder": name, "made_on": listed[0], "tags": listed} for name, listed in tags.items()]
    (tmp_path / "index.json").write_text(json.dumps({"lines": lines}))
    assert series.nearest(read_index(tmp_path), name).folder.name == folder


def test_check(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    series.main(["check", "--repo", str(world.clone)], world.patches)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 2.5.0 | 2.5 | yes | yes | yes | yes | - |",
        "| 2.5.1 | 2.5 | yes | yes | yes | yes | yes |",
    ]


@pytest.mark.parametrize(
    ("old", "new", "row", "said"),
    [
        (
            '"2.5.0", ',
            '"2.7.0", ',
            "| 2.7.0 | 2.5 | no | - | - | - | - |",
            "2.7.0: patches/2.5 does not apply: Patch failed at 0002",
        ),
        (
            '"2.5.0", ',
            '"2.6.0", ',
            "| 2.6.0 | 2.5 | yes | no | yes | yes | - |",
            "2.6.0: changes other places than on 2.5.1: Strategy.first in",
        ),
        (
            '"2.5.0", ',
            '"2.5.9", ',
            "| 2.5.9 | 2.5 | no | - | - | - | - |",
            "2.5.9: is not in this clone, fetch it",
        ),
        (
            '": "2.5.1"',
            '": "2.5.0"',
            "| 2.5.0 | 2.5 | yes | yes | yes | yes | no |",
            "2.5.0: patches/2.5 is not what git would export",
        ),
        (
            '": "2.5.1"',
            '": "2.5.8"',
            "| 2.5.0 | 2.5 | yes | no | yes | yes | - |",
            "2.5.0: there is no 2.5.8 to compare with",
        ),
    ],
)
def test_check_finds(world: World, capsys: pytest.CaptureFixture[str], old: str, new: str, row: str, said: str) -> None:
    edit(world.patches / "index.json", old, new)
    with pytest.raises(SystemExit) as refused:
        series.main(["check", "--repo", str(world.clone)], world.patches)
    assert row in capsys.readouterr().out.splitlines()
    assert said in str(refused.value.code)


def test_check_finds_what_does_not_compile(world: World) -> None:
    (line,) = read_index(world.patches)
    edit(line.patches[0], "+            exclude=self.exclude,", "+            exclude=self.exclude(,")
    report = series_check.check_clone([line], world.clone, lambda _: None)
    assert [problem for problem in report.problems if re.match("2.5.0: .* does not compile: line", problem)]


def test_check_refuses_what_is_no_clone(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no git repository; name a clone" in world.refuses(capsys, "check", "--repo", str(world.patches))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "index.json",
            '["2.5.0", "2.5.1"]',
            '["2.5.0"]',
            "index.json: says that 2.5 was made on 2.5.1, which is not one",
        ),
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
        (
            "0002",
            "leave out frozen",
            "leave away frozen",
            "should be named 0002-pytorch-leave-away-frozen-parameters.patch",
        ),
        ("0002", "Frozen parameters need not be saved.\n", "", "has no text that says why"),
        ("0002", "    save()\n", "", "has no program that shows what is wrong"),
        ("0002", "    save()\n", "    save()\n\nBug: none\nForwarded: no\n", "has trailers at the end of its message"),
        ("0002", "\ndiff --git", "\n---\n a.py | 2 +-\n\ndiff --git", "has a summary between --- and its changes"),
        ("0002", r"(index [0-9a-f]{10})[0-9a-f]{30}", r"\1", "has a shortened index "),
        ("0002", r"\Z", "-- \n2.40.0\n", "has git's signature"),
        ("0002", "self.exclude = exclude", "self.exclude = exclude ", "adds trailing whitespace in '+"),
        (
            "0002",
            "src/lightning/pytorch/strategies.py",
            "src/pytorch/strategies.py",
            "changes src/pytorch/strategies.py, a series",
        ),
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


def test_lint_finds_files(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """All problems are told, a line each."""
    folder = world.patches / "2.5"
    (folder / "0002-pytorch-leave-out-frozen-parameters.patch").rename(
        folder / "0003-pytorch-leave-out-frozen-parameters.patch"
    )
    (folder / "README").write_text("")
    assert world.refuses(capsys, "lint").splitlines() == [
        "2.5/0003-pytorch-leave-out-frozen-parameters.patch: should be named "
        f"0002-pytorch-leave-out-frozen-parameters.patch by its place and its subject, {series_check.RECORD_ANEW}",
        "2.5/README: is not a patch named like 0001-slug.patch, remove it",
    ]


def test_lint_without_an_index(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.patches / "index.json").unlink()
    assert "index.json: there is no such file" in world.refuses(capsys, "lint")


@pytest.mark.parametrize("subject", ["Fix: `a.b` -- (c)...", "..a..b/", "x" * 80, "Ünïcode ✓ too", "a. ", "[fabric] b"])
def test_slug(tmp_path: Path, subject: str) -> None:
    """As git makes it."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", subject)
    git(tmp_path, "format-patch", "--root", "--always", "--quiet", "--output-directory", str(tmp_path))
    (made,) = tmp_path.glob("*.patch")
    assert made.name == f"0001-{series_check.slug(subject)[:52]}.patch"


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


def test_apply_to_package_without_patches(tmp_path: Path) -> None:
    with pytest.raises(SeriesError, match="has no patch that changes lightning"):
        apply_to_package(tmp_path, tmp_path, "lightning")


@pytest.mark.parametrize(
    ("line", "renamed"),
    [
        ("from lightning.fabric.utilities import x", "from lightning_fabric.utilities import x"),
        ("import lightning.pytorch", "import pytorch_lightning"),
        ("import lightning.pytorch as pl", "import pytorch_lightning as pl"),
        ('"lightning.pytorch.loggers"', '"pytorch_lightning.loggers"'),
        (
            ":class:`~lightning.pytorch.Trainer` and lightning.fabric.",
            ":class:`~pytorch_lightning.Trainer` and lightning_fabric.",
        ),
        ("https://lightning.ai/docs/pytorch/stable", "https://lightning.ai/docs/pytorch/stable"),
        ("lightning.pytorchx lightning.fabric_x", "lightning.pytorchx lightning.fabric_x"),
        ("src/lightning/pytorch/x.py", "src/lightning/pytorch/x.py"),
    ],
)
def test_for_package(line: str, renamed: str) -> None:
    patch = (
        "From 0\n\ndiff --git a/src/lightning/pytorch/x.py b/src/lightning/pytorch/x.py\n"
        "--- a/src/lightning/pytorch/x.py\n+++ b/src/lightning/pytorch/x.py\n@@ -1,3 +1,3 @@\n"
        f" {line}\n-{line}\n+{line}\n"
        "diff --git a/tests/x.py b/tests/x.py\n@@ -1 +1 @@\n-a\n+b\n"
        "diff --git a/src/lightning/pytorch/CHANGELOG.md b/src/lightning/pytorch/CHANGELOG.md\n@@ -1 +1 @@\n-a\n+b\n"
    )
    for package, path, text in (
        ("lightning", "lightning/pytorch", line),
        ("pytorch_lightning", "pytorch_lightning", renamed),
    ):
        head = f"diff --git a/{path}/x.py b/{path}/x.py\n--- a/{path}/x.py\n+++ b/{path}/x.py\n@@ -1,3 +1,3 @@\n"
        assert for_package(patch, package) == f"{head} {text}\n-{text}\n+{text}\n"


def test_for_package_that_has_no_such_file() -> None:
    patch = "diff --git a/src/lightning/data/x.py b/src/lightning/data/x.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert "lightning/data" in for_package(patch, "lightning")
    with pytest.raises(SeriesError, match=r"src/lightning/data/x\.py is not in pytorch_lightning"):
        for_package(patch, "pytorch_lightning")


PYTHON = "import a\n\n\nclass A:\n    def f(self):\n        pass\n\n    @a\n    def g(self):\n        pass\n"
MARKDOWN = "# Log\n\n## [{}]\n\n### Added\n\n-\n\n### Fixed\n\n-\n\n## [1]\n\n### Added\n\n-\n"
RST = "One\n===\n\ntext\n\nTwo\n---\n\ntext\n"


@pytest.mark.parametrize(
    ("path", "text", "changes", "where"),
    [
        ("a.py", PYTHON, ("        pass\n\n", "        pass\n        return\n\n"), "A.f in a.py"),
        ("a.py", PYTHON, ("        pass\n\n", "        return\n\n"), "A.f in a.py"),
        ("a.py", PYTHON, ("    @a\n", "    @a\n    @b\n"), "A.g in a.py"),
        ("a.py", PYTHON, ("class A:\n", "class A:\n    x = 1\n"), "A in a.py"),
        ("a.py", PYTHON, ("import a\n", "import a\nimport b\n"), "a.py"),
        ("a.py", PYTHON, (PYTHON, "class A:\n"), "A in a.py, A.f in a.py, A.g in a.py, a.py"),
        ("a.md", MARKDOWN.format(2), ("Added\n\n-\n", "Added\n\n-\n- x\n"), "release 1 ### Added in a.md"),
        ("a.md", MARKDOWN.format(2), ("## [1]", "## [1.5]\n\n- x\n\n## [1]"), "## [1.5] after release 1 in a.md"),
        ("a.md", MARKDOWN.format(2), ("# Log", "# Log\n\n## [new]\n\n- x"), "## [new] after the head in a.md"),
        ("a.rst", RST, ("Two", "New\n---\n\ntext\n\nTwo"), "New after One in a.rst"),
        ("a.rst", RST, ("Two\n---\n\ntext", "Two\n---\n\nother"), "Two in a.rst"),
        ("a.txt", "text\n", ("text", "other"), "a.txt"),
    ],
)
def test_landing(path: str, text: str, changes: tuple[str, str], where: str) -> None:
    changed = landing({path: text}, {path: text.replace(*changes, 1)})
    assert unlike(changed, {}).split(", ") == sorted(where.split(", "), key=lambda place: place != path)
    # It does not depend on what is above, or on a release's name.
    other = text.replace("import a\n", "import a\nimport z\n").replace("[2]", "[3]").replace("One\n", "text\n\nOne\n")
    moved = landing({path: other}, {path: other.replace(*changes, 1)})
    assert unlike(changed, moved) == "" or text == changes[0]


def test_landing_within_a_function() -> None:
    """Where a function was the same, it must be the same again; else the lines must be."""
    text = "def f():\n    a()\n    a()\n"
    first, second = "def f():\n    a()\n    b()\n    a()\n", "def f():\n    a()\n    a()\n    b()\n"
    changed = landing({"a.py": text}, {"a.py": first})
    assert unlike(changed, landing({"a.py": text}, {"a.py": first})) == ""
    assert unlike(changed, landing({"a.py": text}, {"a.py": second})) == "f in a.py"
    assert unlike(changed, landing({"a.py": f"{text}    c()\n"}, {"a.py": f"{second}    c()\n"})) == ""
    assert unlike(changed, landing({"a.py": f"{text}    c()\n"}, {"a.py": f"{text}    c()\n    d()\n"})) == "f in a.py"


INSTALLER = """
import subprocess, sys
from pathlib import Path

_, clone, *_, target, _, wanted = sys.argv
release = wanted.partition("==")[2]
for part, renamed in (("fabric", "lightning_fabric"), ("pytorch", "pytorch_lightning")):
    show = ["git", "-C", clone, "show", f"{release}:src/lightning/{part}/strategies.py"]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    for name, own in ((f"lightning/{part}", text), (renamed, text.replace("lightning.fabric", "lightning_fabric"))):
        Path(target, name).mkdir(parents=True)
        Path(target, name, "strategies.py").write_text(own)
"""


def test_check_of_wheels(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an installer that makes wheels of tags; 2.7.0 does not apply, and 2.9.0 cannot be had."""
    (tmp_path / "installer.py").write_text(INSTALLER)
    monkeypatch.setattr(
        series_check, "_installer", lambda: [sys.executable, str(tmp_path / "installer.py"), str(world.clone)]
    )
    monkeypatch.setattr(series_check, "_import_all", lambda _, releases: dict.fromkeys(releases, "") | {"2.5.2": "no"})
    edit(
        world.patches / "index.json",
        '"2.5.1"]',
        f'"2.5.1", "2.6.0", "2.7.0", "{40 * "a"}"], "untagged": ["2.5.2", "2.9.0"]',
    )
    report = series_check.check_wheels(read_index(world.patches), lambda _: None)
    assert report.rows == [
        ("2.5.0", "2.5", "lightning", "yes", "yes", "yes", "-"),
        ("2.5.0", "2.5", "pytorch_lightning", "yes", "yes", "yes", "yes"),
        ("2.5.1", "2.5", "lightning", "yes", "yes", "yes", "-"),
        ("2.5.1", "2.5", "pytorch_lightning", "yes", "yes", "yes", "yes"),
        ("2.6.0", "2.5", "lightning", "yes", "no", "yes", "-"),
        ("2.6.0", "2.5", "pytorch_lightning", "yes", "no", "yes", "yes"),
        ("2.7.0", "2.5", "lightning", "no", "-", "-", "-"),
        ("2.7.0", "2.5", "pytorch_lightning", "no", "-", "-", "-"),
        ("2.5.2", "2.5", "lightning", "yes", "yes", "yes", "-"),
        ("2.5.2", "2.5", "pytorch_lightning", "yes", "yes", "yes", "no"),
        ("2.9.0", "2.5", "lightning", "no", "-", "-", "-"),
        ("2.9.0", "2.5", "pytorch_lightning", "no", "-", "-", "-"),
    ]
    said = [
        "2.6.0: changes other places",
        "2.7.0: .* does not apply",
        "2.5.2: cannot be imported: no",
        "2.9.0: cannot be installed",
    ]
    assert all(any(re.match(f"pytorch_lightning {words}", problem) for problem in report.problems) for words in said)
    assert len(report.problems) == 7


def test_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each release's own modules are what is imported; what ends the process is told of the rest."""
    module = "class DeepSpeedStrategy:\n    def __init__(self, {}): ...\n"
    contents = {
        "good": module.format("exclude_frozen_parameters"),
        "bad": module.format("stage"),
        "again": module.format("exclude_frozen_parameters"),
        "broken": "import no_such_module",
        "deadly": "import os; os._exit(1)",
        "installed": module.format("exclude_frozen_parameters"),
    }
    for name, text in contents.items():
        for package in ("pytorch_lightning", "lightning_fabric"):
            parts = {
                f"{package}/__init__.py": "",
                f"{package}/utilities/__init__.py": "",
                f"{package}/strategies/__init__.py": "",
            }
            own = {f"{package}/strategies/deepspeed.py": text, f"{package}/utilities/deepspeed.py": ""}
            write(tmp_path / name, parts | own)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    found = series_check._import_all(tmp_path, ["good", "bad", "again", "broken", "empty", "deadly", "last"])
    installed = tmp_path / "installed" / "pytorch_lightning" / "strategies" / "deepspeed.py"
    assert found == {
        "good": "",
        "bad": "DeepSpeedStrategy of pytorch_lightning.strategies.deepspeed takes no exclude_frozen_parameters",
        "again": "",
        "broken": "ModuleNotFoundError: No module named 'no_such_module'",
        "empty": f"pytorch_lightning.strategies.deepspeed was imported from {installed}",
        "deadly": "the process ended: no reason given",
        "last": "the process ended: no reason given",
    }


def test_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\r\n")
    assert contents([tmp_path / "a"]) == {"a": "\udcff\r\n"}

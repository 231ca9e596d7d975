"""The series for DeepSpeed: the tool on a tiny repository, and the real series on the release that is installed."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from series import commands as series
from series.folder import OF_DEEPSPEED, PATCHES, Line, SeriesError, apply_to_package, git, read, read_index, touched

REAL = read_index(PATCHES / OF_DEEPSPEED)
ENGINE = "def save(path):\n    write(\n        path,\n    )\n"
MESSAGE = """Leave out frozen parameters

They need not be saved.

    engine.save()
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A release of a tiny DeepSpeed, and a commit after it, on the branch that is checked out."""
    git(tmp_path, "init", "--quiet", "clone")
    clone = tmp_path / "clone"
    for path, text in {"version.txt": "0.19.5\n", "deepspeed/engine.py": ENGINE}.items():
        (clone / path).parent.mkdir(exist_ok=True)
        (clone / path).write_text(text)
    commit(clone, "0.19.5")
    git(clone, "tag", "v0.19.5")
    (clone / "deepspeed/engine.py").write_text(ENGINE.replace("path,", "path, small=True,"))
    (clone / "tests").mkdir()
    (clone / "tests/test_engine.py").write_text("def test():\n    pass\n")
    return clone


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """An index without lines, in the place of DeepSpeed's."""
    folder = tmp_path / "patches" / OF_DEEPSPEED
    folder.mkdir(parents=True)
    for index in (folder, folder.parent):
        (index / "index.json").write_text(json.dumps({"lines": []}))
    return folder.parent


def commit(clone: Path, message: str) -> None:
    git(clone, "add", "--all")
    author = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.invalid")
    git(clone, *author, "commit", "--quiet", "--message", message)


@pytest.mark.everyday
@pytest.mark.once
def test_record_lint_check_and_apply(clone: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In `patches/deepspeed/`, because the checkout is DeepSpeed's."""
    commit(clone, MESSAGE)
    series.main(["record", str(clone), "--line", "0.19", "--since", "v0.19.5"], patches)
    (line,) = read_index(patches / OF_DEEPSPEED)
    assert (line.place, line.tags) == ("patches/deepspeed/0.19", ("v0.19.5",))
    assert read_index(patches) == []
    series.main(["lint"], patches)
    series.main(["check", "--repo", str(clone)], patches)
    assert "| v0.19.5 | 0.19 | yes | yes | yes | yes | yes |" in capsys.readouterr().out
    git(clone, "checkout", "--quiet", "--detach", "v0.19.5")
    (clone / "own.py").touch()
    commit(clone, "A commit of the fork's own")
    git(clone, "config", "user.name", "Fork Keeper")
    git(clone, "config", "user.email", "keeper@example.invalid")
    series.main(["apply", str(clone)], patches)
    assert "small=True" in read(clone / "deepspeed/engine.py")
    with pytest.raises(SeriesError, match="already; there is nothing to do"):
        series.apply(patches, clone)


@pytest.mark.everyday
@pytest.mark.once
def test_lint_finds_what_is_signed_off(clone: Path, patches: Path) -> None:
    """And no missing changelog, which DeepSpeed has not."""
    commit(clone, f"{MESSAGE}\nSigned-off-by: Somebody <somebody@example.invalid>\n")
    series.record(patches, clone, "0.19", since="v0.19.5")
    with pytest.raises(SeriesError) as found:
        series.lint(patches)
    name = "0001-Leave-out-frozen-parameters.patch"
    problem = "has trailers at the end of its message, remove them: who sends a patch signs it off"
    assert str(found.value) == f"deepspeed/0.19/{name}: {problem}"


@pytest.mark.everyday
@pytest.mark.once
def test_a_release_without_a_series(clone: Path, patches: Path) -> None:
    commit(clone, MESSAGE)
    series.record(patches, clone, "0.19", since="v0.19.5")
    git(clone, "checkout", "--quiet", "--detach", "v0.19.5")
    (clone / "version.txt").write_text("0.19.6\n")
    commit(clone, "0.19.6")
    head = git(clone, "rev-parse", "HEAD")[:10]
    assert f"0.19, the nearest to DeepSpeed {head}, into" in series.apply(patches, clone)
    assert "small=True" in read(clone / "deepspeed/engine.py")


@pytest.mark.everyday
@pytest.mark.parametrize("line", REAL, ids=lambda line: line.folder.name)
def test_the_installed_release(line: Line, tmp_path: Path) -> None:
    """The real series changes the code of the release that is installed here, in a copy."""
    if f"v{version('deepspeed')}" not in line.tags:
        pytest.skip(f"DeepSpeed {version('deepspeed')} is installed, and {line.place} is for {', '.join(line.tags)}")
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parents[1]
    for path in touched(line.patches):
        if (installed / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed / path, tmp_path / path)
    for path in apply_to_package(line.folder, tmp_path, "deepspeed"):
        compile(read(tmp_path / path), path, "exec")

"""`ci/release.py` detects what a wheel lacks, and a version without a changelog section or with another tag."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import release

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]

METADATA = "ds_frozen_patch-1.2.0.dist-info/METADATA"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a module, a data file, and a cache."""
    folder = tmp_path / "src" / "ds_frozen_patch"
    for name in ("__init__.py", "bootstrap/sitecustomize.py", "py.typed", "__pycache__/__init__.cpython-311.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    return folder


def packed(package: Path, *left_out: str, **added: str) -> Path:
    """Return a wheel of the package without some of its files, and with others."""
    wheel = package.parent / "ds_frozen_patch-1.2.0-py3-none-any.whl"
    names = ("__init__.py", "bootstrap/sitecustomize.py", "py.typed")
    files = {f"ds_frozen_patch/{name}": (package / name).read_text() for name in names if name not in left_out}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {METADATA: "Metadata-Version: 2.4\nVersion: 1.2.0\n\nAll\n"} | added).items():
            archive.writestr(name, text)
    return wheel


def test_a_whole_wheel(package: Path) -> None:
    wheel = packed(package)
    assert release.differences(package, wheel) == []


@pytest.mark.parametrize("name", ["py.typed", "bootstrap/sitecustomize.py"])
def test_a_missing_file_is_named(package: Path, name: str) -> None:
    (problem,) = release.differences(package, packed(package, name))
    assert problem.startswith(f"ds_frozen_patch/{name} in ds_frozen_patch-1.2.0")
    assert "package_data" in problem


def test_a_foreign_file_is_named(package: Path) -> None:
    (problem,) = release.differences(package, packed(package, **{"tests/test_a.py": "pass\n"}))
    assert problem.startswith("tests/test_a.py in ")


def test_an_older_file_is_named(package: Path) -> None:
    wheel = packed(package)
    (package / "__init__.py").write_text("new\n")
    (problem,) = release.differences(package, wheel)
    assert problem.startswith("ds_frozen_patch/__init__.py in ")


@pytest.mark.parametrize(
    "heading",
    [" [Unreleased]", " [11.2.0] - 2026-01-31", " [1.2.0]", " [1x2.0] - 2026-01-31", "# [1.2.0] - 2026-01-31"],
)
def test_a_version_without_a_section(heading: str) -> None:
    (problem,) = release.before_building("1.2.0", f"# Changelog\n\n##{heading}\n\n- a\n", None)
    assert "CHANGELOG.md has no section for 1.2.0" in problem


def test_a_version_with_its_section_and_tag() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- a\n"
    assert release.before_building("1.2.0", changelog, None) == []
    assert release.before_building("1.2.0", changelog, "v1.2.0") == []
    (problem,) = release.before_building("1.2.0", changelog, "v1.3.0")
    assert "the tag is v1.3.0" in problem


def test_the_program_that_tries_a_wheel_is_one() -> None:
    compile(release.TRIAL, "TRIAL", "exec")


def test_the_version_is_the_one_in_setup_cfg() -> None:
    assert (
        f"\nversion = {release.read_version(release.ROOT / 'setup.cfg')}\n" in (release.ROOT / "setup.cfg").read_text()
    )


@pytest.mark.parametrize(
    "origin",
    [
        "https://host.example/o/r.git",
        "https://host.example/o/r",
        "git@host.example:o/r.git",
        "ssh://git@host.example/o/r",
    ],
)
def test_the_address_of_the_repository(origin: str) -> None:
    assert release.address({}, origin) == "https://host.example/o/r"


def test_no_address() -> None:
    assert release.address({}, "/home/somebody/clone") is None
    assert release.address({}, "") is None


def test_the_address_that_github_says() -> None:
    variables = {"GITHUB_SERVER_URL": "https://host.example", "GITHUB_REPOSITORY": "o/r"}
    assert release.address(variables, "/somewhere") == "https://host.example/o/r"


def test_the_readme_on_the_package_index_has_no_relative_link() -> None:
    readme = release.absolute(
        (release.ROOT / "README.md").read_text(encoding="utf-8"), "https://host.example/o/r", "v1"
    )
    assert "](https://host.example/o/r/blob/v1/docs/guides/run.md)" in readme
    assert "](https://host.example/o/r/raw/v1/ci/measure/bench/checkpoint.svg)" in readme
    assert not re.findall(r"\]\((?!https://)", readme)

"""Build what is published, and try it as its users get it: `nox -f ci/noxfile.py -s release`, or `-- TAG`.

It publishes nothing. The sdist and the wheel, which `build` makes from the sdist, are left in `dist/`. The wheel is
tried in an environment that has nothing but what it requires.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

PACKED = ("src", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg")
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)]+)\)")

# Run in an empty folder by a Python that sees the installed wheel alone.
TRIAL = """
import importlib.metadata, subprocess, sys
import ds_frozen_patch

assert ds_frozen_patch.__path__[0].startswith(sys.prefix), ds_frozen_patch.__path__
assert importlib.metadata.version("ds_frozen_patch") == sys.argv[1], importlib.metadata.version("ds_frozen_patch")
for name in ds_frozen_patch.__all__:
    getattr(ds_frozen_patch, name)
assert not {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed"} & sys.modules.keys()
for command, status in (("--help", 0), ("status", 1)):  # patch() would raise, without DeepSpeed
    done = subprocess.run([f"{sys.prefix}/bin/ds-frozen-patch", command], capture_output=True, text=True)
    assert done.returncode == status and "deepspeed" in done.stdout.lower(), done
said = subprocess.check_output([sys.executable, "-m", "ds_frozen_patch", "--version"], text=True)
assert said == f"ds-frozen-patch {sys.argv[1]}\\n", said
"""


def main(tag: str | None = None) -> None:
    """Build, check, try, and say what is left to do; exits with the first thing that is wrong."""
    version = read_version(ROOT / "setup.cfg")
    _exit_if(before_building(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tag))
    shutil.rmtree(DIST, ignore_errors=True)
    where = address(os.environ, _origin())
    with tempfile.TemporaryDirectory() as copy:
        _copy(Path(copy), where, f"v{version}")
        subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), copy], check=True)
    sdist, wheel = DIST / f"ds_frozen_patch-{version}.tar.gz", DIST / f"ds_frozen_patch-{version}-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True)
    _exit_if(differences(ROOT / "src" / "ds_frozen_patch", wheel))
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = (f"{folder}/bin/python", "-I")
        quiet = ("--quiet", "--disable-pip-version-check")
        subprocess.run([*python, "-m", "pip", *quiet, "install", str(wheel)], cwd=folder, check=True)
        subprocess.run([*python, "-c", TRIAL, version], cwd=folder, env={}, check=True)
    print(f"{sdist.name} and {wheel.name} are in dist/, and the wheel works with what it requires alone.")
    if where is None:
        print("The remote `origin` is no address, so the README's links stay relative, and there are no project URLs.")
    if tag is None:
        print(f"Left to do: git tag -a v{version} -m v{version} && git push origin v{version}")


def address(environment: Mapping[str, str], origin: str) -> str | None:
    """Return where the repository is published, as GitHub or the remote `origin` says; None if that is a folder."""
    if repository := environment.get("GITHUB_REPOSITORY"):
        return f"{environment['GITHUB_SERVER_URL']}/{repository}"
    found = re.fullmatch(r"(?:https://|ssh://git@|git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else None


def absolute(readme: str, where: str, tag: str) -> str:
    """Return the README as the package index shows it, where relative links would lead nowhere."""

    def replaced(link: re.Match[str]) -> str:
        return f"{link[1]}{link[2]}({where}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})"

    return LINK.sub(replaced, readme)


def project_urls(where: str, tag: str) -> str:
    """Return the entry of setup.cfg with the links beside the project's description."""
    pages = {"Source": "", "Documentation": f"/tree/{tag}/docs", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
    lines = [f"    {name} = {where}{page}\n" for name, page in {**pages, "Issues": "/issues"}.items()]
    return f"project_urls =\n{''.join(lines)}"


def _origin() -> str:
    git = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _copy(folder: Path, where: str | None, tag: str) -> None:
    """Copy what is built, with the address of the repository in it."""
    for name in PACKED:
        source = ROOT / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    if where is not None:
        readme, setup = folder / "README.md", folder / "setup.cfg"
        readme.write_text(absolute(readme.read_text(encoding="utf-8"), where, tag), encoding="utf-8")
        text = setup.read_text(encoding="utf-8")
        setup.write_text(text.replace("license =", f"{project_urls(where, tag)}license =", 1), encoding="utf-8")


def read_version(setup_cfg: Path) -> str:
    """Return the version of the package."""
    config = configparser.ConfigParser()
    config.read(setup_cfg, encoding="utf-8")
    return config["metadata"]["version"]


def before_building(version: str, changelog: str, tag: str | None) -> list[str]:
    """Return what is wrong with a version that is to be published."""
    problems = []
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        problems.append(
            f"CHANGELOG.md has no section for {version}, the version in setup.cfg. To do: put the line"
            f" `## [{version}] - YYYY-MM-DD` below `## [Unreleased]`"
        )
    if tag not in (None, f"v{version}"):
        problems.append(f"the tag is {tag}, but setup.cfg has version {version}. To do: tag v{version}")
    return problems


def differences(package: Path, wheel: Path) -> list[str]:
    """Return which files of a package a wheel lacks or has otherwise, and which it has beyond them."""
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    own = {file.relative_to(package.parent).as_posix(): file.read_bytes() for file in files}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    return [
        f"{name} in {wheel.name} is not the file in src/. To do: see setup.cfg, options.package_data"
        for name in sorted(own.keys() | packed.keys())
        if own.get(name) != packed.get(name)
    ]


def _exit_if(problems: list[str]) -> None:
    if problems:
        sys.exit("\n".join(f"Not fit to be published: {problem}." for problem in problems))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Build what is published, and try it as its users get it: `nox -f ci/noxfile.py -s release`, or `-- TAG`.

It publishes nothing. The sdist and the wheel, which `build` makes from the sdist, are left in `dist/`. The wheel is
tried in an environment that has nothing but what it requires.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"

# Run in an empty folder by a Python that sees the installed wheel alone.
TRIAL = """
import importlib.metadata, subprocess, sys
import ds_frozen_patch

assert ds_frozen_patch.__path__[0].startswith(sys.prefix), ds_frozen_patch.__path__
assert importlib.metadata.version("ds_frozen_patch") == sys.argv[1], importlib.metadata.version("ds_frozen_patch")
for name in ds_frozen_patch.__all__:
    getattr(ds_frozen_patch, name)
assert not {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed"} & sys.modules.keys()
for command in ("--help", "status"):
    said = subprocess.check_output([f"{sys.prefix}/bin/ds-frozen-patch", command], text=True)
    assert "deepspeed" in said.lower(), said
"""


def main(tag: str | None = None) -> None:
    """Build, check, try, and say what is left to do; exits with the first thing that is wrong."""
    version = read_version(ROOT / "setup.cfg")
    _exit_if(before_building(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), tag))
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", str(ROOT)], check=True)
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
    if tag is None:
        print(f"Left to do: git tag -a v{version} -m v{version} && git push origin v{version}")


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

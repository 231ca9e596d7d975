"""What is published, built and tried as its users get it: `nox -f ci/noxfile.py -s release`, or `-- TAG` for a tag's.

It publishes nothing. The sdist and the wheel are left in `dist/`; the wheel is made from the sdist, with the setuptools
of the lock, and tried in an environment that has nothing but what it asks for.
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
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "ds_frozen_patch"
DIST = ROOT / "dist"

# Run in an empty folder by a Python that sees the installed wheel alone.
TRIAL = """
import importlib.metadata, sys

import ds_frozen_patch

place = ds_frozen_patch.__path__[0]
if not place.startswith(sys.prefix):
    sys.exit(f"it was imported from {place}")
for name in ds_frozen_patch.__all__:
    getattr(ds_frozen_patch, name)
heavy = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed"} & sys.modules.keys()
if heavy:
    sys.exit(f"its import also imports {heavy}")
print(importlib.metadata.version("ds_frozen_patch"))
"""


def main(tag: str | None = None) -> None:
    """Build, check, try, and say what is left to do; exits with the first thing that is wrong."""
    version = read_version(ROOT / "setup.cfg")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _exit_if(before_building(version, changelog, tag))
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", str(ROOT)], check=True)
    sdist, wheel = DIST / f"ds_frozen_patch-{version}.tar.gz", DIST / f"ds_frozen_patch-{version}-py3-none-any.whl"
    _exit_if(differences(PACKAGE, wheel) + metadata_problems(wheel, version))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        try_out(wheel, version, Path(folder))
    print(f"{sdist.name} and {wheel.name} are in dist/, and the wheel works with what it asks for alone.")
    if tag is None:
        print(f"Left to do: git tag -a v{version} -m v{version} && git push origin v{version}")


def read_version(setup_cfg: Path) -> str:
    """The version of the package."""
    config = configparser.ConfigParser()
    config.read(setup_cfg, encoding="utf-8")
    return config["metadata"]["version"]


def before_building(version: str, changelog: str, tag: str | None) -> list[str]:
    """What is wrong with a version that is to be published."""
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
    """What a wheel has not, or has otherwise, of the files of a package; and what it has beyond them."""
    own = {
        file.relative_to(package.parent).as_posix(): file.read_bytes()
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and ".dist-info/" not in name]
        packed = {name: archive.read(name) for name in names}
    cure = "To do: name it in setup.cfg, under options.package_data"
    problems = [f"{wheel.name} lacks {name}. {cure}" for name in sorted(own.keys() - packed.keys())]
    problems += [f"{wheel.name} has {name}, which is not in src/" for name in sorted(packed.keys() - own.keys())]
    problems += [
        f"{name} in {wheel.name} is not the file in src/"
        for name in sorted(own.keys() & packed.keys())
        if own[name] != packed[name]
    ]
    return problems


def metadata_problems(wheel: Path, version: str) -> list[str]:
    """What is wrong with what a wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        found = HeaderParser().parsestr(archive.read(name).decode())["Version"]
    return [] if found == version else [f"{wheel.name} says that it is version {found}, and setup.cfg {version}"]


def try_out(wheel: Path, version: str, folder: Path) -> None:
    """Install a wheel with what it asks for, and nothing else, and use it where no source can be imported."""
    venv.create(folder / "venv", with_pip=True)
    empty = folder / "empty"
    empty.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(folder / "venv" / "bin" / command[0]), *command[1:]], cwd=empty, env={}, capture_output=True, text=True
        )
        _exit_if([f"`{' '.join(command[:2])}` fails with {wheel.name}:\n{done.stderr}"] if done.returncode else [])
        return done.stdout

    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", str(wheel)], cwd=empty, check=True)
    found = run("python", "-I", "-c", TRIAL).strip()
    _exit_if([] if found == version else [f"{wheel.name} is installed as version {found}, and setup.cfg has {version}"])
    for command in ("--help", "status"):
        said = run("ds-frozen-patch", command)
        _exit_if([] if "deepspeed" in said.lower() else [f"`ds-frozen-patch {command}` says only: {said!r}"])


def _exit_if(problems: list[str]) -> None:
    if problems:
        sys.exit("\n".join(f"Not fit to be published: {problem.rstrip()}." for problem in problems))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How everything here is run: `nox -f ci/noxfile.py --list`.

Environments are made from `ci/locks/` in `.nox/`, shared by the sessions that name the same lock, and kept
until the lock or the package's metadata changes.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent.parent
CELLS = ("everyday", "newest")

OLDER = "deepspeed==0.16.9"  # laid over the everyday cell: what a run was saved by before it was upgraded

nox.options.sessions = ["tests", "upgrade", "lint"]
nox.options.stop_on_first_error = False


@nox.session(venv_backend="none")
@nox.parametrize("cell", CELLS, ids=CELLS)
def tests(session: nox.Session, cell: str) -> None:
    """Every test on one cell of releases; what follows `--` goes to pytest."""
    session.run(environment(session, cell), "-m", "pytest", *session.posargs, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Fine-tune with LoRA on two CPU ranks, save full and trainable-only, resume, compare."""
    session.run(environment(session, "everyday"), "-m", "ds_frozen_patch.demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
def upgrade(session: nox.Session) -> None:
    """Save with lightning 2.5.2 and an older DeepSpeed, resume with the newest releases."""
    old, new = environment(session, "everyday"), environment(session, "newest")
    overlay = ROOT / ".nox" / OLDER
    if not overlay.is_dir():
        pip = (old, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*pip, "--no-deps", "--no-build-isolation", "--target", str(overlay), OLDER, external=True)
    folder = session.create_tmp()
    shutil.rmtree(folder)
    Path(folder).mkdir(parents=True)
    session.run(old, "tests/upgrade.py", "save", folder, env={"PYTHONPATH": str(overlay)}, external=True)
    session.run(new, "tests/upgrade.py", "resume", folder, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """What fingerprints cost, against saves of the same run; what follows `--` goes to the benchmark."""
    session.run(environment(session, "everyday"), "ci/bench_fingerprint.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff and mypy, the latter against the types of the everyday cell."""
    typed = environment(session, "everyday")
    tools = environment(session, "lint")
    session.run(tools, "-m", "ruff", "check", ".", external=True)
    session.run(tools, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(tools, "-m", "mypy", "--python-executable", typed, external=True)


def environment(session: nox.Session, name: str) -> str:
    """The Python of the virtual environment that `ci/locks/NAME.txt` describes, made if it is not there."""
    session.chdir(ROOT)
    lock = ROOT / "ci" / "locks" / f"{name}.txt"
    folder = ROOT / ".nox" / name
    python = str(folder / "bin" / "python")
    digest = hashlib.sha256(lock.read_bytes() + (ROOT / "setup.cfg").read_bytes()).hexdigest()
    made_of = folder / "made-of"
    if made_of.is_file() and made_of.read_text() == digest:
        return python

    def pip(*arguments: str) -> None:
        session.run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments, external=True)

    session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)
    pins = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    deepspeed = [pin for pin in pins if pin.startswith("deepspeed==")]
    pip(*(pin for pin in pins if pin not in deepspeed))
    if deepspeed:
        # It comes as a source distribution that looks for torch while it is built.
        pip("--no-build-isolation", "--no-deps", *deepspeed)
        pip("--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    made_of.write_text(digest)
    return python

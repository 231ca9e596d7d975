"""The environments of the cells: their locks, and how uv makes them.

A base holds torch and all that the tests need beside it; a cell lies over its base and holds Lightning, DeepSpeed,
wrapt and what they ask for. Locks have the hash of every file but torch's and its CUDA libraries': which build of
torch is taken is the machine's choice (`PIP_FIND_LINKS` and `UV_FIND_LINKS` count).
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import nox
from matrix.cells import LOCKS, Cell
from matrix.programs import Program
from series.folder import PATCHES, apply_to_package

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".nox" / "programs"
BUCKETS = ROOT / ".nox" / "buckets"
PIPS_OWN = ("tools", "release", "docs")
BUILDS_OF_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-.*|cuda-.*)==")


def cell_python(session: nox.Session, cell: Cell) -> str:
    """Return the Python of a cell's environment, made if it is not there or its lock has changed."""

    def add_torch(python: str) -> None:
        _install(session, python, f"torch=={cell.torch}")

    def lay_over_base(python: str) -> None:
        (own,) = Path(python).parent.parent.glob("lib/python*/site-packages")
        (below,) = Path(base).parent.parent.glob("lib/python*/site-packages")
        (own / "base.pth").write_text(f"{below}\n")
        _uv(session, "pip", "install", "--python", python, "--no-deps", "--editable", str(ROOT))
        for package in ("lightning", "pytorch_lightning"):
            if cell.patches and (own / package).is_dir():
                apply_to_package(PATCHES / cell.patches, own, package)

    base = _environment(session, cell.python, cell.base, (cell.base,), add_torch)
    made_of = sorted((PATCHES / cell.patches).glob("*.patch")) if cell.patches else []
    return _environment(session, cell.python, cell.name, (cell.lock, cell.base), lay_over_base, made_of)


def program_python(session: nox.Session, name: str, program: Program, cell: Cell) -> str:
    """Return the Python of a program's environment, which lies over that of its cell."""
    below = Path(cell_python(session, cell)).parent.parent

    def lay_over_cell(python: str) -> None:
        (own,) = Path(python).parent.parent.glob("lib/python*/site-packages")
        (cells,) = below.glob("lib/python*/site-packages")
        # Not the path alone: the cell has such files too, for its base and for us.
        (own / "cell.pth").write_text(f"import site; site.addsitedir({str(cells)!r})\n")
        if program.beside_torch:
            _install(session, python, "--no-deps", *program.beside_torch)

    locks = (f"program-{name}", cell.lock, cell.base)
    return _environment(session, cell.python, f"program-{name}", locks, lay_over_cell)


def clone(session: nox.Session, folder: str, address: str, commit: str) -> None:
    """Check out a commit, or a tag, of a repository in `.nox/programs`, and remove everything else."""
    place = PROGRAMS / folder
    git = ("git", "-C", str(place))
    place.mkdir(parents=True, exist_ok=True)
    session.run(*git, "init", "--quiet", external=True)
    if not session.run(*git, "tag", "--list", f"got-{commit}", external=True, silent=True):
        session.run(*git, "fetch", "--quiet", "--depth=1", address, commit, external=True)
        session.run(*git, "tag", f"got-{commit}", "FETCH_HEAD", external=True)
    session.run(*git, "checkout", "--quiet", "--force", "--detach", f"got-{commit}", external=True)
    session.run(*git, "clean", "--quiet", "-ffdx", external=True)


def install_beside(session: nox.Session, python: str, folder: Path, *wanted: str) -> None:
    """Install into a folder of its own, for the path of an environment that has other releases."""
    _uv(session, "pip", "install", "--python", python, "--target", str(folder), *wanted)


def add_bucket_packages(session: nox.Session, python: str) -> None:
    """Install what the tests of buckets import, and the extra `fast`, beside the cells; conftest.py adds the folder."""
    folder, lock = BUCKETS, LOCKS / "buckets.txt"

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        install_beside(session, python, folder, "--no-deps", "--require-hashes", "-r", str(lock))

    _keep_up_to_date(folder, [lock], make)


def tools_python(session: nox.Session, name: str = "tools") -> str:
    """Return the Python of an environment made by pip: its lock is `ci/locks/NAME.txt`."""
    folder = ROOT / ".nox" / name
    python, lock = str(folder / "bin" / "python"), LOCKS / f"{name}.txt"

    def make() -> None:
        session.log(f"making {folder.relative_to(ROOT)}: {len(_blocks(lock.read_text()))} packages")
        session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True, log=False)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*pip, "--require-hashes", "-r", str(lock), external=True, log=False)

    _keep_up_to_date(folder, [lock], make)
    return python


def write_lock(session: nox.Session, cell: Cell) -> None:
    """Resolve a cell anew into its lock, over its base's lock, which is made if it is not there."""
    base = LOCKS / f"{cell.base}.txt"
    common = [f"torch=={cell.torch}", *cell.period]
    if not base.exists():
        blocks = _resolve(session, cell.python, common)
        base.write_text("".join(block for block in blocks if not block.startswith("wrapt==")))
    below = base.read_text()
    blocks = _resolve(session, cell.python, [*common, *cell.pins], preferred=below)
    (LOCKS / f"{cell.name}.txt").write_text("".join(block for block in blocks if block not in _blocks(below)))


def write_program_lock(session: nox.Session, name: str, program: Program, cell: Cell) -> None:
    """Resolve what a program asks for anew, over its cell's environment, into its lock."""
    below = {block.partition("==")[0]: block for lock in (cell.base, cell.lock) for block in _blocks(_lock(lock))}
    wanted = (LOCKS / f"program-{name}.in").read_text().splitlines()
    pins = [f"torch=={cell.torch}", *program.beside_torch, *cell.pins, *wanted]
    blocks = _resolve(session, cell.python, pins, preferred="".join(below.values()), sources=())
    blocks += _resolve(session, cell.python, list(program.alone), sources=("--no-deps",)) if program.alone else []
    (LOCKS / f"program-{name}.txt").write_text("".join(block for block in blocks if block not in below.values()))


def write_bucket_lock(session: nox.Session, cell: Cell) -> None:
    """Resolve anew what the tests of buckets import, and the extra `fast`, beside what a cell has."""
    below = [block for lock in (cell.base, cell.lock) for block in _blocks(_lock(lock))]
    pins = list({block.partition("==")[0]: block.split()[0] for block in below}.values())
    wanted = (LOCKS / "buckets.in").read_text().splitlines()
    blocks = _resolve(session, cell.python, [*pins, *wanted], sources=())
    names = {pin.partition("==")[0] for pin in pins}
    (LOCKS / "buckets.txt").write_text("".join(block for block in blocks if block.partition("==")[0] not in names))


def write_tools_locks(session: nox.Session) -> None:
    """Resolve the locks of `PIPS_OWN` anew, with the uv of the lock as it is."""
    plain = ("--generate-hashes", "--no-header", "--no-annotate", "--universal", "--python-version", "3.10")
    for name in PIPS_OWN:
        _uv(session, "pip", "compile", *plain, str(LOCKS / f"{name}.in"), "--output-file", str(LOCKS / f"{name}.txt"))


def newest_releases(session: nox.Session, *wanted: str) -> dict[str, str]:
    """Return the newest release on the package index of each package; `wanted` can be requirements with a version."""
    with tempfile.TemporaryDirectory() as folder:
        source, found = Path(folder, "wanted.in"), Path(folder, "found.txt")
        source.write_text("\n".join([*wanted, "lightning!=2.6.2,!=2.6.3", "deepspeed"]))
        _uv(session, "pip", "compile", "--no-deps", "--no-header", str(source), "--output-file", str(found))
        return dict(re.findall(r"^([\w-]+)==(\S+)", found.read_text(), re.MULTILINE))


def _resolve(
    session: nox.Session,
    python: str,
    pins: list[str],
    preferred: str = "",
    sources: Sequence[str] = ("setup.cfg", "--extra", "test"),
) -> list[str]:
    """Return what uv resolves the pins and the tests' requirements to: a block of lines per package, without torch."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "pins.in"), Path(folder, "lock.txt")
        wanted.write_text("\n".join(pins))
        lock.write_text(preferred)  # uv keeps to the releases of an output that is there, where it can
        plain = ("--generate-hashes", "--no-header", "--no-annotate", "--python-version", python)
        _uv(session, "pip", "compile", *sources, str(wanted), *plain, "--output-file", str(lock))
        return [block for block in _blocks(lock.read_text()) if not BUILDS_OF_TORCH.match(block)]


def _lock(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


def _blocks(lock: str) -> list[str]:
    """Return the packages of a lock, each with its lines of hashes."""
    return re.findall(r"^[^\s#].*\n(?:[ \t].*\n)*", lock, re.MULTILINE)


def _environment(
    session: nox.Session,
    python: str,
    name: str,
    locks: tuple[str, ...],
    finish: Callable[[str], None],
    made_of: Sequence[Path] = (),
) -> str:
    """Return the Python of an environment with what the first lock holds, over what the others hold."""
    folder = ROOT / ".nox" / name
    python_of_it = str(folder / "bin" / "python")
    files = [LOCKS / f"{lock}.txt" for lock in locks]

    def make() -> None:
        count = len(_blocks(files[0].read_text()))
        session.log(f"making {folder.relative_to(ROOT)}, with Python {python}: {count} packages")
        runs_this = python == f"{sys.version_info.major}.{sys.version_info.minor}"
        _uv(session, "venv", "--clear", "--python", sys.executable if runs_this else python, str(folder))
        _install(session, python_of_it, "--no-deps", "--require-hashes", "-r", str(files[0]))
        finish(python_of_it)

    _keep_up_to_date(folder, [*files, *made_of], make)
    return python_of_it


def _keep_up_to_date(folder: Path, files: Sequence[Path], make: Callable[[], None]) -> None:
    """Make an environment if it is not there, or what it is made of has changed: these files, and our own package."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    # Not all of it: ranges and classifiers change with each release that is added.
    own = [setup["metadata"]["version"], *map(dict, (setup["options"], setup["options.entry_points"]))]
    digest = hashlib.sha256(b"".join([str(own).encode(), *(file.read_bytes() for file in files)])).hexdigest()
    note = folder / "made-of"
    if not note.is_file() or note.read_text() != digest:
        make()
        note.write_text(digest)


def _install(session: nox.Session, python: str, *wanted: str) -> None:
    """Install into the environment of this Python; a terminal shows how far the downloads are."""
    if named := [name for name in wanted if "==" in name]:
        session.log(f"adding {' '.join(named)} and what it needs, the longest download")
    _uv(session, "pip", "install", "--python", python, *wanted, quiet=not sys.stdout.isatty())


def _uv(session: nox.Session, *arguments: str, quiet: bool = True) -> None:
    environment = {"UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))}
    # Once, and not in each of the many processes to come: where PYTHONDONTWRITEBYTECODE is set, none keeps it.
    environment["UV_COMPILE_BYTECODE"] = "1"
    # pyenv's shims are no Pythons to uv; the Pythons behind them are.
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    environment["PATH"] = os.pathsep.join([*map(str, sorted(versions.glob("*/bin"))), os.environ["PATH"]])
    uv = (tools_python(session), "-m", "uv", *(["--quiet"] if quiet else []))
    session.run(*uv, *arguments, env=environment, external=True, log=False)

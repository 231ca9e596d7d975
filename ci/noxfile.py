"""How everything here is run: `nox -f ci/noxfile.py --list`.

Environments are made from `ci/locks/` in `.nox/`, as `ci/matrix/environments.py` says, and kept until a lock changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "patches"))

from matrix import cells, declared
from matrix.environments import (
    BUCKETS,
    LOCKS,
    ROOT,
    add_bucket_packages,
    cell_python,
    clone,
    install_beside,
    newest_releases,
    program_python,
    tools_python,
    write_bucket_lock,
    write_lock,
    write_program_lock,
    write_tools_locks,
)
from matrix.environments import PROGRAMS as CLONES
from matrix.programs import PROGRAMS
from packaging.version import Version
from series.folder import CODE, PATCHES, lines, patches_of, repositories, repository_of, touched

CELLS = cells.read()
EVERY_TEST = ("everyday", "newest")
# The demo and the short tests run in the cell of the Python that runs this, so that they need no other one.
FIRST = {12: "python-3.12", 13: "python-3.13"}.get(sys.version_info.minor, "everyday")
SHORT_TESTS = tuple(dict.fromkeys((FIRST, *EVERY_TEST)))
ON_GPUS = ("python-3.13", "lightning-2.4")  # cells whose torch is built for CUDA
RESULTS = ROOT / ".nox" / "results"
# The checkpoints that cells leave for others are of the program that trains them, and of the patches.
TRAINS = [ROOT / "tests" / name for name in ("kit/runs.py", "contract/test_upgrade.py", "contract/test_no_lock_in.py")]
TRAINS += sorted(ROOT.glob("patches/*/*.patch"))
SAVED = ROOT / ".nox" / "saved" / hashlib.sha256(b"".join(file.read_bytes() for file in TRAINS)).hexdigest()[:8]

# Upstream's own tests are run on these releases of Lightning and DeepSpeed, each in the environment of a cell.
UPSTREAM = {"2.0.9.post0": "lightning-2.4", "2.1.4": "lightning-2.4", "2.4.0": "lightning-2.4"}
UPSTREAM |= {"2.5.2": "everyday", "2.6.5": "newest", "7f0c3436cd3f6ad3753125672024fc415cbcb414": "newest"}
UPSTREAM_DEEPSPEED = {"v0.17.6": "everyday", "v0.19.5": "newest"}

# axolotl, whose merge is measured beside ours, without what it needs only for training.
AXOLOTL = ROOT / ".nox" / "axolotl"
OF_AXOLOTL = ("axolotl==0.19.0", "colorama==0.4.6", "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.19.post1")

# Where the newest commits of both repositories are.
HEADS = ("https://github.com/Lightning-AI/pytorch-lightning", "https://github.com/deepspeedai/DeepSpeed")

nox.needs_version = ">=2026.10"  # it runs sessions side by side
nox.options.allow_parallel = True
nox.options.sessions = [f"tests({FIRST})"]
nox.options.stop_on_first_error = False
# What CI runs beside the tests of the everyday cell: the promises where releases are newest and oldest, each with half
# of its parameters in either cell, and where they are patched or refused; those of quantized bases.
HALVES = ("newest", "oldest")
SOME = ("everyday-patched", "quantized", "refused")
PARTS = {"contract": ("tests/contract",), "others": ("tests", "--ignore=tests/contract")}
OTHERS = [f"other_tests({part})" for part in PARTS] + [f"tests({cell})" for cell in SHORT_TESTS[1:-1]]
OTHERS += [f"half({cell})" for cell in HALVES] + [f"matrix({cell})" for cell in SOME]
OTHERS += ["patches", "docs", "lint"]


@nox.session(venv_backend="none")
@nox.parametrize("cell", SHORT_TESTS, ids=SHORT_TESTS)
def tests(session: nox.Session, cell: str) -> None:
    """The short tests on one cell: each promise, ZeRO stage and tool; what follows `--` goes to pytest."""
    run_pytest(session, cell, "--part=short", *session.posargs)


@nox.session(venv_backend="none")
def rest(session: nox.Session) -> None:
    """All other tests and checks, which must pass too before a commit: two sessions at a time."""
    session.chdir(ROOT)
    for cell in ("everyday", "oldest"):
        save_for(session, cell)  # which two might do at once
    add_bucket_packages(session, cell_python(session, CELLS["everyday"]))
    session.run(sys.executable, "-m", "nox", "-f", __file__, "-j", "2", "-s", *OTHERS, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("part", list(PARTS), ids=list(PARTS))
def other_tests(session: nox.Session, part: str) -> None:
    """The tests of the everyday cell that are not short, with half of their parameters: the contract's, or others."""
    run_tests(session, "everyday", "--part=rest", f"--half={parity()}", *PARTS[part], *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("cell", EVERY_TEST, ids=EVERY_TEST)
def every_test(session: nox.Session, cell: str) -> None:
    """Every test on one cell of releases; what follows `--` goes to pytest."""
    run_tests(session, cell, *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("cell", list(CELLS), ids=list(CELLS))
def matrix(session: nox.Session, cell: str) -> None:
    """The promises on one cell of releases, its outcome kept for the table; what follows `--` goes to pytest."""
    run_promises(session, cell, *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("cell", HALVES, ids=HALVES)
def half(session: nox.Session, cell: str) -> None:
    """The promises on one of two cells, each with half of its parameters; what follows `--` goes to pytest."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = [
        f"--half={(parity() + HALVES.index(cell)) % 2}",
        f"--outcome={RESULTS / cell}-half.json",
        *session.posargs,
    ]
    if cell in EVERY_TEST:
        run_pytest(session, cell, "--part=short", *chosen)
    else:
        run_tests(session, cell, "-m", "not everyday", *chosen)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve the locks of the cells and programs that follow `--` anew, or all of them and their bases."""
    session.chdir(ROOT)
    log_written(session, declared.write())
    writers = {name: partial(write_lock, session, cell) for name, cell in CELLS.items() if cell.lock == name}
    for name, program in PROGRAMS.items():
        writers[f"program-{name}"] = partial(write_program_lock, session, name, program, CELLS[program.cell])
    chosen = session.posargs or writers
    if unknown := [name for name in chosen if name not in writers]:
        session.error(f"no cells or programs with a lock: {', '.join(unknown)}. There are {', '.join(writers)}")
    if not session.posargs:
        for old in LOCKS.glob("base-*.txt"):
            old.unlink()
        write_tools_locks(session)
        write_bucket_lock(session, CELLS["everyday"])
    for name in chosen:
        writers[name]()
    log_written(session, declared.write())  # a new lock can have a newer transformers or Accelerate


@nox.session(venv_backend="none")
def propose(session: nox.Session) -> None:
    """Add a cell for the newest releases, or for `-- lightning==X deepspeed==Y`, lock it and run it."""
    session.chdir(ROOT)
    if wrong := [item for item in session.posargs if item.partition("==")[0] not in ("lightning", "deepspeed")]:
        session.error(f"name releases as lightning==X deepspeed==Y, not {' '.join(wrong)}")
    releases = newest_releases(session, *(session.posargs or ["lightning", "deepspeed"]))
    wanted = releases["lightning"], releases["deepspeed"]
    if any(cell.releases == tuple(map(Version, wanted)) for cell in CELLS.values()):
        session.log(f"lightning {wanted[0]} with deepspeed {wanted[1]} is in ci/matrix.json already")
        return
    entry, like = cells.propose(*wanted), cells.nearest(*wanted)
    cells.add(entry, after=like.name)
    CELLS[entry["name"]] = cells.read()[entry["name"]]
    log_written(session, declared.write())
    session.log(f"added {entry['name']} to ci/matrix.json; look at what it needs and expects, and why:")
    session.log(cells.formatted(entry))
    for test, why in like.cannot.items():
        session.log(f"{like.name} cannot run {test}: {why}. If it fails here too, add {entry['name']} to that cannot")
    write_lock(session, CELLS[entry["name"]])
    log_written(session, declared.write())
    run_promises(session, entry["name"])


@nox.session(venv_backend="none")
def table(session: nox.Session) -> None:
    """Make the compatibility table of a full run of the matrix, or renew the rows of `-- CELL...` alone."""
    log_written(session, declared.write())
    run_part(session, "everyday", "matrix.table", *session.posargs)


@nox.session(venv_backend="none")
def settings(session: nox.Session) -> None:
    """Run every setting of DeepSpeed on two of its releases, and make a table of it."""
    results = {cell: f"{RESULTS}/settings-{cell}.xml" for cell in EVERY_TEST}
    for cell, file in results.items():
        run_tests(session, cell, "-m", "settings", f"--junitxml={file}", *session.posargs)
    run_part(session, "everyday", "matrix.results", "settings", *results.values())


@nox.session(venv_backend="none")
def quantized(session: nox.Session) -> None:
    """Run the tests of quantized bases with the newest libraries, and make the table of ci/matrix/quantized.md."""
    results = f"{RESULTS}/quantized.xml"
    run_tests(session, "quantized", f"--junitxml={results}")
    run_part(session, "everyday", "matrix.results", "quantized", results)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Try to lose data, at length, and make the table of what was tried; or renew the rows of `-- TEST...`."""
    results = f"{RESULTS}/faults.xml"
    pytest = ("-m", "pytest", "--faults", f"--junitxml={results}", *(session.posargs or ["tests/faults"]))
    run(session, "everyday", *pytest, CELL="everyday")  # no checkpoints of other cells
    run_part(session, "everyday", "matrix.results", "faults", results)


@nox.session(venv_backend="none")
def scale(session: nox.Session) -> None:
    """Count what saves and loads do on 1 to 8 ranks, and make the tables of ci/matrix/scale.md."""
    results = f"{RESULTS}/scale.xml"
    run_pytest(session, "everyday", f"--junitxml={results}", "tests/contract/test_scale.py")
    run_part(session, "everyday", "matrix.results", "scale", results)


@nox.session(venv_backend="none")
def nfs(session: nox.Session) -> None:
    """Save on real NFS in a virtual machine: `-- --saves 200 --nodes 2,4 --versions 4.2,4.1,3`."""
    run(session, "everyday", "tests/faults/nfs", *session.posargs, CELL="everyday")


@nox.session(venv_backend="none")
@nox.parametrize("cell", ON_GPUS, ids=ON_GPUS)
def gpu(session: nox.Session, cell: str) -> None:
    """The promises on this machine's GPUs, one or two of them; what follows `--` goes to pytest."""
    session.chdir(ROOT)
    look = "import torch; print(torch.cuda.device_count(), torch.__version__)"
    found = session.run(cell_python(session, CELLS[cell]), "-c", look, silent=True, external=True)
    count, torch = str(found).split()[-2:]
    if count == "0":
        session.error(f"torch {torch} sees no CUDA device: this session needs one, and a driver that its CUDA takes")
    run(session, cell, "-m", "pytest", "-m", "gpu", "tests/gpu", *session.posargs, CELL=cell)


@nox.session(venv_backend="none")
@nox.parametrize("name", list(PROGRAMS), ids=list(PROGRAMS))
def programs(session: nox.Session, name: str) -> None:
    """A program that was written elsewhere, unchanged, under `ds-frozen-patch run`: it saves and resumes."""
    program = PROGRAMS[name]
    cell = CELLS[program.cell]
    session.chdir(ROOT)
    for folder, (address, commit) in program.clones.items():
        clone(session, folder, address, commit)
    pytest = ("-m", "pytest", f"--programs={CLONES}", "-k", f"[{name}]", "tests/programs", *session.posargs)
    environment = cell.environment | {"CELL": cell.name}
    session.run(program_python(session, name, program, cell), *pytest, env=environment, external=True)


@nox.session(venv_backend="none")
def patches(session: nox.Session) -> None:
    """Check the patch series of `patches/` on every release on the index, or on every tag of `-- --repo CLONE`."""
    run(session, "lightning-2.3", "patches", "check", *session.posargs)


@nox.session(venv_backend="none")
def heads(session: nox.Session) -> None:
    """The promises and the patches on upstream's newest commits; or on those of `-- LIGHTNING DEEPSPEED`, clones."""
    session.chdir(ROOT)
    sources = session.posargs or HEADS
    if len(sources) != len(HEADS):
        session.error("name a clone of Lightning's repository and one of DeepSpeed's: -- LIGHTNING DEEPSPEED")
    lightning, deepspeed = (
        clone_head(session, source, name) for source, name in zip(sources, ("lightning", "deepspeed"), strict=True)
    )
    python, beside = cell_python(session, CELLS["newest"]), lightning.with_name("beside")
    install_beside(session, python, beside, "jsonargparse[jsonnet,signatures]")  # Lightning's newest asks for it
    code = os.pathsep.join(map(str, (lightning / "src", lightning / "tests", deepspeed, beside)))
    session.chdir(deepspeed)
    session.run(python, "setup.py", "--version", external=True)  # it notes its version
    promises = ("-m", "not everyday", "tests/contract")
    steps = {"the promises with patch()": partial(run_tests, session, "newest", *promises, PYTHONPATH=code)}
    for repository, place in zip(repositories(PATCHES), (lightning, deepspeed), strict=True):
        name, newest = repository.name, lines(repository.folder)[-1]
        tests = [str(place / path) for path in touched(patches_of(newest)) if "/test_" in path]
        pytest = ("-m", "pytest", f"--rootdir={place}", "-W", "ignore::FutureWarning", *tests)
        apply = ("patches", "apply", str(place), "--line", newest.name)
        steps[f"the patches for {name}"] = partial(run, session, "lightning-2.3", *apply)
        steps[f"the tests that they add to {name}"] = partial(
            run, session, "newest", *pytest, PYTHONPATH=code, OMP_NUM_THREADS="1", LOCAL_SIZE="2"
        )
    failed = []
    for name, step in steps.items():
        try:
            step()
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"on upstream's heads these failed, as is said above: {'; '.join(failed)}")


@nox.session(venv_backend="none")
def upstream_tests(session: nox.Session) -> None:
    """Upstream's own tests before and after the patch series: `-- CLONE`, or `-- CLONE TAG...`."""
    if not session.posargs:
        session.error("name a clone of Lightning's or DeepSpeed's repository: -- CLONE, or -- CLONE TAG...")
    clone, *tags = session.posargs
    place = Path(session.invoked_from, clone).resolve()
    cell_of = UPSTREAM if repository_of(PATCHES, place).name == "Lightning" else UPSTREAM_DEEPSPEED
    if unknown := [tag for tag in tags if tag not in cell_of]:
        session.error(f"no cell is chosen for {', '.join(unknown)}; there are {', '.join(cell_of)}")
    for tag in tags or cell_of:
        run_part(session, cell_of[tag], "series.upstream_tests", str(place), tag)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Fine-tune with LoRA on two CPU ranks, save full and trainable-only, resume, compare."""
    picture = ROOT / ".nox" / "demo.svg"
    run_part(session, FIRST, "demo", "--picture", str(picture), *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """What saves, resumes, the import and the tools cost against others; or `-- PART...` alone."""
    if not session.posargs or "merge" in session.posargs:
        install_beside(session, cell_python(session, CELLS["newest"]), AXOLOTL, "--no-deps", *OF_AXOLOTL)
    add_bucket_packages(session, cell_python(session, CELLS["newest"]))  # which have the extra `fast`
    run_part(session, "newest", "bench", *session.posargs, beside=(AXOLOTL, BUCKETS))


@nox.session(venv_backend="none")
def pairs(session: nox.Session) -> None:
    """How runs go on in other ZeRO stages, precisions and world sizes: all pairs on two cells, and the tables."""
    for cell in ("oldest", "newest"):
        run_part(session, cell, "stage_pairs")


@nox.session(venv_backend="none")
def compare(session: nox.Session) -> None:
    """What Lightning, Trainer, Accelerate and DeepSpeed do with this package and without, and make the tables."""
    run_part(session, "newest", "compare")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff and mypy, the latter against the types of the everyday cell."""
    session.chdir(ROOT)
    typed = cell_python(session, CELLS["everyday"])
    tools = tools_python(session)
    session.run(tools, "-m", "ruff", "check", ".", external=True)
    session.run(tools, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(tools, "-m", "mypy", "--python-executable", typed, external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Write what is generated in `docs/`, and build it into `.nox/site`; a warning is an error."""
    session.chdir(ROOT)
    python = tools_python(session, "docs")
    folders = ("src", "ci", "ci/measure", "patches")
    environment = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders)}
    build = ("-m", "sphinx", "--quiet", "--fail-on-warning", "--fresh-env", "docs", str(ROOT / ".nox" / "site"))
    for step in (
        ("ci/measure/charts.py",),
        ("ci/measure/readme.py",),
        ("ci/upstream.py",),
        ("ci/reference.py",),
        build,
    ):
        session.run(python, *step, external=True, env=environment)
    session.log("open .nox/site/index.html")


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Build what is to be published into `dist/`, and try it as users get it; `-- TAG` must be that of the version."""
    session.chdir(ROOT)
    session.run(tools_python(session, "release"), "ci/release.py", *session.posargs, external=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        run(session, "everyday", "-m", "zipfile", "-e", str(wheel), folder)
        run_part(session, "everyday", "demo", beside=(Path(folder),))


def parity() -> int:
    """Which half of the parameters it is the turn of: the commit before had the other one."""
    count = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(count.stdout or 0) % 2  # there may be no git here


def log_written(session: nox.Session, files: list[Path]) -> None:
    """Tell which files now have what `ci/matrix.json` says."""
    for file in files:
        session.log(f"wrote what ci/matrix.json says of releases into {file.relative_to(ROOT)}")


def clone_head(session: nox.Session, source: str, name: str) -> Path:
    """Clone the newest commit of a repository into `.nox/heads`, and check out what is needed of it."""
    place = ROOT / ".nox" / "heads" / name
    shutil.rmtree(place, ignore_errors=True)
    git = ("git", "-C", str(place))
    session.run("git", "clone", "--quiet", "--no-checkout", source, str(place), external=True)
    session.run(*git, "sparse-checkout", "set", *CODE, external=True)
    session.run(*git, "checkout", "--quiet", external=True)
    return place


def run(session: nox.Session, cell: str, *arguments: str, **environment: str) -> None:
    """Run a Python program in a cell's environment, from the repository's root."""
    session.chdir(ROOT)
    python = cell_python(session, CELLS[cell])
    session.run(python, *arguments, env=CELLS[cell].environment | environment, external=True)


def run_part(session: nox.Session, cell: str, module: str, *arguments: str, beside: tuple[Path, ...] = ()) -> None:
    """Run a module of `ci/`, `ci/measure/` or `patches/` in a cell's environment, and with the folders beside it."""
    folders = ":".join(str(ROOT / folder) for folder in ("ci", "ci/measure", "tests", "patches", *beside))
    run(session, cell, "-m", module, *arguments, CELL=cell, PYTHONPATH=folders)


def run_promises(session: nox.Session, cell: str, *arguments: str) -> None:
    """Run the tests of the promises in a cell's environment, in two cells every test; keep what became of them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = () if cell in EVERY_TEST else ("-m", "not everyday")
    run_tests(session, cell, *chosen, f"--outcome={RESULTS / cell}.json", *arguments)


def save_for(session: nox.Session, cell: str) -> None:
    """Let other cells save the checkpoints that this one loads."""
    for other in CELLS[cell].takes_from:
        if not (SAVED / other.name / "zero3" / "facts.json").exists():
            run(session, other.name, "-m", "pytest", f"--saved={SAVED}", "-q", "-k", "test_saves_for_", CELL=other.name)


def run_tests(session: nox.Session, cell: str, *arguments: str, **environment: str) -> None:
    """Run pytest in a cell's environment, with the checkpoints of other cells that it loads."""
    save_for(session, cell)
    run_pytest(session, cell, *arguments, **environment)


def run_pytest(session: nox.Session, cell: str, *arguments: str, **environment: str) -> None:
    """Run pytest in a cell's environment; the tests look up what is expected of it."""
    # A test beyond its own limit of 600 s waits where no signal reaches it: all stacks are printed, and pytest ends.
    guard = ("-o", "faulthandler_timeout=700", "-o", "faulthandler_exit_on_timeout=true")
    pytest = ("-m", "pytest", f"--saved={SAVED}", *guard, *arguments)
    # Ranks and tests share the cores. With CI set, pytest compares long lists line by line, for hours if they differ.
    if cell in EVERY_TEST:
        add_bucket_packages(session, cell_python(session, CELLS[cell]))
    own = {"CELL": cell, "OMP_NUM_THREADS": "1", "CI": "", "BUILD_NUMBER": ""}
    run(session, cell, *pytest, **own, **environment)

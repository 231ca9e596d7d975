from __future__ import annotations

import faulthandler
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from kit.cell import CELL
from kit.processes import GRACE_SECONDS, Ranks
from matrix import cells
from tables import ROOT, code

if TYPE_CHECKING:
    from kit.checkpoints import Checkpoints

if CELL.name in ("everyday", "newest"):
    sys.path.append(str(ROOT / ".nox" / "buckets"))  # what the tests of buckets import, and `fast`
collect_ignore = [] if CELL.name == "everyday" else ["test_docs.py"]  # Sybil is in that cell alone


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(2, function, **arguments)` runs a function on two CPU ranks and returns their results.

    With `accelerator="gpu"` each of the ranks has a GPU.
    With `alone=True` the processes run nothing else, for what leaves a mark on DeepSpeed or minds one: once a process
    has used hpZ's groups, every later ZeRO-3 engine in it does.
    Once a rank has raised, the others have `grace` seconds to end too.
    """
    pools: dict[tuple[int, str], Ranks] = {}

    def run(
        world_size: int,
        function: Callable[..., Any],
        /,
        alone: bool = False,
        accelerator: str = "cpu",
        grace: float = GRACE_SECONDS,
        **arguments: Any,
    ) -> list[Any]:
        key = (world_size, accelerator)
        if key not in pools:
            pools[key] = Ranks(world_size, tmp_path_factory.mktemp(f"ranks{world_size}") / "output.txt", accelerator)
        if alone:
            pools[key].stop()
        try:
            return pools[key](function, grace, **arguments)
        finally:
            if alone:
                pools[key].stop()

    yield run
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def run_once(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`run_once(folder, 2, function, **arguments)` copies into a folder what a function has left in its `out`.

    It runs once in a module with the same arguments; each test has a copy of its own.
    """
    made: dict[str, Path] = {}

    def run(folder: Path, world_size: int, function: Callable[..., Any], /, **arguments: Any) -> None:
        key = f"{world_size} {function.__name__} {arguments}"
        if key not in made:
            ranks(world_size, function, out=str(out := tmp_path_factory.mktemp("once")), **arguments)
            made[key] = out
        shutil.copytree(made[key], folder, dirs_exist_ok=True)

    return run


@pytest.fixture(scope="session")
def checkpoints(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(stage, world_size)`: a folder with `small.ckpt` and `full.ckpt` of one moment."""
    from kit.checkpoints import Checkpoints

    return Checkpoints(ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def server() -> Iterator[dict[str, str]]:
    """Environment variables by which s3fs finds a server on loopback, which has an empty bucket `bucket`."""
    from kit.buckets import served

    with served() as variables:
        yield variables


@pytest.fixture(scope="session")
def run_demo() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_demo("--quantized")` runs the demo with these options."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command, variables = [sys.executable, "-m", "demo", *options], {**os.environ, "PYTHONPATH": str(ROOT / "ci")}
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500, check=False)

    return run


@pytest.fixture(scope="session")
def demo(run_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The demo, and where its checkpoints are, with `sizes.svg` beside them."""
    kept = tmp_path_factory.mktemp("demo") / "kept"
    picture = str(kept.with_name("sizes.svg"))
    return kept, run_demo("--keep", str(kept), "--picture", picture)


@pytest.fixture(scope="session")
def saved(request: pytest.FixtureRequest) -> Path:
    """Where cells leave their checkpoints for newer ones."""
    folder: Path | None = request.config.getoption("--saved")
    assert folder is not None, "pass --saved DIR, as the noxfile does, to say where older cells have left checkpoints"
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=["short", "rest"], help="run the short tests alone, as `nox` does, or all of the others"
    )
    parser.addoption("--half", type=int, choices=[0, 1], help="run each test with half of its parameters, or with one")
    parser.addoption("--saved", type=Path, help="where cells leave their checkpoints for newer ones to resume")
    parser.addoption(
        "--programs", type=Path, help="where clones of the programs of ci/matrix/programs.py are; runs these alone"
    )
    parser.addoption("--faults", action="store_true", help="run all of tests/faults, not the short part alone")
    parser.addoption("--rounds", type=int, default=1, help="how often --faults kills saves, with other seeds each time")
    parser.addoption("--soak", type=int, default=0, help="for how many minutes the soak goes on; otherwise for one run")
    parser.addoption("--soak-seed", type=int, default=0, help="the first seed of the soak; a second part takes another")
    parser.addoption("--outcome", type=Path, help="write what became of each promise into this JSON file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the cell's matrix says cannot run there, with its reason; a refused cell cannot start an engine.

    A cell with libraries that quantize runs the tests of quantized bases. No other cell does, but for the short ones in
    the everyday cell, whose bases need no library.
    """
    for test, why in CELL.cannot.items():
        found = [item for item in items if test in item.nodeid]
        if config.getoption("--outcome") and not found:
            raise pytest.UsageError(f"ci/matrix.json lists {test} as one that {CELL.name} cannot run; there is none")
        for item in found:
            item.add_marker(pytest.mark.skip(reason=why))
    if CELL.refused:
        _deselect(config, items, lambda item: "ranks" in getattr(item, "fixturenames", ()))
    if part := config.getoption("--part"):
        _deselect(config, items, lambda item: _is_short(item) != (part == "short"))
    _deselect(config, items, _is_of_other_cells)
    if CELL.quantizers:
        from kit.quantized import AVAILABLE

        _deselect(config, items, lambda item: _parameter(item, "kind") not in (None, *AVAILABLE))
    if "gpu" not in config.getoption("markexpr"):
        _deselect(config, items, lambda item: bool(item.get_closest_marker("gpu")))
    if config.getoption("markexpr") != "settings":
        _deselect(config, items, lambda item: any("all" in mark.args for mark in item.iter_markers("settings")))
        if CELL.name != "everyday":
            _deselect(config, items, lambda item: bool(item.get_closest_marker("once")))
    if not config.getoption("--programs"):
        _deselect(config, items, lambda item: bool(item.get_closest_marker("programs")))
    if CELL.patches:
        _deselect(config, items, lambda item: not item.get_closest_marker("series"))
    else:
        _deselect(config, items, lambda item: "alone" in getattr(item.get_closest_marker("series"), "args", ()))
    if (half := config.getoption("--half")) is not None:
        by_test = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            is_whole = item.get_closest_marker("in_order") is not None
            by_test[item.nodeid if is_whole else item.nodeid.partition("[")[0]].append(item)
        chosen = {item for tried in by_test.values() for item in tried[half % len(tried) :: 2]}
        _deselect(config, items, lambda item: item not in chosen)


def _is_short(item: pytest.Item) -> bool:
    """Whether it is one of the tests that `nox` runs: those of the promises in every cell, and those marked `short`.

    What needs checkpoints of other cells, and so their environments, is not.
    """
    in_every_cell = not item.get_closest_marker("everyday") and "saved" not in getattr(item, "fixturenames", ())
    return in_every_cell or bool(item.get_closest_marker("short"))


def _is_of_other_cells(item: pytest.Item) -> bool:
    if not item.get_closest_marker("quantized"):
        return bool(CELL.quantizers)
    return not CELL.quantizers and not (CELL.name == "everyday" and item.get_closest_marker("short"))


def _deselect(config: pytest.Config, items: list[pytest.Item], is_out: Callable[[pytest.Item], bool]) -> None:
    out = [item for item in items if is_out(item)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


def _parameter(item: pytest.Item, name: str) -> Any:
    """What a test is tried with; None where it is tried with nothing of that name."""
    call = getattr(item, "callspec", None)
    return call.params.get(name) if call else None


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped; empty if it was not."""
    return str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""  # type: ignore[index]


class Outcome:
    """What became of the tests of each promise, written into a file at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.begun = time.monotonic()
        self.promises: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.owners: defaultdict[str, list[str]] = defaultdict(list)
        self.skipped: list[str] = []
        self.found: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        promise = item.get_closest_marker("promise")
        if promise and (report.when == "call" or report.outcome != "passed"):
            self.promises[str(promise.args[0])][report.outcome] += 1
            if owner := _parameter(item, "by") or promise.kwargs.get("by"):
                self.owners[owner].append(_reason(report))
        if report.skipped and not item.get_closest_marker("everyday"):  # which a machine may not allow
            reason = _reason(report)
            self.skipped += [reason] if reason not in self.skipped else []
        self.found |= {name: str(state) for name, state in report.user_properties if name in CELL.states}
        return report

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        unlisted = [reason for reason in self.skipped if reason not in CELL.cannot.values()]
        if unlisted:
            print(f"\nSkipped, but not listed in ci/matrix.json: {unlisted}")
            session.exitstatus = 1
        outcome = {
            "entry": cells.entries()[CELL.name],
            "date": time.strftime("%Y-%m-%d"),
            "code": code(),
            "failed": bool(session.exitstatus),
            "found": self.found,
            "promises": self.promises,
            "owners": {
                owner: {"passed": said.count(""), "cannot": sorted({reason for reason in said if reason})}
                for owner, said in sorted(self.owners.items())
            },
            "releases": {package: CELL.locked(package) for package in cells.OWNERS},
            "skipped": self.skipped,
            "seconds": round(time.monotonic() - self.begun),
        }
        self.file.write_text(json.dumps(outcome, indent=1))


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """End pytest if a test that has failed is not torn down in time: pytest and its timeouts no longer watch it."""
    faulthandler.dump_traceback_later(120, exit=True, file=node.config.stash[fault_handler_stderr_fd_key])


def pytest_runtest_logfinish() -> None:
    """Let pytest go on after a failed test that was torn down."""
    faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure() -> None:
    """Print what keeps this process from its end, such as a child that it joins, and end it."""
    faulthandler.dump_traceback_later(60, exit=True, file=2)


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--outcome"):
        config.pluginmanager.register(Outcome(file))

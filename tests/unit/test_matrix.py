"""Version ranges, locks and tables agree with the matrix, which nox reads too, and the list of upstream's faults."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest
import readme
import upstream
from bench import __main__ as bench
from bench.timing import seconds, size
from compare import __main__ as compare
from compare import features
from kit.settings import SETTINGS
from matrix import cells, declared, results, table
from packaging.requirements import Requirement
from packaging.version import Version
from series.folder import PATCHES, line_for, lines
from tables import BENCHMARKS, CHARTS, COMPARISON, COMPATIBILITY, README_PICTURE
from tables import RESULTS as BLOCKS

from ds_frozen_patch.patching.tested import TESTED

pytestmark = [pytest.mark.short, pytest.mark.everyday, pytest.mark.once]
ROOT = Path(__file__).parent.parent.parent
CELLS = cells.read()
SERVED = [cell for cell in CELLS.values() if not cell.refused]


REGENERATE = "run nox -f ci/noxfile.py -s lock -- CELL, with the name of the cell that is new or changed"


def test_every_promise_has_a_row() -> None:
    listed = re.findall(r"^\| (\d+) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert list(map(int, listed)) == list(table.PROMISES)


def metadata() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def releases_of(package: str) -> list[Version]:
    """In all cells that are served; of Accelerate and transformers the locks know them."""
    locked = package in cells.OWNERS
    return [Version(str(cell.locked(package)) if locked else getattr(cell, package).split()[-1]) for cell in SERVED]


def test_malicious_releases_are_excluded() -> None:
    (lightning,) = re.findall("lightning>.*", metadata()["options.extras_require"]["lightning"])
    specifier = Requirement(lightning).specifier
    assert not {"2.6.2", "2.6.3"} & set(specifier.filter(["2.6.1", "2.6.2", "2.6.3", "2.6.4"]))
    locks = [file.read_text() for file in (ROOT / "ci" / "locks").glob("*.txt")]
    assert not [line for lock in locks for line in re.findall(r"^(?:pytorch-)?lightning==2\.6\.[23]\b.*", lock, re.M)]


def test_declared_releases_are_generated() -> None:
    for file, text in declared.texts().items():
        assert file.read_text(encoding="utf-8") == text, f"{file} is not as the matrix says: {REGENERATE}"


def test_a_new_release_needs_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell added by `propose`, with a new Python: every file that names releases is updated, and nothing else."""
    for module, name in ((cells, "MATRIX"), (declared, "SETUP"), (declared, "PROBE")):
        original: Path = getattr(module, name)
        monkeypatch.setattr(module, name, tmp_path / original.name)
        getattr(module, name).write_bytes(original.read_bytes())
    assert declared.write() == []
    newer = ("997.1.0", "998.2.1")
    cells.add(cells.propose(*newer) | {"python": "3.99"}, after=cells.nearest(*newer).name)
    before = {file: file.read_text().splitlines() for file in (declared.SETUP, declared.PROBE)}
    assert declared.write() == [declared.SETUP, declared.PROBE]
    added = {line.strip() for file in before for line in {*file.read_text().splitlines()} - {*before[file]}}
    assert added == {
        "Programming Language :: Python :: 3.99",
        "TESTED = " + json.dumps(TESTED | {"lightning": "997.1.0", "deepspeed": "998.2.1"}),
    }
    assert declared.write() == []


@pytest.mark.parametrize("name", {cell.lock: None for cell in CELLS.values()})
def test_locks(name: str) -> None:
    """A cell's lock and its base's contain all its pins, each with its hashes."""
    cell = CELLS[name]
    texts = [(ROOT / "ci" / "locks" / f"{lock}.txt").read_text() for lock in (name, cell.base)]
    own, below = (dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)) for text in texts)
    for pin in (*cell.pins, *cell.period):
        package, _, version = pin.partition("==")
        assert (below | own)[package] == version
    assert not {"torch", "triton"} & (own | below).keys()
    for text in texts:
        assert len(re.findall(r"^[\w.-]+==\S+ \\\n +--hash=sha256:", text, re.MULTILINE)) == len(
            re.findall(r"^[\w.-]+==", text, re.MULTILINE)
        )


def test_the_table_shows_the_last_full_run() -> None:
    last_run = json.loads(table.LAST_RUN.read_text())
    assert [outcome["entry"] for outcome in last_run.values()] == list(cells.entries().values()), (
        "run the whole matrix again"
    )
    assert COMPATIBILITY.read() == table.render(last_run).strip()


def test_the_table_shows_every_setting() -> None:
    shown = BLOCKS["settings"].read()
    rows = [[item.strip() for item in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert rows[0][1:] == [f"DeepSpeed {CELLS[cell].deepspeed}" for cell in ("everyday", "newest")]
    assert [row[0] for row in rows[2:]] == [setting.name for setting in SETTINGS], "run the settings again"


@pytest.mark.parametrize("session", BLOCKS)
def test_the_tables_show_the_results(session: str) -> None:
    found = json.loads(results.RESULTS.read_text())[session]
    assert BLOCKS[session].read() == results.RENDER[session](found).strip()


def test_the_table_shows_the_comparison() -> None:
    result = json.loads(compare.RESULTS.read_text())
    assert list(result["features"]) == list(features.FEATURES), "compare again"
    measured = (f"lightning {result['versions']['lightning']}", result["versions"]["deepspeed"])
    assert measured == (CELLS["newest"].lightning, CELLS["newest"].deepspeed)
    assert COMPARISON.read() == compare.render(result).strip()


def test_the_benchmarks_show_the_results() -> None:
    assert BENCHMARKS.read() == bench.render(json.loads(bench.RESULTS.read_text())).strip()


def test_the_charts_show_the_results() -> None:
    measured, _ = readme.read()
    texts = [(CHARTS / "saves.svg").read_text(encoding="utf-8"), README_PICTURE.read_text(encoding="utf-8")]
    ways = {way: cost for way, cost in readme.shown_case(measured)["ways"].items() if "floor" not in way}
    for cost in ways.values():
        assert f">{size(cost['bytes'][-1])}</text>" in texts[0], "draw them again: nox -f ci/noxfile.py -s docs"
        assert f">{seconds(cost)}</text>" in texts[0], "draw them again: nox -f ci/noxfile.py -s docs"
    for kinds in measured["checkpoint"]["found"].values():
        assert f": {size(sum(kinds.values()))}" in texts[1], "draw them again: nox -f ci/noxfile.py -s docs"


def test_every_promise_in_every_cell() -> None:
    last_run = json.loads(table.LAST_RUN.read_text())
    for name, outcome in last_run.items():
        shown = {int(promise) for promise, counts in outcome["promises"].items() if counts.get("passed")}
        by_patches = {1, 2, 3, 6, 7, 8, 9, 12}
        by_shim = {11, 12} if CELLS[name].refused else {1, 2, 3, 4, 5, 6, 7, 11, 12, 13}
        by_quantizers = {16}
        expected = by_quantizers if CELLS[name].quantizers else by_patches if CELLS[name].patches else by_shim
        assert expected <= shown, name
        assert not any(counts.get("failed") for counts in outcome["promises"].values()), name
        states = CELLS[name].states
        if "owners" not in outcome:  # it ran before there were tests of them
            states = {target: state for target, state in states.items() if target not in cells.OWNERS}
        elif expected == by_shim and not CELLS[name].refused:
            assert "19" in outcome["promises"]
            assert all(outcome["owners"][owner]["passed"] > 5 for owner in table.OWNERS), name
        # Cells with quantizers run their own tests alone; others have the same releases and look at their state.
        assert outcome["found"] == ({} if CELLS[name].quantizers else states), name


def test_the_file_is_as_the_propose_command_writes_it() -> None:
    text = cells.MATRIX.read_text(encoding="utf-8")
    assert ",\n".join(map(cells.formatted, json.loads(text)["cells"])) in text


@pytest.mark.parametrize("package", ["lightning", "deepspeed", "torch"])
def test_the_newest_release_is_named_once(package: str) -> None:
    matrix = json.loads(cells.MATRIX.read_text(encoding="utf-8"))
    newest = matrix["newest"][package]
    assert Version(newest) == max(releases_of(package))
    assert not [entry["name"] for entry in matrix["cells"] if newest in entry[package]]


def test_each_patched_cell_has_the_series_for_its_lightning() -> None:
    patched = {cell.name: cell for cell in CELLS.values() if cell.patches}
    assert {cell.patches for cell in patched.values()} == {line.name for line in lines(PATCHES)} - {"master"}
    for cell in patched.values():
        assert cell.patches == line_for(PATCHES, cell.lightning.split()[1]).name
        assert CELLS[cell.lock].twin == cell


OF_SERIES = [said["patch"] for faults in upstream.read().values() for said in faults.values() if "patch" in said]


@pytest.mark.parametrize("patch", OF_SERIES)
def test_each_patch_of_a_fault_is_in_a_series(patch: str) -> None:
    assert list(PATCHES.glob(f"**/{patch}"))


def test_the_page_shows_the_list_of_faults() -> None:
    assert upstream.BLOCK.read() == upstream.text().strip(), "write it again: nox -f ci/noxfile.py -s docs"

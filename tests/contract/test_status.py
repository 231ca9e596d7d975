"""Promise 12: `status()` and `patch()` report for the cell's releases what `ci/matrix.json` expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from kit.cell import CELL, TRAINER

import ds_frozen_patch

pytestmark = [pytest.mark.promise(12), pytest.mark.series]
PROGRAM = """
import importlib, json, sys
import ds_frozen_patch
from ds_frozen_patch.frameworks.plain import lacking
from ds_frozen_patch.patching.wrapping import TARGETS

INNER = {"deepspeed": "runtime.engine", "accelerate": "accelerator", "transformers": "trainer"}

def import_all():
    for name, state in EXPECTED.items():
        if state != "not installed":
            importlib.import_module(f"{name}.{INNER.get(name, 'strategies.deepspeed')}")

def states():
    return {name: item.state for name, item in ds_frozen_patch.status().items()}

EXPECTED = json.loads(sys.argv[1])
if "import first" in sys.argv:
    import_all()
found = {"before": states(), "refusal": None}
try:
    ds_frozen_patch.patch()
except ds_frozen_patch.PatchError as error:
    found["refusal"] = str(error)
found["patched"] = states()
import_all()
found["imported"] = states()
found["lacking"] = [lacking(what) for what in TARGETS if EXPECTED[what.name] != "not installed"]
found["problem"] = ds_frozen_patch.status().problem or None
found["found"] = {name: item.found for name, item in ds_frozen_patch.status().items()}
print("FOUND", json.dumps(found))
"""


STATES = CELL.states.items()


def found(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(CELL.states), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return answer


WORDS = {"has the flag": "has it itself" if CELL.patches else "wrapped"}
"""What `status()` says of what `ci/matrix.json` expects, once it is patched and imported."""
BEFORE = {"wrapped": "can be wrapped", "has the flag": "has it itself"}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([], id="patch first"),
        pytest.param(["import first"], id="import first", marks=(pytest.mark.everyday, pytest.mark.once)),
    ],
)
def test_status(order: list[str], record_property: Callable[[str, object], None]) -> None:
    answer = found(*order)
    if CELL.refused:
        assert f"deepspeed {CELL.deepspeed}" in answer["refusal"]
        assert "To do: install DeepSpeed 0.10.1 or newer" in answer["refusal"]
        expected = {name: state if state == "not installed" else "cannot be wrapped" for name, state in STATES}
        assert answer["imported"] == answer["before"] == expected
    else:
        assert answer["refusal"] is None
        assert answer["before"] == {name: BEFORE.get(state, state) for name, state in STATES}
        expected = {name: WORDS.get(state, state) for name, state in STATES}
        waiting = {} if order else {"wrapped": "waiting for import"}
        assert answer["patched"] == {name: waiting.get(state, state) for name, state in expected.items()}
        assert answer["imported"] == expected
        assert not any(answer["lacking"])
    assert answer["problem"] == answer["refusal"]
    complete = {name for name, said in answer["found"].items() if said.startswith("complete")}
    assert complete == {name for name, state in STATES if CELL.patches and state == "has the flag"}
    for name, state in STATES:
        record_property(name, state)


def command(*words: str, **environment: str) -> tuple[int, str]:
    """Run a command with the programs of this environment; return its exit status and what it has printed."""
    line = [sys.executable, "-m", "ds_frozen_patch", *words]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.once
def test_the_command() -> None:
    found = ds_frozen_patch.status()
    assert command("status") == (0, f"{found}\n")
    values = {"in_force": False, "problem": "", "frameworks": {name: asdict(item) for name, item in found.items()}}
    code, printed = command("status", "--json")
    assert (code, json.loads(printed)) == (0, values)
    under_run = ("run", "--", sys.executable, "-m", "ds_frozen_patch", "status")
    code, printed = command(*under_run)
    states = {line.partition(" ")[0]: line for line in printed.splitlines()[2:]}
    assert (code, printed.splitlines()[0]) == (0, "In force: yes")
    assert all("  waiting for import  " in states[name] for name in ("deepspeed", TRAINER))
    assert command(*under_run, DS_FROZEN_PATCH="0") == (0, f"{found}\n")
    code, printed = command("status", DS_FROZEN_PATCH="1")  # without the folder on PYTHONPATH
    assert code == 1
    assert "DS_FROZEN_PATCH=1 has no effect" in printed

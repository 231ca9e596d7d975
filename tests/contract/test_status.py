"""Promise 12: `status()` and `patch()` report for the cell's releases what `ci/matrix.json` expects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from kit.cell import CELL

import ds_frozen_patch
from ds_frozen_patch.cli import main

pytestmark = [pytest.mark.promise(12), pytest.mark.series]
PROGRAM = """
import importlib, json, sys
import ds_frozen_patch

INNER = {"deepspeed": "runtime.engine", "accelerate": "accelerator", "transformers": "trainer"}

def import_all():
    for name, state in EXPECTED.items():
        if state != "not installed":
            importlib.import_module(f"{name}.{INNER.get(name, 'strategies.deepspeed')}")

def states():
    return {name: (item.state, item.wrapped) for name, item in ds_frozen_patch.status().items()}

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
found["found"] = {name: item.found for name, item in ds_frozen_patch.status().items()}
print("FOUND", json.dumps(found))
"""


def found(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(CELL.states), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return answer


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([], id="patch first"),
        pytest.param(["import first"], id="import first", marks=(pytest.mark.everyday, pytest.mark.once)),
    ],
)
def test_status(order: list[str], record_property: Callable[[str, object], None]) -> None:
    answer = found(*order)
    for name, (state, _) in answer["imported"].items():
        record_property(name, state)
    if CELL.refused:
        assert f"deepspeed {CELL.deepspeed}" in answer["refusal"]
        assert "To do: install DeepSpeed 0.10.1 or newer" in answer["refusal"]
        assert answer["imported"] == answer["before"] == {name: [state, False] for name, state in CELL.states.items()}
        return
    assert answer["refusal"] is None
    unpatched = {"applied": "patchable"}
    armed = {"applied": "applied" if order else "armed"}
    assert answer["before"] == {name: [unpatched.get(state, state), False] for name, state in CELL.states.items()}
    assert {name: state for name, (state, _) in answer["patched"].items()} == {
        name: armed.get(state, state) for name, state in CELL.states.items()
    }
    # What has our patch series is left alone, and what it says of itself is more than "native".
    left_alone = ("not installed", "native") if CELL.patches else ("not installed",)
    assert answer["imported"] == {name: [state, state not in left_alone] for name, state in CELL.states.items()}
    complete = {name for name, said in answer["found"].items() if said.startswith("complete")}
    assert complete == {name for name, state in CELL.states.items() if CELL.patches and state == "native"}


@pytest.mark.short
@pytest.mark.everyday
@pytest.mark.once
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = ds_frozen_patch.status()
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps({k: asdict(one) for k, one in found.items()}))
